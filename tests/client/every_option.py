"""Every option of a request in one table: for Python, commands and OpenAI, and on the wire."""

from typing import Any

from ssd.v1 import target_pb2 as pb

SEED = 2**64 - 1
BIAS = {3: -100.0, 4: 1.5}
OPTIONS: list[tuple[str, Any, list[str], dict[str, Any] | None, str, dict[str, Any]]] = [
    # Python's name and value, flags, OpenAI's fields (None: it has none), and where the contract
    # has it: the part of the request, and the field in it.
    ("request_id", "r1", ["--request-id", "r1"], {"request_id": "r1"}, "", {"request_id": "r1"}),
    ("cache_salt", "s1", ["--cache-salt", "s1"], {"cache_salt": "s1"}, "", {"cache_salt": "s1"}),
    ("temperature", 0.5, ["--temperature", "0.5"], {"temperature": 0.5},
     "sampling", {"temperature": 0.5}),
    ("top_k", 7, ["--top-k", "7"], {"top_k": 7}, "sampling", {"top_k": 7}),
    ("top_p", 0.25, ["--top-p", "0.25"], {"top_p": 0.25}, "sampling", {"top_p": 0.25}),
    ("min_p", 0.125, ["--min-p", "0.125"], {"min_p": 0.125}, "sampling", {"min_p": 0.125}),
    ("repetition_penalty", 1.5, ["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5},
     "sampling", {"repetition_penalty": 1.5}),
    ("presence_penalty", -0.5, ["--presence-penalty", "-0.5"], {"presence_penalty": -0.5},
     "sampling", {"presence_penalty": -0.5}),
    ("frequency_penalty", 0.75, ["--frequency-penalty", "0.75"], {"frequency_penalty": 0.75},
     "sampling", {"frequency_penalty": 0.75}),
    ("logit_bias", BIAS, ["--logit-bias", "3=-100", "--logit-bias", "4=1.5"],
     {"logit_bias": {"3": -100, "4": 1.5}}, "sampling", {"logit_bias": BIAS}),
    ("seed", SEED, ["--seed", str(SEED)], {"seed": SEED}, "sampling", {"seed": SEED}),
    ("max_tokens", 9, ["--max-tokens", "9"], {"max_tokens": 9}, "stop", {"max_tokens": 9}),
    ("min_tokens", 4, ["--min-tokens", "4"], {"min_tokens": 4}, "stop", {"min_tokens": 4}),
    ("stop", ("a b", "\n"), ["--stop", "a b", "--stop", "\n"], {"stop": ["a b", "\n"]},
     "stop", {"strings": ["a b", "\n"]}),
    ("stop_token_id", (5, 6), ["--stop-token-id", "5", "--stop-token-id", "6"],
     {"stop_token_ids": [5, 6]}, "stop", {"token_ids": [5, 6]}),
    ("ignore_eos", True, ["--ignore-eos"], {"ignore_eos": True}, "stop", {"ignore_eos": True}),
    ("logprobs", True, ["--logprobs", "--json"], {"logprobs": 0}, "logprobs", {"chosen": True}),
    ("top_logprobs", 2, ["--top-logprobs", "2"], {"logprobs": 2}, "logprobs", {"top_n": 2}),
    ("mode", "sync", ["--mode", "sync"], {"mode": "sync"}, "speculation", {"mode": 2}),
    ("depth", 6, ["--depth", "6"], {"depth": 6}, "speculation", {"depth": 6}),
    ("verification", "rejection", ["--verification", "rejection"], {"verification": "rejection"},
     "speculation", {"verification": 2}),
    ("draft", ("h:1", "[::1]:2"), ["--draft", "h:1", "--draft", "[::1]:2"],
     {"endpoints": ["h:1", "[::1]:2"]}, "speculation", {"endpoints": ["h:1", "[::1]:2"]}),
    ("down_weight", 0.25, ["--down-weight", "0.25"], None, "speculation", {"down_weight": 0.25}),
]  # fmt: skip
FLAGS = [word for _, _, flags, *_ in OPTIONS for word in flags]
BY_PYTHON = {name: value for name, value, *_ in OPTIONS}


def by_openai() -> dict[str, Any]:
    """A body with all that OpenAI's API has a field for."""
    fields: dict[str, Any] = {"speculation": {}}
    for _, _, _, theirs, part, _ in OPTIONS:
        (fields[part] if part == "speculation" else fields).update(theirs or {})
    return fields


def on_the_wire(openai: bool = False) -> pb.GenerateRequest:
    """A request with all of them; ``openai``: but for what its API has no field for."""
    parts: dict[str, Any] = {}
    for _, _, _, theirs, part, fields in OPTIONS:
        if theirs is not None or not openai:
            (parts.setdefault(part, {}) if part else parts).update(fields)
    return pb.GenerateRequest(text="x", **parts)
