"""What is refused before anything listens: unguarded ports, files that are not what they should be,
tokens that would travel in the clear."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssd_client.cli import cli
from ssd_draft.cli import main as draft_main
from ssd_gateway.cli import main as gateway_main
from ssd_serving.rpc.interfaces import interface_to
from ssd_serving.security.access import Access
from ssd_target.cli import main as target_main
from tests.security.certificates import Authority

TOKENS = """
[[token]]
name = "a"
roles = ["admin"]
token = "a-token-that-nobody-guesses"
"""
PROGRAMS = {"target": (target_main, "stories-target"), "draft": (draft_main, "stories-draft")}
TLS = ("--tls-cert", "@one.crt", "--tls-key", "@one.key")
Check = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    authority = Authority("authority")
    (folder / "ca.crt").write_bytes(authority.cert)
    authority.sign("one").write(folder, "one")
    authority.sign("two").write(folder, "two")
    (folder / "tokens.toml").write_text(TOKENS)
    (folder / "token").write_text("a-token-that-nobody-guesses\n")
    (folder / "empty").write_text("")
    (folder / "garbage").write_bytes(b"\0\1\2 garbage")
    for each in folder.iterdir():
        each.chmod(0o600)
    return folder


def placed(folder: Path, flags: tuple[str, ...]) -> list[str]:
    """@NAME is a file of the folder."""
    return [str(folder / flag[1:]) if flag.startswith("@") else flag for flag in flags]


@pytest.fixture(params=["target", "draft"])
def check(request: pytest.FixtureRequest, folder: Path) -> Check:
    """Exit code and output of ``serve … --check-config``."""
    main, model = PROGRAMS[request.param]

    def run(*flags: str) -> tuple[int, str]:
        command = ["serve", model, *placed(folder, flags), "--check-config"]
        result = CliRunner().invoke(main, command)
        return result.exit_code, result.output

    return run


@pytest.mark.parametrize(
    "flags",
    [
        ("--listen", "0.0.0.0:0"),
        ("--listen", "[::]:0"),
        ("--listen", "192.0.2.1:0"),
        ("--listen", "some.host:0"),
        ("--metrics-listen", "0.0.0.0:0"),
        ("--token-file", "@tokens.toml", "--metrics-listen", "0.0.0.0:0"),
    ],
)
def test_nothing_listens_unguarded_beyond_the_host(check: Check, flags: tuple[str, ...]) -> None:
    code, output = check(*flags)
    assert code == 2
    assert "nothing guards it" in output
    assert "--insecure" in output
    assert len(output.splitlines()) == 1
    code, output = check(*flags, "--insecure")
    elsewhere = "192.0.2.1:0" in flags or "some.host:0" in flags  # addresses of no interface here
    assert code == (2 if elsewhere else 0), output
    assert "nothing guards it" not in output


@pytest.mark.parametrize(
    "flags",
    [
        ("--listen", "127.8.8.8:0"),
        ("--listen", "[::1]:0"),
        ("--listen", "localhost:0"),
        (*TLS, "--metrics-listen", "0.0.0.0:0"),
        (*TLS, "--tls-ca", "@ca.crt", "--listen", "0.0.0.0:0"),
        (*TLS, "--token-file", "@tokens.toml", "--listen", "0.0.0.0:0"),
        ("--token-file", "@tokens.toml", "--listen", "0.0.0.0:0"),
        ("--health-listen", "0.0.0.0:0"),
    ],
)
def test_what_is_guarded_or_stays_on_the_host_may_listen(
    check: Check, flags: tuple[str, ...]
) -> None:
    code, output = check(*flags)
    assert code == 0, output


@pytest.mark.parametrize("program", [*PROGRAMS, "gateway"])
def test_tls_alone_is_no_guard(program: str, folder: Path) -> None:
    """It encrypts, and says nothing of who calls."""
    main, about = {**PROGRAMS, "gateway": (gateway_main, "--target=127.0.0.1:1")}[program]
    command = ["serve", about, *placed(folder, TLS), "--listen", "0.0.0.0:0", "--check-config"]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert "TLS alone lets everybody in; give --tls-ca, or --token-file" in refused.output
    assert len(refused.output.splitlines()) == 1
    for guard in (("--tls-ca", "@ca.crt"), ("--token-file", "@tokens.toml"), ("--insecure",)):
        allowed = CliRunner().invoke(main, [*command, *placed(folder, guard)])
        assert allowed.exit_code == 0, allowed.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tls-cert", "@one.crt"), "--tls-cert and --tls-key belong together"),
        (("--tls-ca", "@ca.crt"), "--tls-ca needs --tls-cert"),
        (("--tls-cert", "@one.crt", "--tls-key", "@two.key"), "not a PEM certificate and its key"),
        (("--tls-cert", "@garbage", "--tls-key", "@one.key"), "not a PEM certificate and its key"),
        (("--tls-cert", "@nowhere", "--tls-key", "@one.key"), "No such file"),
        ((*TLS, "--tls-ca", "@garbage"), "--tls-ca"),
        ((*TLS, "--tls-ca", "@empty"), "--tls-ca"),
        (("--token-file", "@nowhere"), "No such file"),
        (("--token-file", "@empty"), "[[token]] tables are needed"),
        (("--token-file", "@garbage"), "--token-file"),
        (("--health-listen", "nowhere"), "--health-listen: HOST:PORT"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    check: Check, flags: tuple[str, ...], words: str
) -> None:
    code, output = check(*flags)
    assert code == 2
    assert words in output
    assert len(output.splitlines()) == 1


def is_warned_of(run: Callable[[], str], flag: str, path: Path) -> list[bool]:
    """With the modes that a Secret may be mounted with, and with those that it had better not."""
    found = []
    for bits in (0o600, 0o440, 0o660, 0o644, 0o602):
        path.chmod(bits)
        found.append(f"{flag}: {path} is open to every user: chmod o= {path}" in run())
    path.chmod(0o600)
    return found


GUARDED = (*TLS, "--token-file", "@tokens.toml")
FAR = ("--draft-tls-ca", "@ca.crt", "--draft-token-file", "@token", "--draft", "192.0.2.1:7420")


@pytest.mark.parametrize(
    ("check", "flags", "flag", "name"),
    [
        ("target", GUARDED, "--tls-key", "one.key"),
        ("target", GUARDED, "--token-file", "tokens.toml"),
        ("target", FAR, "--draft-token-file", "token"),
        ("draft", GUARDED, "--tls-key", "one.key"),
        ("draft", GUARDED, "--token-file", "tokens.toml"),
    ],
    indirect=["check"],
)
def test_a_secret_that_every_user_can_read_is_warned_of(
    folder: Path, check: Check, flags: tuple[str, ...], flag: str, name: str
) -> None:
    """It is used all the same: so a Secret of Kubernetes is mounted where nobody says how."""

    def run() -> str:
        code, output = check(*flags)
        assert code == 0, output
        return output

    assert is_warned_of(run, flag, folder / name) == [False, False, False, True, True]


@pytest.mark.parametrize(("flag", "name"), [("--token-file", "token"), ("--tls-key", "one.key")])
def test_a_client_is_warned_of_it_too(
    folder: Path, flag: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = (*TLS, "--tls-ca", "@ca.crt", "--token-file", "@token")

    def run() -> str:
        with pytest.raises(SystemExit):  # nobody is there
            cli.main(["info", "--target", "127.0.0.1:1", *placed(folder, flags)])
        return capfd.readouterr().err

    assert is_warned_of(run, flag, folder / name) == [False, False, False, True, True]


def test_a_secret_is_looked_at_again_when_it_has_changed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access, tokens = Access(folder / "tokens.toml"), folder / "tokens.toml"
    shown = [("authorization", "Bearer a-token-that-nobody-guesses")]
    for bits, warned in ((0o640, False), (0o644, True), (0o600, True)):
        tokens.chmod(bits)
        access.check("/ssd.v1.TargetService/Generate", shown)
        assert ("is open to every user" in caplog.text) is warned


@pytest.mark.parametrize("check", ["target"], indirect=True)
@pytest.mark.parametrize(
    ("address", "flags", "words"),
    [
        ("192.0.2.1:7420", ("@token",), "in the clear to 192.0.2.1"),
        ("192.0.2.1:7420", ("@token", "--draft-tls-ca", "@ca.crt"), ""),
        ("192.0.2.1:7420", ("@token", "--insecure"), ""),
        ("127.0.0.1:7420", ("@token",), ""),
        ("127.0.0.1:7420", ("@empty",), "one token is needed"),
    ],
)
def test_a_target_shows_its_token_to_nobody_in_the_clear(
    check: Check, address: str, flags: tuple[str, ...], words: str
) -> None:
    code, output = check("--draft", address, "--draft-token-file", *flags)
    assert code == (2 if words else 0), output
    assert words in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--token-file", "@token"), "in the clear to 192.0.2.1:1"),
        (("--token-file", "@empty", "--tls"), "one token is needed"),
        (("--tls-cert", "@one.crt", "--tls-ca", "@ca.crt"), "belong together"),
        (("--tls-server-name", "x"), "need --tls-ca or --tls"),
        (("--tls-ca", "@nowhere"), "No such file"),
    ],
)
def test_a_client_is_told_what_it_lacks(
    folder: Path, flags: tuple[str, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["info", "--target", "192.0.2.1:1", *placed(folder, flags)])
    assert caught.value.code == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("peer", "interfaces"),
    [
        ("ipv4:127.0.0.1:4711", ["127.0.0.1"]),
        ("ipv6:%5B::1%5D:4711", ["::1", ""]),  # a host may have no IPv6
        ("unix:/some/path", [""]),
        ("nonsense", [""]),
    ],
)
def test_the_interface_of_a_link_is_the_one_on_the_way_to_the_peer(
    peer: str, interfaces: list[str]
) -> None:
    """Where a draft waits for the target's side of a tensor plane."""
    assert interface_to(peer) in interfaces
