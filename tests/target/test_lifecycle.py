"""Start and end of a target: signals, port file, listeners, what counts as the same model."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.config import load_model_config
from ssd_engine.model_store import resolve_model
from ssd_engine.tokenizer import Tokenizer
from ssd_target.config import TargetConfig
from ssd_target.server import plan_target
from tests.processes import TargetProcess, collect, target, wait_until_ready

pytestmark = pytest.mark.services

# 127.0.0.1, ::1 and ::ffff:127.0.0.1 in /proc/net
LOOPBACK = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_while_loading_is_a_clean_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As a terminal sends Ctrl-C, and a service manager SIGTERM: to children, too."""
    with target(tmp_path, ready=False, new_session=True) as server:
        os.killpg(server.process.pid, number)
        assert server.wait_for_exit() == 0
        assert "Traceback" not in server.log()
        assert "error" not in server.log()


def test_a_signal_to_the_whole_group_drains_while_serving(tmp_path: Path) -> None:
    with target(tmp_path, "--tp", "2", new_session=True) as server:
        message = pb.GenerateRequest(
            text="Once", stop=pb.StopOptions(max_tokens=60, ignore_eos=True)
        )
        call = server.stub().Generate(message, timeout=120)
        first = next(call)
        os.killpg(server.process.pid, signal.SIGTERM)
        rest = [token for response in call for token in response.tokens.token_ids]
        assert first.started.prompt_tokens > 0
        assert len(rest) == 60
        assert server.wait_for_exit() == 0


def test_the_port_file_lives_as_long_as_the_service(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with target(tmp_path) as server:
        assert server.address.endswith(f":{port_file.read_text().strip()}")
        server.terminate()
        assert server.wait_for_exit() == 0
        assert not port_file.exists()


def test_every_process_listens_on_loopback_alone(tmp_path: Path) -> None:
    with target(tmp_path, "--tp", "2", "--metrics-listen", "127.0.0.1:0") as server:
        family = {server.process.pid, *descendants(server.process.pid)}
        addresses = listening(family)
        assert len(addresses) >= 3
        assert set(addresses) <= LOOPBACK


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


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def test_killing_the_front_ends_the_engine_and_its_ranks(tmp_path: Path) -> None:
    with target(tmp_path, "--tp", "2") as server:
        family = descendants(server.process.pid)
        assert len(family) >= 2
        server.kill()
        end = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in family):
            assert time.monotonic() < end
            time.sleep(0.05)


class TestFingerprint:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(resolve_model("stories-draft"), tmp_path / "model"))

    def fingerprint(self, model: Path, **options: str) -> str:
        plan = plan_target(TargetConfig(model=str(model), **options)).target  # type: ignore[arg-type]
        return plan.fingerprint(plan.load_tokenizer())

    def test_it_is_the_same_for_a_copy(self, copy: Path) -> None:
        assert self.fingerprint(copy) == self.fingerprint(resolve_model("stories-draft"))

    def test_another_dtype_is_another_text(self, copy: Path) -> None:
        assert self.fingerprint(copy) != self.fingerprint(copy, dtype="bfloat16")

    @pytest.mark.parametrize(
        ("file", "old", "new"),
        [
            ("config.json", '"rope_theta": 10000', '"rope_theta": 20000'),
            ("tokenizer_config.json", "<|story|>", "<|user|>"),
        ],
    )
    def test_another_configuration_or_template_is_another_text(
        self, copy: Path, file: str, old: str, new: str
    ) -> None:
        before = self.fingerprint(copy)
        text = (copy / file).read_text()
        assert old in text
        (copy / file).write_text(text.replace(old, new))
        assert self.fingerprint(copy) != before

    def test_other_merges_are_another_text(self, copy: Path) -> None:
        before = self.fingerprint(copy)
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        merges = tokenizer["model"]["merges"]
        merges[-1], merges[-2] = merges[-2], merges[-1]
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert self.fingerprint(copy) != before

    def test_other_weights_are_another_text(self, copy: Path) -> None:
        before = self.fingerprint(copy)
        file = copy / "model.safetensors"
        data = bytearray(file.read_bytes())
        header = int.from_bytes(data[:8], "little")
        data[8 + header + 10] ^= 1
        file.write_bytes(data)
        assert self.fingerprint(copy) != before


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> TargetProcess:
    with target(tmp_path_factory.mktemp("shared")) as process:
        wait_until_ready(process)
        yield process


def test_no_list_of_stop_strings_can_hold_up_the_server(server: TargetProcess) -> None:
    """Overlapping stop strings at the limit, over a long resumed output of nothing but matches."""
    directory = resolve_model("stories-target")
    letter = Tokenizer(directory, load_model_config(directory)).token_bytes.index(b"a")
    message = pb.GenerateRequest(
        text="Once",
        generated_token_ids=letter.to_bytes(4, "little") * 1900,
        stop=pb.StopOptions(max_tokens=1901, strings=["a" * 1000 + chr(98 + i) for i in range(7)]),
    )

    def timed(strings: list[str]) -> float:
        message.stop.strings[:] = strings
        begin = time.monotonic()
        assert len(collect(server.stub().Generate(message, timeout=240)).tokens) == 1
        return time.monotonic() - begin

    timed(["never"])  # from here on the prefix cache serves both alike
    harmless = timed(["never"])
    # Looking again at all that is held back, at every token, would be a hundred times slower.
    assert timed(["a" * 1000 + chr(98 + i) for i in range(7)]) < 10 * harmless
