"""Keys and TLS of a gateway: the tokens of the other services hold here, and at the target, too."""

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from click.testing import CliRunner, Result
from starlette.requests import Request

from ssd_client.cli import cli
from ssd_client.connection.security import Security
from ssd_gateway.cli import main
from ssd_gateway.http.keys import Keys
from ssd_serving.security.access import Access
from tests.gateway.callers import ask as call
from tests.gateway.callers import sdk_of
from tests.processes import GatewayProcess, gateway, target
from tests.security.certificates import Authority
from tests.security.conftest import TOKEN_FILE, TOKENS
from tests.waiting import wait_until

PROMPT = "Once upon a time"
Sdk = Callable[[str], openai.OpenAI]


def write(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tokens, and the certificates of both."""
    folder, authority = tmp_path_factory.mktemp("guarded"), Authority("ca")
    write(folder / "tokens.toml", TOKEN_FILE)
    write(folder / "own", TOKENS["user"])
    (folder / "ca.crt").write_bytes(authority.cert)
    for name in ("gateway", "target"):
        # The target's certificate has a name, and not its address.
        hosts = ("localhost",) if name == "target" else ("localhost", "127.0.0.1")
        authority.sign(name, hosts=hosts).write(folder, name)
    return folder


def guards(folder: Path, name: str) -> tuple[str, ...]:
    """Flags of a service that has keys and TLS."""
    tls = ("--tls-cert", str(folder / f"{name}.crt"), "--tls-key", str(folder / f"{name}.key"))
    return (*tls, "--token-file", str(folder / "tokens.toml"))


@pytest.fixture(scope="module")
def guarded_target(folder: Path) -> Iterator[str]:
    """By its name."""
    flags = (*guards(folder, "target"), "--trace-events", "5000")
    with target(folder / "at-target", *flags, ready=False) as process:
        yield f"dns:///localhost:{process.address.rpartition(':')[2]}"


@contextmanager
def before(folder: Path, name: str, *flags: str, target: str) -> Iterator[GatewayProcess]:
    """A gateway in front of the guarded target."""
    ca = ("--target-tls-ca", str(folder / "ca.crt"))
    with gateway(folder / name, *ca, *flags, targets=[target], ready=False) as process:
        yield process


def trusting(folder: Path, front: GatewayProcess) -> httpx2.Client:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    return httpx2.Client(base_url=f"https://{front.address}", verify=context)


@pytest.fixture(scope="module")
def guarded(folder: Path, guarded_target: str) -> Iterator[GatewayProcess]:
    """Over TLS, with the same keys as its target. Its own tells it the load, and not a trace."""
    own = ("--target-token-file", str(folder / "own"), "--cors-origin", "https://app.example")
    flags = (*guards(folder, "gateway"), *own)
    with before(folder, "at-gateway", *flags, target=guarded_target) as process:
        with trusting(folder, process) as client:
            wait_until(lambda: client.get("/ready").status_code == 200, process.log)
        yield process


@pytest.fixture(scope="module")
def https(folder: Path, guarded: GatewayProcess) -> Iterator[httpx2.Client]:
    with trusting(folder, guarded) as client:
        yield client


@pytest.fixture
def sdk(folder: Path, guarded: GatewayProcess) -> Callable[[str], openai.OpenAI]:
    """A client with this key."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    return lambda key: openai.OpenAI(
        base_url=f"https://{guarded.address}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=context),
    )


def ask(client: openai.OpenAI, **changes: Any) -> Any:
    return client.completions.create(
        **{"model": "stories-target", "prompt": PROMPT, "max_tokens": 4, **changes}
    )


@pytest.mark.parametrize(
    ("key", "error", "code"),
    [
        ("a-key-that-nobody-has-given-out", openai.AuthenticationError, "invalid_api_key"),
        (TOKENS["expired"], openai.AuthenticationError, "invalid_api_key"),
        (TOKENS["link"], openai.PermissionDeniedError, "insufficient_permissions"),
    ],
)
def test_a_wrong_key_is_refused(
    sdk: Sdk, key: str, error: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(error) as caught:
        ask(sdk(key))
    assert caught.value.code == code
    if caught.value.status_code == 401:
        assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_a_key_s_limits_hold_at_the_target(sdk: Sdk) -> None:
    small = sdk(TOKENS["small"])
    assert ask(small).choices[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        ask(small, prompt=PROMPT * 10)
    assert "may send 8" in caught.value.message
    with ask(small, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as limited:
            ask(small)
    assert int(limited.value.response.headers["retry-after"]) >= 1


def test_the_gateway_s_own_token_stands_for_keys_that_nobody_checks(
    folder: Path, guarded_target: str
) -> None:
    flags = ("--target-token-file", str(folder / "own"))
    with (
        before(folder, "open", *flags, target=guarded_target) as process,
        sdk_of(process) as client,
    ):
        wait_until(process.is_ready, process.log)
        assert ask(client).choices[0].text


def test_what_one_caller_s_key_has_shown_is_not_told_to_others(
    folder: Path, guarded_target: str
) -> None:
    """Of targets with keys, behind a gateway that has none and checks none."""
    with before(folder, "keyless", target=guarded_target) as process:
        wait_until(process.is_ready, process.log)

        def told(key: str | None, path: str = "/v1/models", body: Any = None) -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {TOKENS[key]}"} if key else {}
            answer = call(process, path, body, headers)
            return answer.status, json.load(answer)

        assert told(None)[0] == 401
        assert [model["id"] for model in told("user")[1]["data"]] == ["stories-target"]
        assert [told(key)[0] for key in (None, "expired", "link")] == [401, 401, 403]
        assert told("user", "/v1/models/stories-target")[1]["id"] == "stories-target"
        assert told("user", "/ssd/fleet")[1]["targets"][0]["running"] == 0
        assert "model" not in told(None, "/ssd/fleet")[1]["targets"][0]
        other = {"model": "another", "prompt": PROMPT}
        assert told(None, "/v1/completions", other)[0] == 401
        assert "stories-target" in str(told("user", "/v1/completions", other))


def test_limits_that_would_hold_nowhere_are_refused(folder: Path) -> None:
    def start(*flags: str) -> Result:
        given = ["serve", "--target", "127.0.0.1:1", "--check-config", *flags]
        return CliRunner().invoke(main, given)

    limited, free = folder / "tokens.toml", folder / "free.toml"
    write(free, TOKEN_FILE.partition('[[token]]\nname = "small"')[0])
    done = start("--token-file", str(limited), "--no-pass-keys")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "--no-pass-keys: the limits of 'small' in --token-file" in done.stderr
    assert start("--token-file", str(limited)).exit_code == 0
    assert start("--token-file", str(free), "--no-pass-keys").exit_code == 0


def test_the_page_needs_no_key_and_what_it_shows_does(https: httpx2.Client) -> None:
    for path, status in (
        ("/", 200),
        ("/health", 200),
        ("/ssd/fleet", 401),
        ("/metrics", 401),
        ("/v1/models", 401),
    ):
        assert https.get(path).status_code == status
    user, admin = ({"authorization": f"Bearer {TOKENS[name]}"} for name in ("user", "admin"))

    def running() -> int:
        (told,) = https.get("/ssd/fleet", headers=user).json()["targets"]
        return int(told["running"])  # asked with the gateway's own token

    wait_until(lambda: running() == 0)
    asked = {"prompt": PROMPT, "max_tokens": 4}
    about = https.post("/v1/completions", json=asked, headers=user, timeout=60).json()["metrics"]
    place = {name: about["ssd"][name] for name in ("target", "sequence")}
    # A trace is asked for with the caller's key.
    answers = [https.get("/ssd/timeline", headers=each, params=place) for each in ({}, user, admin)]
    assert [answer.status_code for answer in answers] == [401, 403, 200]
    (track,) = answers[-1].json()["tracks"]
    assert (answers[-1].json()["problem"], track["role"]) == ("", "target")
    assert "forward" in {event["kind"] for event in track["events"]}


def test_the_command_shows_its_key_over_tls(folder: Path, guarded: GatewayProcess) -> None:
    pair = ("--tls-cert", str(folder / "gateway.crt"), "--tls-key", str(folder / "gateway.key"))
    asked = ["generate", PROMPT, "--max-tokens", "4", "--url", f"https://{guarded.address}"]
    asked += [*pair, "--tls-ca", str(folder / "ca.crt")]
    refused = CliRunner().invoke(cli, asked)
    assert (refused.exit_code, "a token is needed" in refused.stderr) == (2, True)
    served = CliRunner().invoke(cli, [*asked, "--token-file", str(folder / "own")])
    assert served.exit_code == 0, served.stderr


def test_only_the_named_origin_may_call_it(https: httpx2.Client) -> None:
    asked = {"access-control-request-method": "POST"}
    named, other = (
        https.options("/v1/completions", headers={**asked, "origin": origin})
        for origin in ("https://app.example", "https://b.example")
    )
    assert named.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in other.headers


def test_a_key_does_not_travel_in_the_clear_to_another_machine() -> None:
    pool = type("Pool", (list,), {"security": Security()})()
    keys = Keys(Access(), pool, guarded=True, passes_on=True)  # type: ignore[arg-type]
    shown = Request({"type": "http", "headers": [(b"authorization", b"Bearer key")]})
    target = SimpleNamespace(address="10.0.0.1:7410")
    assert keys.metadata_for(shown, target) == ()  # type: ignore[arg-type]
