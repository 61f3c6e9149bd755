"""The guides: every command is run, GPU ones as far as a machine without one can judge them."""

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
from tests.processes import TracedPair

ROOT = Path(__file__).resolve().parents[2]
GUIDES = {
    name: (ROOT / "docs" / name).read_text() for name in ("serve.md", "operate.md", "drafts.md")
}
PAGES = sorted((ROOT / "docs").glob("*.md"))
SERVERS = {"ssd-target": target_cli, "ssd-draft": draft_cli}
MODELS = {
    "models/target": "stories-target",
    "models/draft": "stories-draft",
    "models/head": "stories-eagle",
}
NO_GPU = re.compile(r"[^\n]* CUDA devices are visible\n?")


def commands(*programs: str) -> list[str]:
    blocks = [b for text in GUIDES.values() for b in re.findall(r"```sh\n(.*?)```", text, re.S)]
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [line for line in lines if line.split()[0] in programs]


def test_every_command_is_of_a_kind_that_is_run() -> None:
    blocks = "".join(b for t in GUIDES.values() for b in re.findall(r"```sh\n(.*?)```", t, re.S))
    known = commands("ssd-client", *SERVERS)
    assert sorted(line for line in blocks.splitlines() if line.strip()) == sorted(known)
    assert len(known) > 12


@pytest.mark.parametrize("command", commands(*SERVERS))
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


@pytest.mark.parametrize("command", commands("ssd-client"))
def test_a_client_command_works_as_printed(
    command: str, traced_pair: TracedPair, tmp_path: Path
) -> None:
    prompts = [{"prompt": f"Tell me a story about {who}."} for who in ("a bear", "a boat")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    program, *words = shlex.split(command)
    address = traced_pair[0].address
    words = [address if word == "127.0.0.1:7410" else word for word in words]
    done = subprocess.run(
        [Path(sys.executable).parent / program, *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_alert_has_an_entry_and_every_metric_exists() -> None:
    rules = yaml.safe_load((ROOT / "deploy/observability/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(re.findall(r"`(SSD[A-Z]\w+)`", GUIDES["operate.md"])) == alerts
    known = (ROOT / "docs/observability.md").read_text()
    for metric in re.findall(r"`(ssd_\w+)", GUIDES["operate.md"]):
        assert f"`{metric}" in known, metric


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p.name}" for p in PAGES)])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for file, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text()):
        path = (page.parent / file) if file else page
        assert path.exists(), file
        assert not anchor or anchor in anchors_of(path), (file, anchor)


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {page.name for page in PAGES}
