"""What each sampling option costs, what speculation is worth with it, and with rejection."""

import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ssd_client.local.mps import DRAFT_SHARE
from tools.bench_kit import Client, Generated, story_prompts
from tools.gpu.report import Rows
from tools.gpu.serving import TIMED, Model, ModelPair, against, as_it_comes, mps

PLAIN = "T = 0.7"
_BIAS = {token: 1.5 if token % 2 else -1.5 for token in range(100, 200)}
OPTIONS: dict[str, Mapping[str, Any]] = {
    PLAIN: {},
    "top-k 20, top-p 0.8": {"top_k": 20, "top_p": 0.8},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "repetition 1.1": {"repetition_penalty": 1.1},
    "presence 0.5, frequency 0.3": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias of 100 tokens": {"logit_bias": _BIAS},
    "logprobs, top 5": {"top_logprobs": 5},
}
OPTIONS["all"] = {
    **{"top_k": 20, "top_p": 0.9, "min_p": 0.02, "top_logprobs": 5, "logit_bias": _BIAS},
    **{"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
}
STREAMS = (1, 8)
TOKENS = 96
REPEATS = 3
FEW_HITS = 100
MODELS = ModelPair(Model("stories-target", "llama-3.1-8b"), Model("stories-draft"))

Runs = Sequence[Sequence[Generated]]


def options(num_prompts: int) -> Rows:
    """The 8B shape and the draft as it ships on one GPU: every option, in turns. All speculate to
    the same depth: with options whose guesses are right more often a round is deeper, and longer
    for that. ``ssd`` as it comes, left for ``sync`` where that is faster, and kept on."""
    prompts = story_prompts(max(STREAMS) * max(1, min(num_prompts, 16) // 8), seed=3)
    few, flags = prompts[: len(prompts) // 2], (*TIMED, "--no-adapt-depth")
    rows: Rows = []
    with mps():
        with as_it_comes(MODELS, *flags, draft_share=DRAFT_SHARE) as client:
            for streams in STREAMS:
                rows += _with_streams(client, prompts if streams > 1 else few, streams, "ssd")
        with as_it_comes(MODELS, *flags, "--no-auto-off", draft_share=DRAFT_SHARE) as client:
            rows += _with_streams(client, few, 1, "ssd, kept on")
    return rows


def rejection(num_prompts: int) -> Rows:
    """Rejection at C = 1 beside coupled verification, in turns."""
    prompts = story_prompts(max(1, min(num_prompts, 16)), seed=3)
    done: dict[tuple[str, str], list[Generated]] = {}
    kinds: dict[str, Mapping[str, Any]] = {
        PLAIN: {},
        "top-k 20, top-p 0.9": {"top_k": 20, "top_p": 0.9},
    }
    flags = (*TIMED, "--no-auto-off")
    with mps(), as_it_comes(MODELS, *flags, draft_share=DRAFT_SHARE, trusted=True) as client:
        for i, prompt in enumerate([prompts[0], *prompts]):  # the first is to warm up
            for name, chosen in kinds.items():
                for how in ("coupled", "rejection"):
                    one = client.generate(
                        prompt, "ssd", TOKENS, temperature=0.7, seed=i, verification=how, **chosen
                    )
                    if i:
                        done.setdefault((name, how), []).append(one)
    rows: Rows = []
    for (name, how), many in done.items():
        rate, guessed = statistics.median(one.rate for one in many), _guessed(many, "ssd")
        rows.append({"options": name, "verification": how, **guessed, "tokens/s": rate})
        if how == "rejection":
            for key in ("hit rate", "tokens/s"):
                rows[-1][f"{key}, of coupled"] = rows[-1][key] / rows[-2][key]
    return rows


def _with_streams(client: Client, prompts: Sequence[str], streams: int, called: str) -> Rows:
    """``called``: ssd, in the table."""
    done: dict[tuple[str, str], list[list[Generated]]] = {}
    for repeat in range(REPEATS + 1):
        for name, chosen in OPTIONS.items():
            for mode in ("off", "ssd"):
                ran = _generate(client, prompts, streams, mode, chosen)
                if repeat:  # the first time, things are not warm
                    done.setdefault((name, mode), []).append(ran)
    ms = {key: statistics.median(map(_round_ms, runs)) for key, runs in done.items()}
    return [
        {
            "streams": streams,
            "options": name,
            "mode": mode if mode == "off" else called,
            **against(runs[-1], [one.tokens for one in done[name, "off"][-1]]),
            "ms/round": ms[name, mode],
            f"of {PLAIN}": ms[name, mode] / ms[PLAIN, mode],
            **_hit_times(runs, done[PLAIN, mode]),
            **_guessed([one for run in runs for one in run], mode),
            "tokens/s of a stream": statistics.median(one.rate for run in runs for one in run),
        }
        for (name, mode), runs in done.items()
    ]


def _generate(
    client: Client, prompts: Sequence[str], streams: int, mode: str, chosen: Mapping[str, Any]
) -> list[Generated]:
    def one(i: int) -> Generated:
        return client.generate(prompts[i], mode, TOKENS, temperature=0.7, seed=i, **chosen)

    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(one, range(len(prompts))))


def _round_ms(done: Sequence[Generated]) -> float:
    """A sequence's time from the end of one round to the end of the next."""
    stats = [one.stats for one in done]
    micros = sum(s.cache_round_micros + s.other_round_micros for s in stats)
    return 1e-3 * micros / max(1, sum(s.rounds for s in stats))


def _hit_times(runs: Runs, plain: Runs) -> dict[str, float]:
    """How often rounds hit differs between options: so these are told apart."""
    own, of_plain = _hit_ms(runs), _hit_ms(plain)
    if math.isnan(own) or math.isnan(of_plain):
        return {}
    return {"ms/hit": own, f"of {PLAIN}'s hits": own / of_plain}


def _hit_ms(runs: Runs) -> float:
    """The time of rounds whose speculation came from the cache; NaN where there are few."""
    stats = [one.stats for run in runs for one in run]
    rounds = sum(each.cache_rounds for each in stats)
    micros = sum(each.cache_round_micros for each in stats)
    return 1e-3 * micros / rounds if rounds >= FEW_HITS else math.nan


def _guessed(done: Sequence[Generated], mode: str) -> dict[str, float]:
    if mode == "off":
        return {}
    rounds = max(1, sum(one.stats.rounds for one in done))
    return {
        "hit rate": sum(one.stats.hits for one in done) / rounds,
        "late": sum(one.stats.late for one in done) / rounds,
        "sync": sum(one.stats.sync_rounds for one in done) / rounds,
        "plain": sum(one.stats.plain_rounds for one in done) / rounds,
        "tokens/round": sum(len(one.tokens) - 1 for one in done) / rounds,
    }
