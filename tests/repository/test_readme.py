"""What README.md and docs/benchmarks.md print is run here, or by the test named here; commands of
services and of the client: by ``test_guides.py``."""

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
from tests.processes import GatewayProcess, TracedPair
from tests.processes import gateway as start_gateway
from tests.repository.test_guides import PAGES, ROOT, commands
from tests.suite.scale import full_only
from tests.suite.tools import needs_tool

README, FIGURES = PAGES["README.md"], PAGES["docs/benchmarks.md"]
BIN = Path(sys.executable).parent
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


LONG = 1800  # seconds: a benchmark on cores that others use, too
PRINTED = commands(README + FIGURES)


def run(*command: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def test_the_first_two_commands_are_the_demo_and_the_tests() -> None:
    assert PRINTED[:2] == ["make demo", "make test"]
    assert re.search(r"make check\nSSD_TEST_NEEDS=\S+ make test\b", (ROOT / ".ci/run").read_text())


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells)) <= 300
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL).splitlines()
    assert all(len(line) <= 120 for line in prose if not line.startswith("|"))


def test_nothing_is_left_to_fill_in() -> None:
    assert [name for name, page in PAGES.items() if "@@" in page] == []


def test_every_command_is_known() -> None:
    benches = {"make bench", *(f"make {target_of(name)}" for name in BENCHES)}
    known = {*ELSEWHERE, "make demo", "make report", *benches}
    programs = ("ssd-client ", "curl ", "ssd-target serve ", "ssd-draft serve ")
    assert [each for each in PRINTED if each not in known and not each.startswith(programs)] == []
    assert set(re.findall(r"\b(make bench[\w-]*)", README + FIGURES)) == benches


def test_a_figure_of_speed_is_on_the_page_of_benchmarks() -> None:
    number = r"(?<![\w.])\d[\d,]*(?:\.\d+)*\b"
    section = README.split("## Speed")[1].split("## ")[0]
    figures = set(re.findall(number, section))
    assert len(figures) > 10
    assert figures <= set(re.findall(number, FIGURES))


SMALLER = ("GROWN=hidden=384", "GROWN_DRAFT=hidden=192")  # what is grown less is sooner loaded


@pytest.mark.parametrize("sizes", [full_only(()), SMALLER])
def test_the_demo_tells_one_story_in_every_mode(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SSD_CLIENT_RACE_MAX_TOKENS", "24")  # as printed, but for its length
    result = run("make", "--silent", "demo", f"VENV={BIN.parent}", *sizes)
    assert result.returncode == 0, result.stderr
    lanes = re.findall(r"^(\w[\w ]*): [\d.]+ tokens/s · 24 tokens", result.stderr, re.MULTILINE)
    assert lanes == ["off on one core", "sync", "ssd", "off on both"]
    assert re.search(r"ssd: [\d.]+ × as fast as off on one core, ", result.stdout)
    assert "all 4 texts are equal, token for token" in result.stdout


@pytest.fixture(scope="module")
def gateway(
    traced_pair: TracedPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Stands where the README says http://127.0.0.1:8000."""
    folder = tmp_path_factory.mktemp("gateway")
    with start_gateway(folder, targets=[traced_pair[0].address]) as process:
        yield process


def test_one_command_serves_the_pair_and_a_gateway() -> None:
    planned = run("make", "--no-print-directory", "--dry-run", "serve", f"VENV={BIN.parent}").stdout
    assert planned.rstrip().endswith(f"{BIN}/ssd-client serve")


@needs_tool("curl")
def test_curl_and_the_client_get_one_text(gateway: GatewayProcess) -> None:
    printed = [each for each in PRINTED if each.startswith("curl ") or "--url" in each]
    words = [shlex.split(each.replace("http://127.0.0.1:8000", gateway.url)) for each in printed]
    curl, client = run(*words[0]), run(str(BIN / words[1][0]), *words[1][1:])
    assert (curl.returncode, client.returncode) == (0, 0), curl.stderr + client.stderr
    assert json.loads(curl.stdout)["choices"][0]["text"] == client.stdout.removesuffix("\n")


def test_the_sdk_works_as_printed(
    gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(program.replace("http://127.0.0.1:8000", gateway.url), {})
    assert len(capsys.readouterr().out) > 100


@pytest.mark.full  # make demo starts the same services by the same flag
@pytest.mark.parametrize("command", [each for each in PRINTED if "--local" in each])
def test_a_local_command_works_as_printed(command: str) -> None:
    program, *words = shlex.split(command)
    result = run(str(BIN / program), *words)
    assert (result.returncode, bool(result.stdout.strip())) == (0, True), result.stderr


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


def flags_of(command: click.Command) -> set[str]:
    """And of the commands below it."""
    flags = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        own = [command.get_command(context, name) for name in command.list_commands(context)]
        flags = flags.union(*(flags_of(each) for each in own if each is not None))
    return flags


def test_the_flags_that_are_named_exist() -> None:
    operators, rest = (
        set(re.findall(r"`(--[a-z-]+)", text))
        for text in (PAGES["docs/operate.md"], README + FIGURES + PAGES["docs/serve.md"])
    )
    assert len(operators) > 40
    assert operators <= flags_of(serve) | {"--help"}
    assert rest <= flags_of(target_cli) | flags_of(draft_cli) | flags_of(client_cli)
