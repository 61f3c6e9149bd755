"""Every command in README.md and docs/benchmarks.md is run here, or by the test named here."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ssd_client.cli import cli as client_cli
from ssd_draft.cli import main as draft_cli
from ssd_target.cli import main as target_cli
from ssd_target.cli import serve
from tests.processes import GatewayProcess, TargetProcess, TracedPair
from tests.processes import gateway as start_gateway
from tests.suite.tools import needs_tool

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FIGURES = (ROOT / "docs/benchmarks.md").read_text()
OPERATORS = (ROOT / "docs/operate.md").read_text()
SERVING = (ROOT / "docs/serve.md").read_text()
BIN = Path(sys.executable).parent
SERVERS = ("ssd-target serve ", "ssd-draft serve ")
SMALL = ("--shape", "hidden=256,ff=1024,layers=8")
# As short as can be, and what the output must say.
BENCHES = {
    "overlap": (
        *("--repeats", "1", "--tokens", "12", "--prompts", "1", *SMALL),
        *("--draft-shape", "hidden=128,ff=512"),
        r"ssd / sync: \d+\.\d\d .*theorem 7 with p = ",
    ),
    "delay": ("--repeats", "1", "--tokens", "12", "--prompts", "1", *SMALL, r"\n +20 ms +\d"),
    "useless": ("--repeats", "1", "--tokens", "64", r"wrong +\d.*\nlate +\d"),
    "backup": ("--repeats", "1", "--tokens", "8", *SMALL, r" 8  auto +\d"),
    "guessing": ("--prompts", "2", "--tokens", "12", r"rejection, C = 0.5 .*of the same budget"),
    "acceptance": ("--rates", "0.9", "--repeats", "1", "--tokens", "12", r"0\.9 +ssd +\d"),
    "cpu_weights": (
        *("--shape", "qwen3-0.6b", "--layers", "1", "--vocab", "4096", "--repeats", "1"),
        *("--rows", "1,4", r"GB/s.*give the same bits: yes"),
    ),
    "fairness": ("--repeats", "1", "--tokens", "12", *SMALL, r"beside a polite one: \d"),
    "gateway": ("--repeats", "2", r"first token.*chunks/s"),
    "eagle": (
        *("--prompts", "1", "--tokens", "12", "--temperatures", "0"),
        r"stories-eagle +sync +\d.*stories-draft +ssd +\d",
    ),
    "grammars": ("--repeats", "1", r"compile, ms.*streams 8, mode ssd.*of none \d"),
}


def target_of(name: str) -> str:
    """Of the Makefile."""
    return f"bench-{name.replace('_', '-')}"


ELSEWHERE = {
    "make test": "the command that runs this very test, called by .ci/run",
    "make serve": "tests/client/test_serve.py runs what it calls",
    'pip install ".[serve]"': "test_packaging.py installs the package; make test this extra",
}


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README + FIGURES, re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.strip()]


LONG = 1800  # seconds: a benchmark on cores that others use, too
CLIENT_COMMANDS = [each for each in commands() if each.startswith("ssd-client")]


def run(*command: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def servers(traced_pair: TracedPair, lone_target: TargetProcess) -> list[TargetProcess]:
    """Stand where the README says 127.0.0.1:7410 and :7430, on ports that are free."""
    return [traced_pair[0], lone_target]


def test_the_first_two_commands_are_the_demo_and_the_tests() -> None:
    assert commands()[:2] == ["make demo", "make test"]
    assert (ROOT / ".ci/run").read_text().strip().endswith("make check\nmake test")


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells)) <= 300
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL).splitlines()
    assert all(len(line) <= 120 for line in prose if not line.startswith("|"))


def test_nothing_is_left_to_fill_in() -> None:
    for page in (README, FIGURES, OPERATORS, SERVING):
        assert "@@" not in page


def test_every_command_is_known() -> None:
    benches = ("make bench", *(f"make {target_of(name)}" for name in BENCHES))
    for command in commands():
        known = command in ELSEWHERE or command in ("make demo", "make report", *benches)
        assert known or command.startswith(("ssd-client ", "curl ", *SERVERS)), command
    named = re.findall(r"\b(make bench[\w-]*)", README + FIGURES)
    assert set(named) == set(benches)


def test_a_figure_of_speed_is_on_the_page_of_benchmarks() -> None:
    number = r"(?<![\w.])\d[\d,]*(?:\.\d+)*\b"
    section = README.split("## Speed")[1].split("## ")[0]
    figures = set(re.findall(number, section))
    assert len(figures) > 10
    assert figures <= set(re.findall(number, FIGURES))


def test_the_demo_tells_one_story_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CLIENT_RACE_MAX_TOKENS", "24")  # as printed, but for its length
    result = run("make", "--silent", "demo", f"VENV={BIN.parent}")
    assert result.returncode == 0, result.stderr
    lanes = re.findall(r"^(\w[\w ]*): [\d.]+ tokens/s · 24 tokens", result.stderr, re.MULTILINE)
    assert lanes == ["off on one core", "sync", "ssd", "off on both"]
    assert re.search(r"ssd: [\d.]+ × as fast as off on one core, ", result.stdout)
    assert "all 4 texts are equal, token for token" in result.stdout


@pytest.fixture(scope="module")
def gateway(
    servers: list[TargetProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Stands where the README says http://127.0.0.1:8000."""
    folder = tmp_path_factory.mktemp("gateway")
    with start_gateway(folder, targets=[servers[0].address]) as process:
        yield process


def test_one_command_serves_the_pair_and_a_gateway() -> None:
    planned = run("make", "--no-print-directory", "--dry-run", "serve", f"VENV={BIN.parent}").stdout
    assert planned.rstrip().endswith(f"{BIN}/ssd-client serve")


@needs_tool("curl")
def test_curl_and_the_client_get_one_text(gateway: GatewayProcess) -> None:
    (curl,) = [c for c in commands() if c.startswith("curl ")]
    (client,) = [c for c in CLIENT_COMMANDS if "--url" in c]
    texts = []
    for command in (curl, client):
        words = shlex.split(command.replace("http://127.0.0.1:8000", gateway.url))
        program = str(BIN / words[0]) if command is client else words[0]
        done = run(program, *words[1:])
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout.removesuffix("\n"))
    assert json.loads(texts[0])["choices"][0]["text"] == texts[1]


def test_the_sdk_works_as_printed(
    gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(program.replace("http://127.0.0.1:8000", gateway.url), {})
    assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize(
    "command", [c for c in CLIENT_COMMANDS if "--local" not in c and "--url" not in c]
)
def test_a_client_command_works_as_printed(command: str, servers: list[TargetProcess]) -> None:
    words = shlex.split(command)
    if "--target" not in words:
        words += ["--target", "127.0.0.1:7410"]
    if "--max-tokens" in words:  # as printed, but for the length of the text
        words[words.index("--max-tokens") + 1] = "20"
    elif words[1] == "generate":
        words += ["--max-tokens", "20"]
    addresses = {"127.0.0.1:7410": servers[0].address, "127.0.0.1:7430": servers[1].address}
    check_prints(*(addresses.get(word, word) for word in words))


@pytest.mark.full  # make demo starts the same services by the same flag
@pytest.mark.parametrize("command", [c for c in CLIENT_COMMANDS if "--local" in c])
def test_a_local_command_works_as_printed(command: str) -> None:
    check_prints(*shlex.split(command))


def check_prints(program: str, *words: str) -> None:
    result = run(str(BIN / program), *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(SERVERS)])
def test_a_server_command_is_valid_as_printed(command: str) -> None:
    words = shlex.split(command)
    result = run(str(BIN / words[0]), *words[1:], "--check-config")
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_the_benchmark_prints_its_ratios() -> None:
    result = run(sys.executable, "tools/bench_plain.py", "--repeats", "1", "--new-tokens", "8")
    assert result.returncode == 0, result.stderr
    assert re.search(r"1 stream: ssd-target / transformers +\d+\.\d\d x", result.stdout)
    assert "equal texts: 8 of 8" in result.stdout


@pytest.mark.full
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("name", BENCHES)
def test_each_benchmark_of_speculation_prints_its_table(name: str) -> None:
    *flags, said = BENCHES[name]
    module = f"tools.bench_{name}"
    assert module in run("make", "--dry-run", target_of(name), f"VENV={BIN.parent}").stdout
    result = run(sys.executable, "-m", module, *flags, timeout=LONG)
    assert result.returncode == 0, result.stderr
    assert re.search(said, result.stdout, re.DOTALL), result.stdout


@pytest.mark.full
@pytest.mark.timeout(LONG)
def test_the_report_is_made_by_one_command(tmp_path: Path) -> None:
    planned = run(
        "make", "--dry-run", "--no-print-directory", "report", f"VENV={BIN.parent}"
    ).stdout
    words = shlex.split(planned[planned.index("ssd-client bench") :].replace("\\\n", " "))
    for name in ("out", "report", "trace"):
        words[words.index(f"--{name}") + 1] = str(tmp_path / name)
    done = run(str(BIN / words[0]), *words[1:], timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert "predicted tokens/s" in done.stdout
    page = (tmp_path / "report").read_text()
    assert '<g id="ssd-draft-forward' in page
    assert '<g id="sync-target-draft' in page


def test_the_picture_is_drawn_from_data_that_is_here(tmp_path: Path) -> None:
    (command,) = re.findall(r"`(ssd-client report .*?)`", README)
    words = shlex.split(command)
    committed = ROOT / words[-1]
    words[-1] = str(tmp_path / "timeline.svg")
    assert run(str(BIN / words[0]), *words[1:]).returncode == 0
    names = [re.findall(r'<g id="(\w+-(?:target|draft)-[^"]+)"', path.read_text())
             for path in (committed, Path(words[-1]))]  # fmt: skip
    assert names[0] == names[1]
    assert len(names[0]) > 50
    assert f"]({committed.relative_to(ROOT)})" in README


def test_the_metrics_that_are_named_exist() -> None:
    shared = (ROOT / "services/serving/ssd_serving/observability/metrics.py").read_text()
    target = shared + (ROOT / "services/target/ssd_target/front/metrics.py").read_text()
    draft = (ROOT / "services/draft/ssd_draft/front/metrics.py").read_text()
    target += (ROOT / "services/gateway/ssd_gateway/metrics.py").read_text()
    names = re.findall(r"`(ssd_\w+)`", README + OPERATORS)
    assert len(names) > 5
    for name in names:
        stem = name.removesuffix("_total")
        bare = stem.removeprefix("ssd_draft_")
        assert f'"{stem}"' in target if stem == bare else f'"{bare}"' in draft, name


def flags_of(command: click.Command) -> set[str]:
    flags = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            flags |= flags_of(below)
    return flags


def flags_in(page: str) -> list[str]:
    return re.findall(r"`(--[a-z-]+)", page)


def test_the_flags_that_are_named_exist() -> None:
    assert len(set(flags_in(OPERATORS))) > 40
    assert set(flags_in(OPERATORS)) <= flags_of(serve) | {"--help"}
    known = set[str]().union(*map(flags_of, (target_cli, draft_cli, client_cli)))
    assert set(flags_in(README + SERVING + FIGURES)) <= known
