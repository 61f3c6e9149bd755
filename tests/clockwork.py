"""A target whose next token follows from its last one, and heads that foresee some of its tokens.

Token t is followed by 7 t + 3 modulo the vocabulary. Hidden states are the embeddings of tokens,
which have one value each; layers add nothing. A head's fc makes of a token's features the state of
the token after it, and its MLP steps on from there.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64  # tokens, and values of a hidden state
SHARPNESS = 4.0  # what the likeliest token's logit is above all others


def follower(token: int) -> int:
    return (7 * token + 3) % VOCAB


def _steps(times: int) -> Tensor:
    """[VOCAB, VOCAB]: from each token's state to that of the token so many steps later."""
    step = torch.zeros(VOCAB, VOCAB)
    for token in range(VOCAB):
        later = token
        for _ in range(times):
            later = follower(later)
        step[later, token] = 1.0
    return step


def make_target(directory: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=VOCAB,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    scale = SHARPNESS / VOCAB**0.5  # the final norm makes a state as long as that
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.lm_head.weight.copy_(scale * _steps(1))
    model.save_pretrained(directory)


def make_head(directory: Path, drafted: int = VOCAB) -> None:
    """A flat head that can draft so many tokens, every one of which it foresees."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": VOCAB,
        "intermediate_size": VOCAB,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "draft_vocab_size": drafted,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    used = torch.randperm(VOCAB)[:drafted].sort().values
    length = VOCAB**0.5  # that a norm makes of a state, in its one value
    gated = float(torch.nn.functional.silu(torch.tensor(length)) * length)
    stepping = (_steps(1) - torch.eye(VOCAB)) / gated
    identity, layer = torch.eye(VOCAB), "midlayer."
    weights = {
        "fc.weight": torch.cat((_steps(1), torch.zeros(VOCAB, 2 * VOCAB)), dim=1),
        f"{layer}input_layernorm.weight": torch.ones(VOCAB),
        f"{layer}hidden_norm.weight": torch.ones(VOCAB),
        f"{layer}post_attention_layernorm.weight": torch.ones(VOCAB),
        f"{layer}self_attn.q_proj.weight": torch.randn(VOCAB, 2 * VOCAB),
        f"{layer}self_attn.k_proj.weight": torch.randn(VOCAB // 2, 2 * VOCAB),
        f"{layer}self_attn.v_proj.weight": torch.randn(VOCAB // 2, 2 * VOCAB),
        f"{layer}self_attn.o_proj.weight": torch.zeros(VOCAB, VOCAB),
        f"{layer}mlp.gate_proj.weight": identity,
        f"{layer}mlp.up_proj.weight": identity.clone(),
        f"{layer}mlp.down_proj.weight": stepping,
        "norm.weight": torch.ones(VOCAB),
        "lm_head.weight": (SHARPNESS / length) * identity[used],
        "d2t": used - torch.arange(drafted),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, used, True),
    }
    save_file({name: tensor.contiguous() for name, tensor in weights.items()},
              directory / "model.safetensors")  # fmt: skip
