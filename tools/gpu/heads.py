"""A head as an endpoint of its target, both grown to 8B: what it reads, when, and what it is worth.

Target and head are the shipped ones, grown; on one GPU each has a part to itself. Requests are
sampled as they usually are, and no flag changes the speed but those that keep modes apart.
"""

import contextlib
import re
import statistics
import urllib.request
from collections.abc import Iterator
from typing import Any

from ssd_client.local.mps import DRAFT_SHARE
from tools.bench_kit import Client, Generated, service, story_prompts, wait_until_ready
from tools.gpu.engines import SAMPLING
from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import MODES, against, mps, share

TARGET, HEAD, SHAPE = "stories-target", "stories-eagle", "llama-3.1-8b"
ROW_BYTES = 3 * 4096 * 2  # of the hidden states of a position: three boundaries, in bfloat16
DEPTHS = (4,)
PROMPTS, TOKENS = 4, 128
MOST_LATE = 0.01  # of rounds
METRICS = "127.0.0.1:9472"  # of the head


def heads() -> Rows:
    return [row for depth in DEPTHS for row in _at_depth(depth)]


def _at_depth(depth: int) -> Rows:
    with mps(), _linked(depth) as client:
        for mode in MODES:  # what is used first is warm then
            _texts(client, mode, 0.0)
        rows: Rows = []
        for temperature in (0.0, float(SAMPLING["temperature"])):
            plain = _texts(client, "off", temperature)
            for mode in MODES:
                done = plain if mode == "off" else _texts(client, mode, temperature)
                rows.append({"depth": depth, "T": temperature, **_row(mode, done, plain)})
        return [*rows, {"depth": depth, **_told(client)}]


@contextlib.contextmanager
def _linked(depth: int) -> Iterator[Client]:
    room = ["--device", "cuda", "--max-model-len", "1024", "--max-num-seqs", "4"]
    grown = [*room, "--depth", str(depth), "--expand-to", SHAPE]
    with contextlib.ExitStack() as stack:
        with share(DRAFT_SHARE):
            flags = [HEAD, *grown, "--budget", "8", "--metrics-listen", METRICS]
            head = stack.enter_context(service("ssd_draft", *flags, ready=False))
        linked = ["--draft", head, "--draft-model", HEAD, "--no-auto-off", "--no-adapt-depth"]
        with share(100 - DRAFT_SHARE):
            client = Client(stack.enter_context(service("ssd_target", TARGET, *grown, *linked)))
        wait_until_ready(head)
        client.wait_for_links(1)
        yield client


def _texts(client: Client, mode: str, temperature: float) -> list[Generated]:
    sampling = {key: SAMPLING[key] for key in ("top_p", "top_k")} if temperature else {}
    prompts = enumerate(story_prompts(PROMPTS, seed=23))
    return [
        client.generate(prompt, mode, TOKENS, 0, temperature, seed, **sampling)
        for seed, prompt in prompts
    ]


def _row(mode: str, done: list[Generated], plain: list[Generated]) -> dict[str, Any]:
    stats = [one.stats for one in done]
    rounds = sum(each.rounds for each in stats)
    return {
        "mode": mode,
        **against(done, [one.tokens for one in plain]),
        "tokens/s": statistics.median(one.rate for one in done),
        "tokens a round": sum(len(one.tokens) - 1 for one in done) / rounds,
        "rounds": rounds,
        "hits": sum(each.hits for each in stats),
        "late": sum(each.late for each in stats),
    }


def _told(client: Client) -> dict[str, Any]:
    """Whether hidden states came before the next outcome, and as many bytes as they must be."""
    with urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=10) as page:
        text = page.read().decode()
    rounds, late = (_value(text, f"ssd_draft_feature_rounds{each}_total") for each in ("", "_late"))
    planes = [each for each in client.planes() if each.stream == "features"]
    rows, sent = sum(each.rows for each in planes), sum(each.bytes for each in planes)
    row: dict[str, Any] = {
        "mode": "features by " + "/".join(each.kind for each in planes),
        "rounds": int(rounds),
        "late": int(late),
        "rows": rows,
        "bytes a row": sent / max(1, rows),
    }
    if late > MOST_LATE * rounds or not rounds:
        row[FAILED] = f"features of {late:g} of {rounds:g} rounds were late"
    elif sent != rows * ROW_BYTES:
        row[FAILED] = f"{sent} bytes for {rows} rows of {ROW_BYTES}"
    return row


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M)
    return float(found.group(1)) if found else 0.0
