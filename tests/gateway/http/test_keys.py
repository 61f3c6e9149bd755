"""Keys and TLS of a gateway: the tokens of the other services hold here, and at the target, too."""

import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from starlette.requests import Request

from ssd_client.connection.security import Security
from ssd_gateway.http.keys import Keys
from ssd_serving.security.access import Access
from tests.processes import GatewayProcess, TargetProcess, gateway, target
from tests.security.certificates import Authority
from tests.security.conftest import TOKEN_FILE, TOKENS
from tests.waiting import HANG_SECONDS, wait_until

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens.toml").write_text(TOKEN_FILE)
    (folder / "tokens.toml").chmod(0o600)
    (folder / "own").write_text(TOKENS["admin"])
    (folder / "own").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def guarded_target(folder: Path) -> Iterator[TargetProcess]:
    tokens = ("--token-file", str(folder / "tokens.toml"))
    with target(folder / "target", *tokens) as process:
        yield process


@pytest.fixture(scope="module")
def guarded(folder: Path, guarded_target: TargetProcess) -> Iterator[GatewayProcess]:
    """Over TLS, with the same keys as its target."""
    authority = Authority("ca")
    cert, key = authority.sign("gateway").write(folder, "gateway")
    (folder / "ca.crt").write_bytes(authority.cert)
    flags = (
        *("--token-file", str(folder / "tokens.toml")),
        *("--tls-cert", str(cert), "--tls-key", str(key)),
        *("--cors-origin", "https://app.example"),
        *("--target-token-file", str(folder / "own")),
    )
    with gateway(
        folder / "gateway", *flags, targets=[guarded_target.address], ready=False
    ) as process:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with httpx2.Client(base_url=f"https://{process.address}", verify=context) as client:
            wait_until(lambda: client.get("/ready").status_code == 200, process.log)
        yield process


def sdk(folder: Path, guarded: GatewayProcess, key: str) -> openai.OpenAI:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    return openai.OpenAI(
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
    folder: Path,
    guarded: GatewayProcess,
    key: str,
    error: type[openai.APIStatusError],
    code: str,
) -> None:
    with pytest.raises(error) as caught:
        ask(sdk(folder, guarded, key))
    assert caught.value.code == code
    if caught.value.status_code == 401:
        assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_a_key_s_limits_hold_at_the_target(folder: Path, guarded: GatewayProcess) -> None:
    small = sdk(folder, guarded, TOKENS["small"])
    assert ask(small).choices[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        ask(small, prompt=PROMPT * 10)
    assert "may send 8" in caught.value.message
    with small.completions.create(
        model="stories-target",
        prompt=PROMPT,
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as limited:
            ask(small)
    assert int(limited.value.response.headers["retry-after"]) >= 1


def test_models_are_told_to_those_who_have_a_key(folder: Path, guarded: GatewayProcess) -> None:
    user = sdk(folder, guarded, TOKENS["user"])
    assert [model.id for model in user.models.list().data] == ["stories-target"]
    with pytest.raises(openai.AuthenticationError):
        sdk(folder, guarded, "none").models.list()


def test_the_gateway_s_own_token_stands_for_keys_that_nobody_checks(
    folder: Path, guarded_target: TargetProcess
) -> None:
    flags = ("--target-token-file", str(folder / "own"))
    with (
        gateway(folder / "open", *flags, targets=[guarded_target.address]) as process,
        openai.OpenAI(base_url=process.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        assert ask(client).choices[0].text


def test_what_one_caller_s_key_has_shown_is_not_told_to_others(
    folder: Path, guarded_target: TargetProcess
) -> None:
    """Of targets with keys, behind a gateway that has none and checks none."""

    def told(key: str | None, path: str = "/v1/models") -> httpx2.Response:
        headers = {} if key is None else {"authorization": f"Bearer {TOKENS[key]}"}
        return httpx2.get(process.url + path, headers=headers, timeout=60)

    def fleet(key: str | None) -> dict[str, Any]:
        (target,) = told(key, "/ssd/fleet").json()["targets"]
        return dict(target)

    def unknown(key: str) -> openai.APIStatusError:
        with (
            openai.OpenAI(base_url=process.url + "/v1", api_key=key, max_retries=0) as client,
            pytest.raises(openai.APIStatusError) as caught,
        ):
            ask(client, model="another")
        return caught.value

    with gateway(folder / "keyless", targets=[guarded_target.address]) as process:
        assert told(None).status_code == 401
        assert [model["id"] for model in told("user").json()["data"]] == ["stories-target"]
        assert told(None).status_code == 401
        assert told("expired").status_code == 401
        assert told("link").status_code == 403
        assert told("user", "/v1/models/stories-target").json()["id"] == "stories-target"
        assert fleet("user")["running"] == 0
        assert "model" not in fleet(None)
        assert unknown("none").status_code == 401
        assert "stories-target" in unknown(TOKENS["user"]).message


def test_limits_that_would_hold_nowhere_are_refused(folder: Path) -> None:
    def start(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ssd_gateway", "serve", "--target", "127.0.0.1:1"]
        return subprocess.run(
            [*command, "--check-config", *flags],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )

    limited, free = str(folder / "tokens.toml"), folder / "free.toml"
    free.write_text(TOKEN_FILE.partition('[[token]]\nname = "small"')[0])
    free.chmod(0o600)
    done = start("--token-file", limited, "--no-pass-keys")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--no-pass-keys: the limits of 'small' in --token-file" in line
    assert start("--token-file", limited).returncode == 0
    assert start("--token-file", str(free), "--no-pass-keys").returncode == 0


def test_the_page_needs_no_key_and_what_it_shows_does(
    folder: Path, guarded: GatewayProcess
) -> None:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with httpx2.Client(base_url=f"https://{guarded.address}", verify=context) as client:
        assert client.get("/").status_code == 200
        assert client.get("/health").status_code == 200
        for path in ("/ssd/fleet", "/metrics", "/ssd/timeline"):
            assert client.get(path).status_code == 401
        user = {"authorization": f"Bearer {TOKENS['user']}"}

        def running() -> int:
            (told,) = client.get("/ssd/fleet", headers=user).json()["targets"]
            return int(told["running"])  # asked with the gateway's own token

        wait_until(lambda: running() == 0)
        assert client.get("/ssd/timeline", headers=user).status_code == 403


def test_only_the_named_origin_may_call_it(folder: Path, guarded: GatewayProcess) -> None:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with httpx2.Client(base_url=f"https://{guarded.address}", verify=context) as client:
        asked = {"access-control-request-method": "POST"}
        named = client.options(
            "/v1/completions", headers={**asked, "origin": "https://app.example"}
        )
        assert named.headers["access-control-allow-origin"] == "https://app.example"
        other = client.options("/v1/completions", headers={**asked, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_targets_that_have_gone_are_forgotten() -> None:
    """Those that get no keys, as they are reached in the clear: it is said once of each."""

    class Pool(list[Any]):
        security = Security()

    pool = Pool()
    keys = Keys(Access(), pool, guarded=True, passes_on=True)  # type: ignore[arg-type]
    shown = Request({"type": "http", "headers": [(b"authorization", b"Bearer key")]})
    for number in range(300):
        target = SimpleNamespace(address=f"10.0.0.{number}:7410")
        pool[:] = [*pool[-2:], target]
        for _ in range(2):
            assert keys.metadata_for(shown, target) == ()  # type: ignore[arg-type]
    assert len(keys._said) <= len(pool)
