"""Write a trained model as a Hugging Face directory in bf16."""

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from tools.train.model import Llama


def export(model: Llama, tokenizer: Path, out: Path) -> None:
    """Save ``model`` beside a copy of the tokenizer. Tied: there is no lm_head.weight."""
    shipped = LlamaForCausalLM(model.config)
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    shipped.load_state_dict(weights)
    shipped.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    shipped.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)
