"""``ssd-target`` at start-up: bad input is one line and exit code 2, before anything is loaded."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.models.tensor_parallel import rank_device
from ssd_serving.command_line import CONTEXT, EVERYDAY, GROUPS
from ssd_target.cli import join, main, serve
from ssd_target.config import TargetConfig
from tests.processes import SHIPPED_DRAFT
from tests.suite.forked_services import start_service
from tests.waiting import HANG_SECONDS


def check(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of ``ssd-target serve … --check-config``."""
    result = CliRunner().invoke(main, ["serve", *arguments, "--check-config"], env=env)
    return result.exit_code, result.output


def check_shipped(*flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    return check("stories-target", *flags, env=env)


def test_check_config_accepts_the_shipped_models() -> None:
    for name in ("stories-target", "stories-draft"):
        code, output = check(name)
        assert code == 0
        assert output.startswith(f"ok: {name}")


DRAFTS = ("127.0.0.1:7420", "dns:///drafts:7420", "file:///etc/ssd/drafts", "[::1]:7420")
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        ([*(f"--draft={each}" for each in DRAFTS), "--mode=ssd", "--discover-seconds=0.5"], {}),
        (["--max-model-len", "4096", "--allow-long-context"], {}),
        (["--tp", "2"], {"SSD_TARGET_TP": "3"}),  # a flag wins over its variable
    ],
)
def test_what_fits_is_accepted(flags: list[str], environment: dict[str, str]) -> None:
    assert check_shipped(*flags, env=environment)[0] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "nowhere"], "--listen: HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "65535"),
        (["--metrics-listen", "x"], "--metrics-listen"),
        (["--tp", "0"], "--tp: must be in [1, 64], got 0"),
        (["--tp", "3"], "--tp 3 must divide 8 attention heads"),
        (["--max-model-len", "4096"], "--allow-long-context"),
        (["--max-num-seqs", "0"], "--max-num-seqs: must be in [1, "),
        (["--prefill-chunk", "100"], "--block-size 16"),
        (["--gpu-memory-utilization", "1.5"], "(0, 1]"),
        (["--gpu-memory-utilization", "nan"], "(0, 1]"),
        (["--drain-timeout", "-1"], "--drain-timeout: must be in [0, "),
        (["--drain-timeout", "nan"], "--drain-timeout: must be in [0, "),
        (["--draft", "dns:///drafts"], "--draft: HOST:PORT"),
        (["--draft", "dns:///drafts:0"], "needs the port"),
        (["--draft", "http://drafts:1"], "dns:///NAME:PORT or file:///PATH"),
        (["--discover-seconds", "0"], "--discover-seconds: must be in [0.1, "),
        (["--keepalive-seconds", "1"], "--keepalive-seconds: must be in [10, "),
        (["--keepalive-seconds", "inf"], "--keepalive-seconds"),
        (["--max-message-mib", "4096"], "--max-message-mib: must be in [1, 1024]"),
        (["--block-size", "2"], "--block-size: must be in [4, 1024]"),
        (["--max-model-len", "1"], "--max-model-len: must be in [8, "),
        (["--port-file", "/tmp"], "--port-file: /tmp is a directory"),
        (["--port-file", "/no/such/folder/port"], "--port-file"),
        (["--device", "tpu"], "--device"),
        (["--unknown-flag", "1"], "--unknown-flag"),
        (["--device", "cpu", "--devices", "0"], "names GPUs, but this service runs on a CPU"),
        (["--device", "cuda", "--devices", "0,x"], "--devices: numbers such as 0,1 are needed"),
        (["--device", "cuda", "--devices", "0,1"], "names 2 GPUs for 1 ranks: each needs one"),
        pytest.param(
            ["--device", "cuda", "--tp", "2", "--devices", "0,0"],
            "--devices: there is no GPU 0, 0 CUDA devices are visible",
            marks=NO_CUDA,
        ),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda with 1 ranks on this node: 0 CUDA devices are visible",
            marks=NO_CUDA,
        ),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(flags: list[str], words: str) -> None:
    code, output = check_shipped(*flags)
    assert code == 2
    assert words in output


def test_a_model_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be wrong with one that is there: ``attacks/test_broken_models.py``."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, words in (
        ("no-such-model", "stories-target"),  # with what is there
        ("nobody/nothing", "could not be had from the hub"),
    ):
        code, output = check(name)
        assert code == 2
        assert re.fullmatch(rf"error: .*{words}.*\n", output)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("stories-draft"), tmp_path / "model"))


def edit_weight(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = load_file(directory / "model.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_tokens_that_the_model_has_no_row_for_are_told(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 4000}))
    edit_weight(copy, "model.embed_tokens.weight", lambda weight: weight[:4000].clone())
    code, output = check(str(copy))
    assert code == 0
    assert "the tokenizer knows 96 tokens that the model has no row for, 4000" in output


def last_line(tmp_path: Path, *flags: str, model: str = SHIPPED_DRAFT) -> str:
    """Of a service that ends with exit code 2."""
    log, command = tmp_path / "log", ["serve", model, "--listen", "127.0.0.1:0", *flags]
    process = start_service("ssd_target", command, log, new_session=False)
    assert process.wait(timeout=HANG_SECONDS) == 2
    assert "Traceback" not in log.read_text()
    return log.read_text().strip().splitlines()[-1]


def test_a_cache_too_small_for_one_sequence_is_refused(tmp_path: Path) -> None:
    line = last_line(tmp_path, "--num-kv-blocks", "10")
    assert "--max-model-len" in line
    assert "160" in line


def test_weights_that_are_no_numbers_are_refused_before_anybody_is_served(
    copy: Path, tmp_path: Path
) -> None:
    def spoil(weight: torch.Tensor) -> torch.Tensor:
        return weight.index_fill(0, torch.tensor(5), torch.nan)

    edit_weight(copy, "model.norm.weight", spoil)
    line = rf"error: .*{copy}/model.safetensors: weight model.norm.weight: 1 of \d+ values are NaN"
    assert re.match(line, last_line(tmp_path, model=str(copy)))


class TestEnvironment:
    def test_every_option_has_a_variable(self) -> None:
        """And a field of the configuration."""
        options = {p.name: p.envvar for p in serve.params if p.name not in ("model", "help")}
        fields = {field for field in TargetConfig.__dataclass_fields__ if field != "model"}
        names = fields | {"check_config"}
        assert options == {name: f"SSD_TARGET_{name.upper()}" for name in names}

    @pytest.mark.parametrize(
        ("variable", "value", "words"),
        [
            ("SSD_TARGET_LISTEN", "nowhere", "--listen: HOST:PORT"),
            ("SSD_TARGET_MAX_NUM_SEQS", "0", "--max-num-seqs: must be"),
            ("SSD_TARGET_DEVICE", "tpu", "'--device'"),
            ("SSD_TARGET_REFLECTION", "perhaps", "'--reflection'"),
            ("SSD_TARGET_TP", "3", "--tp 3 must divide"),
        ],
    )
    def test_a_bad_variable_is_refused_like_its_flag(
        self, variable: str, value: str, words: str
    ) -> None:
        code, output = check_shipped(env={variable: value})
        assert code == 2
        assert words in output


def test_options_come_in_groups_everyday_ones_first() -> None:
    said = serve.get_help(click.Context(serve, info_name="serve", **CONTEXT))
    groups = re.findall(r"^([A-Z][a-z ]+):\s*$", said, re.MULTILINE)
    assert groups, said
    assert groups[0] == EVERYDAY
    assert set(groups) < set(GROUPS)
    assert groups[-1] == "Testing and debugging"
    assert said.index("--listen") < said.index("--generation-config") < said.index("--tls-cert")


@pytest.mark.parametrize("command", [serve, join])
def test_every_option_has_a_group(command: click.Command) -> None:
    grouped = {name for names in GROUPS.values() for name in names}
    options = [each.name for each in command.params if isinstance(each, click.Option)]
    assert set(options) <= grouped


def test_check_config_names_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = check_shipped("--listen", address)
    assert (code, said.count("another process listens there")) == (2, 1)
    assert f"--listen {address}" in said


def test_check_config_names_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_serving.preflight.available_memory", lambda: 1 << 20)
    code, said = check_shipped("--device", "cpu", "--listen", "127.0.0.1:0")
    assert code == 2
    assert "of this host's memory are free" in said


def test_a_rank_takes_the_device_that_is_named_for_it() -> None:
    assert rank_device("cuda", 1, (4, 6)) == torch.device("cuda", 6)
    assert rank_device("cuda", 1) == torch.device("cuda", 1)
    assert rank_device("cpu", 1, None) == torch.device("cpu")
