"""What a grammar costs where a model has as many tokens as published ones.

The shipped pair is given a tokenizer of 128,256 tokens first: masks are as wide as the head.
"""

import json
import random
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_client.local.mps import DRAFT_SHARE
from ssd_engine.checkpoints.model_store import resolve_model
from tools.bench_grammars import STREAMS, time_masks, time_rounds
from tools.bench_kit import story_prompts
from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import PAIRS, Model, ModelPair, as_it_comes, mps

TOKENS = 128_256
REPEATS = 4
MOST = 1.1  # of the time of a round without a grammar
SPACE = "\u0120"  # as byte-level vocabularies write it


def grammars() -> Rows:
    """The 8B shape and the draft as it ships on one GPU."""
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target", Path(name) / "draft"
        _write_whole_head(resolve_model("stories-target"), target)
        _write_whole_head(resolve_model("stories-draft"), draft)
        rows = time_masks(target)
        pair = ModelPair(Model(str(target), PAIRS[1][0]), Model(str(draft)))
        with mps(), as_it_comes(pair, draft_share=DRAFT_SHARE) as client:
            for streams in STREAMS:
                rows += time_rounds(client, streams, REPEATS)
    for row in rows:
        equal, _, texts = row.get("texts equal", "").partition(" of ")
        if equal != texts:
            row[FAILED] = f"{row['mode']}, {row['streams']}, {row['grammar']}: texts differ"
        elif row.get("of none", 0.0) > MOST:
            row[FAILED] = f"{row['mode']}, {row['streams']}, {row['grammar']}: more than {MOST}"
    return rows


def _write_whole_head(source: Path, folder: Path) -> None:
    """The same model with tokens that it never says."""
    folder.mkdir()
    for file in ("generation_config.json", "tokenizer_config.json"):
        (folder / file).write_bytes((source / file).read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": TOKENS}))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = _more_tokens(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    row = weights[name][_unlikeliest(source)]
    more = row.repeat(TOKENS - weights[name].shape[0], 1)
    weights[name] = torch.cat([weights[name], more])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _more_tokens(vocab: dict[str, int]) -> dict[str, int]:
    """Words that are made of the vocabulary's, as long as those of published vocabularies."""
    rng, words = random.Random(0), [word.removeprefix(SPACE) for word in vocab]
    words = [word for word in words if word.isalpha()]
    more = dict(vocab)
    while len(more) < TOKENS:
        length = max(2, round(rng.gauss(7, 2.5)))
        word = "".join(rng.sample(words, 3))[:length]
        more.setdefault(rng.choice(("", SPACE)) + word, len(more))
    return more


def _unlikeliest(source: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(source)(story_prompts(1, seed=2)[0], return_tensors="pt")
    with torch.inference_mode():
        return int(model(**tokens).logits[0].mean(dim=0).argmin())
