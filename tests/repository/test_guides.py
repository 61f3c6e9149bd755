"""README and guides: commands of services and client are run, GPU ones as far as a machine without
one can judge them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from ssd_draft.cli import main as draft_cli
from ssd_target.cli import main as target_cli
from tests.processes import TargetProcess, TracedPair

ROOT = Path(__file__).resolve().parents[2]
PAGES = {f"docs/{page.name}": page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text()
GUIDES = "".join(PAGES[f"docs/{name}.md"] for name in ("serve", "operate", "drafts"))
SERVERS = {"ssd-target": target_cli, "ssd-draft": draft_cli}
MODELS = {
    "models/target": "stories-target",
    "models/draft": "stories-draft",
    "models/head": "stories-eagle",
}
NO_GPU = re.compile(r"[^\n]* CUDA devices are visible\n?")


def commands(text: str) -> list[str]:
    """Without what is said beside them."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.strip()]


def of(*programs: str) -> list[str]:
    """What README and guides print."""
    found = commands(PAGES["README.md"] + GUIDES)
    return list(dict.fromkeys(line for line in found if line.split()[0] in programs))


def brief(command: str) -> str:
    """As printed, but for the length of a text."""
    words = shlex.split(command)
    if "--max-tokens" in words:
        del words[words.index("--max-tokens") : words.index("--max-tokens") + 2]
    longer = words[1] in ("generate", "race", "compare", "bench")
    return shlex.join([*words, *(("--max-tokens", "20") if longer else ())])


CLIENT = {brief(line): line for line in of("ssd-client") if "--local" not in line}


def test_every_command_of_the_guides_is_of_a_kind_that_is_run() -> None:
    assert {line.split()[0] for line in commands(GUIDES)} == {"ssd-client", *SERVERS}
    assert len(commands(GUIDES)) > 12


@pytest.mark.parametrize("command", of(*SERVERS))
def test_a_server_would_start_as_printed(command: str) -> None:
    """Where a GPU is missing, that is all that is missing."""
    program, *words = shlex.split(command)
    flags = [MODELS.get(word, word) for word in words if word != "--check-config"]
    done = CliRunner().invoke(SERVERS[program], [*flags, "--check-config"])
    if "cuda" in words and not torch.cuda.is_available():
        assert done.exit_code == 2
        assert NO_GPU.fullmatch(done.output), done.output
    else:
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", [line for line in CLIENT if "--url" not in line])
def test_a_client_command_works_as_printed(
    command: str, traced_pair: TracedPair, lone_target: TargetProcess, tmp_path: Path
) -> None:
    prompts = [{"prompt": f"Tell me a story about {who}."} for who in ("a bear", "a boat")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    program, *words = shlex.split(command)
    if "--target" not in words:
        words += ["--target", "127.0.0.1:7410"]
    # On ports that are free.
    at = {"127.0.0.1:7410": traced_pair[0].address, "127.0.0.1:7430": lone_target.address}
    done = subprocess.run(
        [Path(sys.executable).parent / program, *(at.get(word, word) for word in words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_alert_has_an_entry_and_every_metric_exists() -> None:
    rules = yaml.safe_load((ROOT / "deploy/observability/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    page = PAGES["docs/operate.md"]
    assert set(re.findall(r"`(SSD[A-Z]\w+)`", page)) == alerts
    known = re.findall(r"`(ssd_\w+)", PAGES["docs/observability.md"])
    named = set(re.findall(r"`(ssd_\w+)", page + PAGES["README.md"]))
    assert len(named) > 5
    assert {name for name in named if not any(each.startswith(name) for each in known)} == set()


def anchors_of(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    wrong = []
    for name, text in PAGES.items():
        for file, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
            path = (ROOT / name).parent / file if file else ROOT / name
            if not path.exists() or (anchor and anchor not in anchors_of(path.read_text())):
                wrong.append((name, file, anchor))
    assert wrong == []


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", PAGES["README.md"]))
    assert linked == PAGES.keys() - {"README.md"}
