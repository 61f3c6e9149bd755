"""Trial Secrets: what the manifests ask for, and certificates that the services would accept."""

import hashlib
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.deploy.checks.references import dialled_names
from tests.deploy.manifests import OVERLAYS, manifests
from tests.deploy.needs import SECRETS
from tests.deploy.trial_secrets import trial_secrets, write_secrets
from tests.suite.tools import needs_tool

pytestmark = needs_tool("openssl")


@pytest.fixture(scope="module")
def secret_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_secrets(tmp_path_factory.mktemp("secrets"))


def openssl(*arguments: object) -> str:
    command = ["openssl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_they_are_all_that_an_operator_has_to_provide() -> None:
    assert {name: frozenset(keys) for name, keys in trial_secrets().items()} == SECRETS


@pytest.mark.parametrize(
    ("name", "purposes"),
    [
        ("ssd-target", ("sslserver", "sslclient")),
        ("ssd-draft", ("sslserver",)),
        ("ssd-gateway", ("sslserver",)),
        ("ssd-client", ("sslclient",)),
    ],
)
def test_certificates_are_good_for_what_they_are_used_for_and_have_their_keys(
    name: str, purposes: tuple[str, ...], secret_folder: Path
) -> None:
    files = secret_folder / f"{name}-tls"
    for purpose in purposes:
        checks = ("-x509_strict", "-purpose", purpose, "-CAfile", files / "ca.crt")
        openssl("verify", *checks, files / "tls.crt")
    public = openssl("x509", "-in", files / "tls.crt", "-noout", "-pubkey")
    assert openssl("pkey", "-in", files / "tls.key", "-pubout") == public


def test_certificates_have_the_names_that_are_dialled(secret_folder: Path) -> None:
    wanted = {pair for overlay in OVERLAYS for pair in dialled_names(manifests(overlay))}
    assert ("ssd-draft-tls", "ssd-draft-headless") in wanted
    for secret, host in wanted:
        file = secret_folder / secret / "tls.crt"
        said = openssl("x509", "-in", file, "-noout", "-checkhost", host)
        assert "does match certificate" in said, (secret, host)


@pytest.mark.parametrize(
    ("access", "tokens", "role"),
    [
        ("ssd-client-access", "ssd-target-tokens", "generate"),
        ("ssd-gateway-access", "ssd-target-tokens", "generate"),
        ("ssd-draft-access", "ssd-draft-tokens", "speculate"),
    ],
)
def test_servers_know_the_digests_of_the_tokens(access: str, tokens: str, role: str) -> None:
    secrets = trial_secrets()
    token = secrets[access]["token"].splitlines()[0]
    assert len(token) == 64
    entries = tomllib.loads(secrets[tokens]["tokens.toml"])["token"]
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert [entry["roles"] for entry in entries if entry["sha256"] == digest] == [[role]]
