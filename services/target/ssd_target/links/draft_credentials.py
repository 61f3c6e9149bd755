"""What a target shows to speculation endpoints, and what it asks of them.

Files are read for each connection: one that is made anew uses what is there then.
"""

from dataclasses import dataclass
from pathlib import Path

import grpc

from ssd_engine.errors import ConfigError
from ssd_engine.process.secret_files import warn_of_readers
from ssd_serving.config import is_loopback
from ssd_serving.security.tls import check_ca

MAX_TOKEN = 4096  # characters
Options = list[tuple[str, object]]


@dataclass(frozen=True)
class DraftCredentials:
    ca: Path | None = None  # None: no TLS
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    insecure: bool = False  # the token may travel in the clear
    insecure_plane: bool = False  # rows may, beside a link with TLS

    def check(self) -> None:
        if self.ca is not None:
            check_ca("--draft-tls-ca", self.ca)
        if self.token_file is not None:
            self._token()
            warn_of_readers("--draft-token-file", self.token_file)

    def channel(self, address: str, server_name: str, options: Options) -> grpc.aio.Channel:
        """``server_name``: what the endpoint's certificate must be made out to."""
        if self.ca is None:
            return grpc.aio.insecure_channel(address, options=options)
        own: tuple[bytes, bytes] | tuple[None, None] = (None, None)
        if self.cert is not None and self.key is not None:
            own = (self.key.read_bytes(), self.cert.read_bytes())
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes(), *own)
        named = [*options, ("grpc.ssl_target_name_override", server_name)]
        return grpc.aio.secure_channel(address, credentials, options=named)

    def metadata(self, host: str) -> list[tuple[str, str]]:
        """The metadata of every call; raises ConfigError if the token would travel in the clear."""
        if self.token_file is None:
            return []
        self.check_host(host)
        return [("authorization", f"Bearer {self._token()}")]

    def check_host(self, host: str) -> None:
        unguarded = self.ca is None and not self.insecure and not is_loopback(host)
        if self.token_file is not None and unguarded:
            raise ConfigError(
                f"--draft-token-file: the token would travel in the clear to {host}; "
                "give --draft-tls-ca, or say --insecure"
            )

    def hides_rows(self, host: str) -> bool:
        """Whether tensor planes, which have no TLS, would tell others what the link does not."""
        return self.ca is not None and not self.insecure_plane and not is_loopback(host)

    def _token(self) -> str:
        flag = f"--draft-token-file {self.token_file}"
        try:
            text = self.token_file.read_text() if self.token_file is not None else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag}: {error}") from None
        token = text.strip()
        if not token or len(token) > MAX_TOKEN or not token.isascii() or not token.isprintable():
            raise ConfigError(f"{flag}: one token is needed, printable ASCII on one line")
        return token
