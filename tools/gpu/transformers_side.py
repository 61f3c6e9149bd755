"""The same weights under transformers: generate with a static, compiled cache, and assisted."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tools.gpu import engines
from tools.gpu.grown_checkpoint import write_grown
from tools.gpu.report import Rows

TARGET, DRAFT = "llama-3.1-8b", "llama-3.2-1b"
NEW = 128


def compare(num_prompts: int) -> Rows:
    from transformers import AutoModelForCausalLM

    prompts = [engines.prompt(i) for i in range(num_prompts)]
    with tempfile.TemporaryDirectory() as folder:
        target = write_grown("stories-target", TARGET, Path(folder) / "target")
        draft = write_grown("stories-draft", DRAFT, Path(folder) / "draft")
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).cuda().eval()
        helper = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16).cuda().eval()
    static = _time(model, prompts, cache_implementation="static")
    assisted = _time(model, prompts, assistant_model=helper)
    return [
        {"what": "transformers generate, static cache, compiled", "tokens/s": static},
        {"what": "transformers assisted generation", "tokens/s": assisted},
    ]


def _time(model: Any, prompts: list[list[int]], **options: Any) -> float:
    def generate(tokens: list[int]) -> float:
        ids = torch.tensor([tokens], device="cuda")
        begin = time.monotonic()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            **options,
        )
        torch.cuda.synchronize()
        return NEW / (time.monotonic() - begin)

    for tokens in prompts[:2]:
        generate(tokens)  # compiles
    return statistics.median(generate(tokens) for tokens in prompts)
