"""Token files: what they say, what they may not say, and that they may change at any time."""

import hashlib
from pathlib import Path

import pytest

from ssd_engine.errors import ConfigError, SSDError
from ssd_serving.rpc.status import NotAllowed, Unauthenticated
from ssd_serving.security import tokens as tokens_module
from ssd_serving.security.access import Access
from ssd_serving.security.allowances import Allowance
from ssd_serving.security.tokens import Role, find_token, load_tokens

GENERATE = "/ssd.v1.TargetService/Generate"
SPECULATE = "/ssd.v1.SpeculationService/Speculate"
TRACE = "/ssd.v1.TraceService/GetTrace"
SECRET = "a-token-that-nobody-guesses"
GOOD = f"""
[[token]]
name = "team-a"
roles = ["generate"]
token = "{SECRET}"
limit_requests = 3

[[token]]
name = "link"
roles = ["speculate"]
sha256 = "{hashlib.sha256(b"a-token-of-targets").hexdigest()}"

[[token]]
name = "root"
roles = ["admin"]
token = "a-token-of-the-operator"

[[token]]
name = "late"
roles = ["generate"]
token = "a-token-that-is-over"
expires = 2020-01-01T00:00:00Z
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(GOOD)
    return path


def shown(token: str) -> list[tuple[str, str]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def test_a_file_says_who_may_do_what(file: Path) -> None:
    tokens = load_tokens(file)
    assert [token.name for token in tokens] == ["team-a", "link", "root", "late"]
    assert tokens[0].roles == {Role.GENERATE}
    assert tokens[0].allowance == Allowance(requests=3)
    assert tokens[3].is_expired()
    found = find_token(tokens, "a-token-of-targets")
    assert found is not None
    assert found.name == "link"
    assert find_token(tokens, SECRET + "x") is None
    assert find_token(tokens, "") is None
    assert SECRET not in repr(tokens)


def test_every_token_is_compared_in_constant_time(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, all are looked at, by a comparison that takes the same time."""
    compared: list[bytes] = []
    original = tokens_module.hmac.compare_digest

    def compare(ours: bytes, theirs: bytes) -> bool:
        compared.append(ours)
        return original(ours, theirs)

    monkeypatch.setattr(tokens_module.hmac, "compare_digest", compare)
    tokens = load_tokens(file)
    for presented in (SECRET, "a-token-of-the-operator", "nobody's"):
        compared.clear()
        find_token(tokens, presented)
        assert compared == [token.digest for token in tokens]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "[[token]] tables are needed"),
        ("token = 3", "[[token]] tables are needed"),
        ("[[token]]\nname =", "is not TOML"),
        ('[[token]]\nname = ""', "token 1: name must be"),
        ('[[token]]\nname = "a"\nroles = ["write"]', "roles must be a list of generate, speculate"),
        ('[[token]]\nname = "a"\nroles = []', "roles must be a list"),
        ('[[token]]\nname = "a"\nroles = ["admin"]', "either token or sha256"),
        ('[[token]]\nname = "a"\nroles = ["admin"]\ntoken = "short"', "at least 16 characters"),
        ('[[token]]\nname = "a"\nroles = ["admin"]\nsha256 = "abc"', "64 hexadecimal digits"),
        (f"{GOOD}\nexpires = 2027-01-01", "is not TOML"),
        (GOOD.replace("2020-01-01T00:00:00Z", "2020-01-01T00:00:00"), "a time with a zone"),
        (GOOD.replace("limit_requests = 3", "limit_requests = 0"), "above 0, got 0"),
        (GOOD.replace("limit_requests", "limit_request"), "limit_request is not known"),
        (GOOD.replace("a-token-of-the-operator", SECRET), "the same token twice"),
    ],
)
def test_a_bad_file_is_refused_by_what_is_wrong(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tokens(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "token", "error"),
    [
        (GENERATE, SECRET, None),
        (GENERATE, "a-token-of-targets", NotAllowed),
        (GENERATE, "a-token-of-the-operator", None),
        (GENERATE, "a-token-that-is-over", Unauthenticated),
        (GENERATE, "wrong", Unauthenticated),
        (SPECULATE, "a-token-of-targets", None),
        (SPECULATE, SECRET, NotAllowed),
        (TRACE, SECRET, NotAllowed),
        (TRACE, "a-token-of-the-operator", None),
        ("/anything.New/Method", SECRET, NotAllowed),
        ("/grpc.health.v1.Health/Check", "wrong", None),
    ],
)
def test_a_role_opens_its_own_service(
    file: Path, method: str, token: str, error: type[SSDError] | None
) -> None:
    access = Access(file)
    if error is None:
        access.check(method, shown(token))
    else:
        with pytest.raises(error):
            access.check(method, shown(token))


@pytest.mark.parametrize("metadata", [[], [("authorization", "Basic abc")], [("other", SECRET)]])
def test_without_a_token_nothing_is_open(file: Path, metadata: list[tuple[str, str]]) -> None:
    refusals: list[str] = []
    with pytest.raises(Unauthenticated, match="Bearer TOKEN"):
        Access(file, refusals.append).check(GENERATE, metadata)
    assert refusals == ["missing"]


def test_tokens_change_while_the_service_runs(file: Path) -> None:
    """What cannot be read leaves those that are known."""
    failures: list[int] = []
    access, new = Access(file, on_reload_failure=lambda: failures.append(1)), "next-week's-token"
    access.check(GENERATE, shown(SECRET))
    for content in (GOOD.replace(SECRET, new), "half a fi", None):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        access.check(GENERATE, shown(new))
        with pytest.raises(Unauthenticated):
            access.check(GENERATE, shown(SECRET))
    assert len(failures) >= 2
    file.write_text(GOOD)
    access.check(GENERATE, shown(SECRET))
