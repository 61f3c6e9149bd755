"""The same weights under transformers: generate with a static, compiled cache, and assisted."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ssd_client.local.mps import DRAFT_SHARE
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.tokenizer import Tokenizer
from tools.bench_kit import story_prompts
from tools.gpu import engines
from tools.gpu.grown_checkpoint import write_grown
from tools.gpu.report import Rows
from tools.gpu.serving import grown, mps, pair

TARGET, DRAFT = "llama-3.1-8b", "llama-3.2-1b"
NEW = 128


def compare(num_prompts: int) -> Rows:
    from transformers import AutoModelForCausalLM

    asked = story_prompts(num_prompts, seed=13)
    directory = resolve_model("stories-target")
    tokenizer = Tokenizer(directory, load_model_config(directory))
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
    with tempfile.TemporaryDirectory() as folder:
        target = write_grown("stories-target", TARGET, Path(folder) / "target")
        draft = write_grown("stories-draft", DRAFT, Path(folder) / "draft")
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).cuda().eval()
        helper = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16).cuda().eval()
    static = _time(model, prompts, cache_implementation="static")
    assisted = _time(model, prompts, assistant_model=helper)
    del model, helper
    engines.free_memory()
    ours = _ours(asked)
    return [
        {"what": "transformers generate, static cache, compiled", "tokens/s": static},
        {"what": "ssd-target, off", "tokens/s": ours["off"], "against it": ours["off"] / static},
        {"what": "transformers assisted generation", "tokens/s": assisted},
        {"what": "ssd-target, ssd", "tokens/s": ours["ssd"], "against it": ours["ssd"] / assisted},
    ]


def _ours(asked: list[str]) -> dict[str, float]:
    """Whole requests, prefill included, as theirs are."""
    rates = {}
    for mode, draft_share in (("off", 100), ("ssd", DRAFT_SHARE)):
        with mps(), pair(grown(TARGET, DRAFT), 1, 5, draft_share=draft_share) as client:
            client.generate(asked[0], mode, NEW)
            times = []
            for text in asked:
                begin = time.monotonic()
                client.generate(text, mode, NEW)
                times.append(NEW / (time.monotonic() - begin))
            rates[mode] = statistics.median(times)
    return rates


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
