"""What each sampling option costs, what speculation is worth with it, and with rejection."""

import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ssd_client.local_mps import DRAFT_SHARE
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
MODELS = ModelPair(Model("stories-target", "llama-3.1-8b"), Model("stories-draft"))


def options(num_prompts: int) -> Rows:
    """The 8B shape and the draft as it ships on one GPU: every option, in turns."""
    prompts = story_prompts(max(STREAMS) * max(1, min(num_prompts, 16) // 8), seed=3)
    rows: Rows = []
    with mps(), as_it_comes(MODELS, *TIMED, draft_share=DRAFT_SHARE) as client:
        for streams in STREAMS:
            few = prompts if streams > 1 else prompts[: len(prompts) // 2]
            rows += _with_streams(client, few, streams)
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


def _with_streams(client: Client, prompts: Sequence[str], streams: int) -> Rows:
    times: dict[tuple[str, str], list[float]] = {}
    hits: dict[str, list[float]] = {}
    last: dict[tuple[str, str], list[Generated]] = {}
    for repeat in range(REPEATS + 1):
        for name, chosen in OPTIONS.items():
            for mode in ("off", "ssd"):
                last[name, mode] = _generate(client, prompts, streams, mode, chosen)
                if repeat:  # the first time, things are not warm
                    times.setdefault((name, mode), []).append(_round_ms(last[name, mode]))
                    hits.setdefault(name, []).append(_hit_ms(last[name, mode]))
    ms = {key: statistics.median(values) for key, values in times.items()}
    return [
        {
            "streams": streams,
            "options": name,
            "mode": mode,
            **against(done, [one.tokens for one in last[name, "off"]]),
            "ms/round": ms[name, mode],
            f"of {PLAIN}": ms[name, mode] / ms[PLAIN, mode],
            **_hit_times(hits, name, mode),
            **_guessed(done, mode),
            "tokens/s of a stream": statistics.median(one.rate for one in done),
        }
        for (name, mode), done in last.items()
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


def _hit_ms(done: Sequence[Generated]) -> float:
    """Likewise, of rounds whose speculation came from the cache; NaN where there are none."""
    rounds = sum(one.stats.cache_rounds for one in done)
    return 1e-3 * sum(one.stats.cache_round_micros for one in done) / rounds if rounds else math.nan


def _hit_times(hits: Mapping[str, Sequence[float]], name: str, mode: str) -> dict[str, float]:
    """How often rounds hit differs between options: so these are told apart."""
    known = {key: [ms for ms in each if not math.isnan(ms)] for key, each in hits.items()}
    if mode == "off" or not known[name] or not known[PLAIN]:
        return {}
    own, plain = statistics.median(known[name]), statistics.median(known[PLAIN])
    return {"ms/hit": own, f"of {PLAIN}'s hits": own / plain}


def _guessed(done: Sequence[Generated], mode: str) -> dict[str, float]:
    if mode == "off":
        return {}
    rounds = max(1, sum(one.stats.rounds for one in done))
    return {
        "hit rate": sum(one.stats.hits for one in done) / rounds,
        "late": sum(one.stats.late for one in done) / rounds,
        "sync": sum(one.stats.sync_rounds for one in done) / rounds,
        "tokens/round": sum(len(one.tokens) - 1 for one in done) / rounds,
    }
