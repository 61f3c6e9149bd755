"""A target and a draft that are guarded in every way: mutual TLS, tokens, limits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from ssd_client.connection.security import Security
from tests.processes import DraftProcess, TargetProcess, draft, target
from tests.security.certificates import Authority, Pair, replace
from tests.suite.dealing import shared_services

TOKENS = {
    "user": "the-token-of-a-user",
    "link": "the-token-of-targets",
    "admin": "the-token-of-the-operator",
    "small": "the-token-of-a-small-user",
    "thrifty": "the-token-of-a-thrifty-user",
    "expired": "the-token-of-last-year",
}
TOKEN_FILE = f"""
[[token]]
name = "user"
roles = ["generate"]
token = "{TOKENS["user"]}"

[[token]]
name = "link"
roles = ["speculate"]
token = "{TOKENS["link"]}"

[[token]]
name = "admin"
roles = ["admin"]
token = "{TOKENS["admin"]}"

[[token]]
name = "small"
roles = ["generate"]
token = "{TOKENS["small"]}"
limit_requests = 1
limit_prompt_tokens = 8

[[token]]
name = "thrifty"
roles = ["generate"]
token = "{TOKENS["thrifty"]}"
limit_tokens_per_minute = 12

[[token]]
name = "expired"
roles = ["generate"]
token = "{TOKENS["expired"]}"
expires = 2020-01-01T00:00:00Z
"""


@dataclass
class Guarded:
    folder: Path
    authority: Authority
    client: Pair
    target: TargetProcess
    draft: DraftProcess

    def channel(
        self,
        address: str,
        token: str | None = None,
        client: Pair | None = None,
        ca: bytes | None = None,
    ) -> grpc.Channel:
        """On a connection of its own; with the right certificates, where none are given.

        The token goes as metadata: gRPC asks credentials of a call from a thread of its own, for
        which a channel that is closed at that moment waits for ever.
        """
        pair = client or self.client
        security = Security(
            tls=True, ca=ca or self.authority.cert, cert=pair.cert, key=pair.key, token=token
        )
        return security.channel(address, [("grpc.use_local_subchannel_pool", 1)])

    def flags(self, token: str = "user") -> list[str]:
        """Of a client on the command line."""
        path = self.folder / f"{token}.token"
        path.write_text(f"{TOKENS[token]}\n")
        cert, key = self.client.write(self.folder, "client")
        return [
            *("--target", self.target.address, "--tls-ca", str(self.folder / "ca.crt")),
            *("--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(path)),
        ]


@shared_services
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority("test authority")
    replace(folder / "ca.crt", authority.cert)
    (folder / "tokens.toml").write_text(TOKEN_FILE)
    (folder / "link.token").write_text(TOKENS["link"])
    services = []
    for name in ("target", "draft"):
        cert, key = authority.sign(name).write(folder, name)
        services.append(
            [
                *("--tls-cert", str(cert), "--tls-key", str(key)),
                *("--tls-ca", str(folder / "ca.crt"), "--token-file", str(folder / "tokens.toml")),
                *("--health-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            ]
        )
    of_target, of_draft = services
    with draft(folder / "d", *of_draft, "--max-links-per-identity", "1", ready=False) as drafting:
        linked = [
            *("--draft", drafting.address, "--draft-tls-ca", str(folder / "ca.crt")),
            *("--draft-token-file", str(folder / "link.token"), "--no-auto-off"),
            *("--no-adapt-depth", "--wait", "10000", "--backup", "jit"),
        ]
        with target(folder / "t", *of_target, *linked, ready=False) as serving:
            yield Guarded(folder, authority, authority.sign("client"), serving, drafting)
