"""``ssd-target`` at start-up: bad input is one line and exit code 2, before anything is loaded."""

import json
import re
import shutil
import socket
import subprocess
import sys
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


def check(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of ``ssd-target serve … --check-config``."""
    result = CliRunner().invoke(main, ["serve", *arguments, "--check-config"], env=env)
    return result.exit_code, result.output


def test_check_config_accepts_the_shipped_models() -> None:
    for name in ("stories-target", "stories-draft"):
        code, output = check(name)
        assert code == 0
        assert output.startswith(f"ok: {name}")


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
    ],
)
def test_a_bad_option_is_one_line_that_names_it(flags: list[str], words: str) -> None:
    code, output = check("stories-target", *flags)
    assert code == 2
    assert words in output


def test_drafts_can_be_named_in_all_ways() -> None:
    drafts = ("127.0.0.1:7420", "dns:///drafts:7420", "file:///etc/ssd/drafts", "[::1]:7420")
    flags = [word for draft in drafts for word in ("--draft", draft)]
    assert check("stories-target", *flags, "--mode", "ssd", "--discover-seconds", "0.5")[0] == 0


def test_a_long_context_can_be_asked_for() -> None:
    assert check("stories-target", "--max-model-len", "4096", "--allow-long-context")[0] == 0


class TestModels:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(resolve_model("stories-draft"), tmp_path / "model"))

    def refusal(self, model: str | Path) -> str:
        code, output = check(str(model))
        assert code == 2
        assert output.startswith("error: ")
        assert len(output.strip().splitlines()) == 1
        return output

    def test_an_unknown_model_is_refused_with_what_is_there(self) -> None:
        assert "stories-target" in self.refusal("no-such-model")

    def test_an_unreachable_hub_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "could not be had from the hub" in self.refusal("nobody/nothing")

    def test_an_empty_directory_is_refused(self, tmp_path: Path) -> None:
        assert "config.json" in self.refusal(tmp_path)

    def test_a_broken_config_is_refused(self, copy: Path) -> None:
        (copy / "config.json").write_text("{")
        assert "config.json cannot be read" in self.refusal(copy)

    def test_a_missing_weight_is_refused(self, copy: Path) -> None:
        self.edit(copy, lambda w: w.pop("model.norm.weight"))
        assert "model.norm.weight is missing" in self.refusal(copy)

    def test_a_misshaped_weight_is_refused(self, copy: Path) -> None:
        self.edit(copy, lambda w: w.update({"model.norm.weight": w["model.norm.weight"][:5]}))
        assert "model.norm.weight has shape [5]" in self.refusal(copy)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rope_parameters", {"rope_type": "llama3"}),
            ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
            ("rope_parameters", "x"),
            ("rms_norm_eps", "x"),
            ("rms_norm_eps", float("nan")),
            ("num_key_value_heads", "two"),
            ("architectures", 5),
            ("head_dim", 33),
        ],
    )
    def test_a_config_value_of_the_wrong_kind_is_refused(
        self, copy: Path, key: str, value: object
    ) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, key: value}))
        assert "config.json: " in self.refusal(copy)

    def test_an_end_of_sequence_outside_the_vocabulary_is_refused(self, copy: Path) -> None:
        (copy / "generation_config.json").write_text('{"eos_token_id": [1, 5000]}')
        assert "generation_config.json: eos_token_id: 5000 is not" in self.refusal(copy)

    @pytest.mark.parametrize("content", ["[]", '{"weight_map": {"a": 5}}', "{}", "x"])
    def test_a_broken_index_is_refused(self, copy: Path, content: str) -> None:
        (copy / "model.safetensors.index.json").write_text(content)
        assert "model.safetensors.index.json" in self.refusal(copy)

    def test_a_broken_chat_template_is_refused(self, copy: Path) -> None:
        (copy / "chat_template.jinja").write_text("{% for message in messages %}")
        assert "chat template is broken" in self.refusal(copy)

    def test_missing_weights_are_refused(self, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        assert "model.safetensors" in self.refusal(copy)

    def test_tokens_that_the_model_has_no_row_for_are_told(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        config["vocab_size"] = 4000
        (copy / "config.json").write_text(json.dumps(config))
        self.edit(
            copy,
            lambda w: w.update(
                {"model.embed_tokens.weight": w["model.embed_tokens.weight"][:4000].clone()}
            ),
        )
        code, output = check(str(copy))
        assert code == 0
        assert "the tokenizer knows 96 tokens that the model has no row for, 4000" in output

    def test_a_missing_tokenizer_is_refused(self, copy: Path) -> None:
        for file in copy.glob("tokenizer*"):
            file.unlink()
        assert "tokenizer" in self.refusal(copy)

    def edit(self, directory: Path, change: object) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)  # type: ignore[operator]
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def run_serve(*flags: str, model: str = "stories-draft") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ssd_target", "serve", model, *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run_serve("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert result.returncode == 2
    assert last_line(result).startswith("error: --listen: cannot bind")


def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    result = run_serve("--listen", "127.0.0.1:0", "--num-kv-blocks", "10")
    assert result.returncode == 2
    assert "--max-model-len" in last_line(result)
    assert "160" in last_line(result)


def test_weights_that_are_no_numbers_are_refused_before_anybody_is_served(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(resolve_model("stories-draft"), copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][5] = torch.nan
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    result = run_serve("--listen", "127.0.0.1:0", model=str(copy))
    assert result.returncode == 2
    line = rf"error: .*{copy}/model.safetensors: weight model.norm.weight: 1 of \d+ values are NaN"
    assert re.match(line, last_line(result))
    assert "Traceback" not in result.stderr


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    result = run_serve("--listen", "127.0.0.1:0", "--device", "cuda")
    assert result.returncode == 2
    assert "0 CUDA devices are visible" in last_line(result)


class TestEnvironment:
    def test_every_option_has_a_variable(self) -> None:
        options = {p.name: p for p in serve.params if p.name not in ("model", "help")}
        settable = {f for f in TargetConfig.__dataclass_fields__ if f != "model"}
        assert options.keys() == settable | {"check_config"}
        for name, option in options.items():
            assert option.envvar == f"SSD_TARGET_{name.upper()}"

    @pytest.mark.parametrize(
        ("variable", "value", "words"),
        [
            ("SSD_TARGET_LISTEN", "nowhere", "--listen: HOST:PORT"),
            ("SSD_TARGET_MAX_NUM_SEQS", "0", "--max-num-seqs: must be"),
            ("SSD_TARGET_DEVICE", "tpu", "'--device'"),
            ("SSD_TARGET_REFLECTION", "perhaps", "'--reflection'"),
            ("SSD_TARGET_PORT_FILE", "/no/such/folder/port", "--port-file"),
        ],
    )
    def test_a_bad_variable_is_refused_like_its_flag(
        self, variable: str, value: str, words: str
    ) -> None:
        code, output = check("stories-target", env={variable: value})
        assert code == 2
        assert words in output

    def test_a_variable_works_like_its_flag(self) -> None:
        code, output = check("stories-target", env={"SSD_TARGET_TP": "3"})
        assert code == 2
        assert "--tp 3 must divide" in output

    def test_a_flag_wins_over_its_variable(self) -> None:
        assert check("stories-target", "--tp", "2", env={"SSD_TARGET_TP": "3"})[0] == 0


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


def check_config(*flags: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["serve", "stories-target", *flags, "--check-config"])
    return done.exit_code, done.output


def test_check_config_names_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = check_config("--listen", address)
    assert (code, said.count("another process listens there")) == (2, 1)
    assert f"--listen {address}" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_check_config_names_a_device_that_is_not_there() -> None:
    code, said = check_config("--device", "cuda", "--listen", "127.0.0.1:0")
    assert code == 2
    assert "--device cuda with 1 ranks on this node: 0 CUDA devices are visible" in said


def test_check_config_names_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_serving.preflight.available_memory", lambda: 1 << 20)
    code, said = check_config("--device", "cpu", "--listen", "127.0.0.1:0")
    assert code == 2
    assert "of this host's memory are free" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "cpu", "--devices", "0"], "names GPUs, but this service runs on a CPU"),
        (["--device", "cuda", "--devices", "0,x"], "--devices: numbers such as 0,1 are needed"),
        (["--device", "cuda", "--devices", "0,1"], "names 2 GPUs for 1 ranks: each needs one"),
        (
            ["--device", "cuda", "--tp", "2", "--devices", "0,0"],
            "--devices: there is no GPU 0, 0 CUDA devices are visible",
        ),
    ],
)
def test_devices_are_one_for_each_rank(flags: list[str], said: str) -> None:
    if torch.cuda.is_available() and "no GPU" in said:
        pytest.skip("there is a CUDA device")
    code, told = check_config(*flags, "--listen", "127.0.0.1:0")
    assert code == 2
    assert said in told


def test_a_rank_takes_the_device_that_is_named_for_it() -> None:
    assert rank_device("cuda", 1, (4, 6)) == torch.device("cuda", 6)
    assert rank_device("cuda", 1) == torch.device("cuda", 1)
    assert rank_device("cpu", 1, None) == torch.device("cpu")
