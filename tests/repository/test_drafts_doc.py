"""docs/drafts.md: its figures are computed here, and what it says to do with a head works."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PAGE = (Path(__file__).resolve().parents[2] / "docs/drafts.md").read_text()
BF16, BOUNDARIES, DRAFTED = 2, 3, 32_000
KV_TOKEN = 8 * 128 * 2 * BF16  # of one layer with 8 KV heads of 128
# Layers, width, heads of 128, intermediate size, vocabulary: of targets, and of their heads' layer.
SHAPES = {
    "Llama-3.1-8B": (32, 4096, 32, 14336, 128256),
    "Llama-3.3-70B": (80, 8192, 64, 28672, 128256),
    "Qwen3-8B": (36, 4096, 32, 12288, 151936),
    "Qwen3-32B": (64, 5120, 64, 25600, 151936),
}


def cells(name: str, table: str) -> list[str]:
    """The row of a target in the table whose head has these words."""
    body = PAGE.split(table)[1].split("\n\n")[0]
    (row,) = [line for line in body.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_head_and_of_its_features(name: str) -> None:
    layers, width, heads, inner, vocabulary = SHAPES[name]
    attention = 2 * width * 128 * (heads + 2 * 8) + 128 * heads * width
    step = attention + 3 * width * inner + DRAFTED * width
    read = (step, step + BOUNDARIES * width * width, vocabulary * width)
    figures = [f"{BF16 * each / 1e9:.2f} GB" for each in read]
    assert cells(name, "| a round reads |")[2:] == figures
    token, kv = BOUNDARIES * width * BF16, layers * KV_TOKEN
    assert cells(name, "| features of a token |") == [
        f"{token:,} bytes",
        f"{token / kv:.0%} of {kv:,}".replace("%", " %"),
        f"{KV_TOKEN + BF16 * width:,} bytes",
        f"{4096 * token / 1e6:.0f} MB",
        f"{100 * token / 1e6:.1f} MB/s",
    ]


def test_pickled_weights_become_safetensors_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    weights = {"fc.weight": torch.arange(12.0).reshape(3, 4).T, "d2t": torch.arange(4)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
