"""Start and end of a target: signals, port file, listeners, what counts as the same model."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_target.config import TargetConfig
from ssd_target.front.server import plan_target
from tests.process_tree import descendants, is_alive
from tests.processes import TargetProcess, target
from tests.waiting import HANG_SECONDS, wait_until

# 127.0.0.1, ::1 and ::ffff:127.0.0.1 in /proc/net
LOOPBACK = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TargetProcess, Path]]:
    """A service of two ranks in a process group of its own, and its port file."""
    folder = tmp_path_factory.mktemp("two")
    flags = ("--tp", "2", "--metrics-listen", "127.0.0.1:0")
    with target(folder, *flags, new_session=True) as server:
        yield server, folder / "port"


def test_every_process_listens_on_loopback_alone(two_ranks: tuple[TargetProcess, Path]) -> None:
    server, _ = two_ranks
    addresses = listening({server.process.pid, *descendants(server.process.pid)})
    assert len(addresses) >= 3
    assert set(addresses) <= LOOPBACK


def test_a_signal_to_the_whole_group_drains_while_serving(
    two_ranks: tuple[TargetProcess, Path],
) -> None:
    """Comes last of those that share the service: its port file goes with it."""
    server, port_file = two_ranks
    assert server.address.endswith(f":{port_file.read_text().strip()}")
    message = pb.GenerateRequest(text="Once", stop=pb.StopOptions(max_tokens=60, ignore_eos=True))
    call = server.stub().Generate(message, timeout=HANG_SECONDS)
    first = next(call)
    os.killpg(server.process.pid, signal.SIGTERM)
    rest = [token for response in call for token in response.tokens.token_ids]
    assert first.started.prompt_tokens > 0
    assert len(rest) == 60
    assert server.wait_for_exit() == 0
    assert not port_file.exists()


def listening(pids: set[int]) -> list[str]:
    """Local addresses, as the kernel writes them, on which these processes listen."""
    sockets = {
        os.readlink(descriptor)
        for pid in pids
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        if descriptor.is_symlink()
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    ]


def test_killing_the_front_ends_the_engine_and_its_ranks(tmp_path: Path) -> None:
    with target(tmp_path, "--tp", "2") as server:
        family = descendants(server.process.pid)
        assert len(family) >= 2
        server.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in family))


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def other_configuration(model: Path) -> None:
    replace_in(model / "config.json", '"rope_theta": 10000', '"rope_theta": 20000')


def other_template(model: Path) -> None:
    replace_in(model / "tokenizer_config.json", "<|story|>", "<|user|>")


def other_merges(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def other_weights(model: Path) -> None:
    data = bytearray((model / "model.safetensors").read_bytes())
    header = int.from_bytes(data[:8], "little")
    data[8 + header + 10] ^= 1
    (model / "model.safetensors").write_bytes(data)


def fingerprint(model: Path, dtype: str = "float32") -> str:
    plan = plan_target(TargetConfig(str(model), dtype=dtype)).target
    return plan.fingerprint(plan.load_tokenizer())


@pytest.mark.parametrize(
    "change", [other_configuration, other_template, other_merges, other_weights]
)
def test_another_model_is_another_text(change: Callable[[Path], None], tmp_path: Path) -> None:
    """A copy is not, another dtype is."""
    shipped = resolve_model("stories-draft")
    copy = Path(shutil.copytree(shipped, tmp_path / "model"))
    before = fingerprint(copy)
    assert before == fingerprint(shipped)
    assert before != fingerprint(copy, "bfloat16")
    change(copy)
    assert fingerprint(copy) != before
