"""/ssd/timeline asks targets in the name of the caller, and expects of them what the pool does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.processes import GatewayProcess, TargetProcess, TracedPair, gateway, target
from tests.security.certificates import Authority
from tests.security.conftest import TOKEN_FILE, TOKENS
from tests.waiting import wait_until

ASK = {"prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline")
    for name, content in (("tokens.toml", TOKEN_FILE), ("own", TOKENS["user"])):
        (folder / name).write_text(content)
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def named_target(folder: Path) -> Iterator[TargetProcess]:
    """Its certificate has a name, and not its address."""
    authority = Authority("ca")
    cert, key = authority.sign("target", hosts=("localhost",)).write(folder, "target")
    (folder / "ca.crt").write_bytes(authority.cert)
    flags = (
        *("--tls-cert", str(cert), "--tls-key", str(key), "--trace-events", "5000"),
        *("--token-file", str(folder / "tokens.toml")),
    )
    with target(folder / "target", *flags, ready=False) as process:
        yield process


@pytest.fixture(scope="module")
def front(folder: Path, named_target: TargetProcess) -> Iterator[GatewayProcess]:
    """Reaches the target by its name. A token of its own tells it the load, and not a trace."""
    flags = (
        *("--target-tls-ca", str(folder / "ca.crt"), "--target-token-file", str(folder / "own")),
        *("--token-file", str(folder / "tokens.toml")),
    )
    name = f"dns:///localhost:{named_target.address.rpartition(':')[2]}"
    with gateway(folder / "gateway", *flags, targets=[name]) as process:
        yield process


def told(
    front: GatewayProcess, path: str, key: str | None = None, **params: Any
) -> httpx2.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx2.get(front.url + path, headers=headers, params=params, timeout=60)


def test_a_target_behind_a_name_is_asked_with_the_caller_s_key(
    front: GatewayProcess, named_target: TargetProcess
) -> None:
    user = {"authorization": f"Bearer {TOKENS['user']}"}
    answer = httpx2.post(front.url + "/v1/completions", json=ASK, headers=user, timeout=60)
    about = answer.json()["metrics"]["ssd"]
    asked = {"target": about["target"], "sequence": about["sequence"]}
    timeline = told(front, "/ssd/timeline", TOKENS["admin"], **asked).json()
    assert timeline["problem"] == ""
    (track,) = timeline["tracks"]
    assert track["role"] == "target"
    assert {event["kind"] for event in track["events"]} >= {"forward"}
    assert told(front, "/ssd/timeline", TOKENS["user"], **asked).status_code == 403


def test_load_is_known_by_the_gateway_s_own_token(front: GatewayProcess) -> None:
    def targets() -> list[dict[str, Any]]:
        return list(told(front, "/ssd/fleet", TOKENS["user"]).json()["targets"])

    ready = wait_until(lambda: [each for each in targets() if each["ready"]], front.log)
    assert (ready[0]["model"], ready[0]["running"]) == ("stories-target", 0)


def test_drafts_that_are_not_asked_are_said_to_be_missing(
    traced_pair: TracedPair, tmp_path: Path
) -> None:
    address = traced_pair[0].address
    with gateway(tmp_path, "--no-draft-traces", targets=[address]) as process:
        httpx2.post(process.url + "/v1/completions", json=ASK, timeout=60).raise_for_status()
        timeline = told(process, "/ssd/timeline", target=address).json()
    assert [track["role"] for track in timeline["tracks"]] == ["target"]
    assert timeline["problem"] == "drafts are not asked for their part (--no-draft-traces)"
