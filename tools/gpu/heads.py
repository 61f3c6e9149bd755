"""A head as an endpoint of its target, both grown to 8B: what it reads, when, and what it is worth.

Target and head are the shipped ones, grown, with room for long prompts; on one GPU each has a part
to itself. Beside them is the same target with a model as its draft, which reads no hidden states,
and one with the head whose flags are as they come. Requests are sampled as they usually are, and no
flag of the others changes the speed but those that keep modes apart. No prompt is found in a prefix
cache. On a CPU the section is only rehearsed.
"""

import contextlib
import itertools
import json
import re
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ssd.v1 import target_pb2 as pb
from ssd_client.local.mps import DRAFT_SHARE
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.token_ids import pack_tokens
from tools.bench_kit import MODES as PB_MODES
from tools.bench_kit import Client, Generated, service, story_prompts, wait_until_ready
from tools.gpu.engines import SAMPLING
from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import METRICS, MODES, Clock, against, mps, share

TARGET, HEAD, DRAFT, SHAPE = "stories-target", "stories-eagle", "stories-draft", "llama-3.1-8b"
DEPTH = 4
MOST_LATE = 0.01  # of rounds
MOST_FIRST = 1.05  # of the time to first token that there is without a head
CONTEXT = 8192  # of which most is beyond what the models were trained for: stories are short
FEW_TOKENS = 8  # of a request whose first token is timed
TEMPERATURES = (0.0, SAMPLING["temperature"])
LARGEST_TOKEN = 4000  # of the shipped tokenizer's, control tokens left out
HEAD_METRICS, OTHER_METRICS, USUAL_METRICS = (f"127.0.0.1:{port}" for port in (9472, 9473, 9474))
_salts = map(str, itertools.count())  # each request has its own: nothing is cached


@dataclass(frozen=True)
class Place:
    """Where services run, and how much they are asked."""

    device: str = "cuda"
    shape: str = SHAPE  # empty: as shipped
    row_bytes: int = 3 * 4096 * 2  # hidden states of a position: three boundaries, in bfloat16
    prompts: int = 4
    tokens: int = 128
    long_prompt: int = 4096
    repeats: int = 7
    has_limits: bool = True  # what takes too long fails

    @property
    def flags(self) -> list[str]:
        dtype = ["--dtype", "float32"] if self.device == "cpu" else []
        room = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--num-kv-blocks", "1536"]
        return ["--device", self.device, *dtype, *room]

    @property
    def grown(self) -> list[str]:
        return ["--expand-to", self.shape] if self.shape else []

    def part(self, percent: int) -> contextlib.AbstractContextManager[None]:
        return share(percent) if self.device == "cuda" else contextlib.nullcontext()


GPU = Place()


@dataclass(frozen=True)
class Served:
    """A target, and where it tells its metrics."""

    client: Client
    metrics: str


def heads(place: Place = GPU) -> Rows:
    shared = mps() if place.device == "cuda" else contextlib.nullcontext()
    with shared, tempfile.TemporaryDirectory() as folder, _served(Path(folder), place) as served:
        reads, drafts, usual = served
        for temperature in TEMPERATURES:  # what is used first is warm then
            for mode in MODES:
                _texts(reads.client, mode, temperature, place)
            _texts(drafts.client, "ssd", temperature, place)
            _texts(usual.client, "not named", temperature, place)
        before = _feature_rounds()
        rows = [row for each in TEMPERATURES for row in _modes(reads.client, each, place)]
        rows += [_late(before, place), _told(reads.client, place)]
        rows = [{"depth": DEPTH, **row} for row in rows]
        rows += _rounds(reads, drafts, usual, place)
        return [*rows, _first_tokens(reads.client, drafts.client, place)]


# Services


@contextlib.contextmanager
def _served(folder: Path, place: Place) -> Iterator[tuple[Served, Served, Served]]:
    """A target with the head as its endpoint and inside, one with a model as its endpoint, and one
    with the head whose flags are as they come."""
    target, head, draft = (with_context(name, folder / name) for name in (TARGET, HEAD, DRAFT))
    deep = ["--depth", str(DEPTH)]
    apart = [*deep, "--no-auto-off", "--no-adapt-depth"]
    with contextlib.ExitStack() as stack:

        def start(module: str, *flags: str) -> str:
            return stack.enter_context(service(module, *flags, *place.flags, ready=False))

        def serve(metrics: str, *flags: str) -> Served:
            about = (target, *flags, "--metrics-listen", metrics, *place.grown)
            return Served(Client(start("ssd_target", *about)), metrics)

        with place.part(DRAFT_SHARE):
            about = ["--target-model", target, "--budget", "8", "--metrics-listen", HEAD_METRICS]
            reads = start("ssd_draft", head, *about, *deep, *place.grown)
            drafts = start("ssd_draft", draft, *deep)
        with place.part(100 - DRAFT_SHARE):
            linked = ["--draft", reads, "--draft-model", head]
            served = (
                serve(METRICS, *linked, *apart),
                serve(OTHER_METRICS, "--draft", drafts, *apart),
                serve(USUAL_METRICS, *linked),
            )
        for each in served:
            wait_until_ready(each.client.address)
            each.client.wait_for_links(1)
        yield served


def with_context(name: str, directory: Path) -> str:
    """A shipped model that takes longer texts, with the same weights."""
    shutil.copytree(resolve_model(name), directory)
    config = directory / "config.json"
    about = json.loads(config.read_text())
    about.get("transformer_layer_config", about)["max_position_embeddings"] = CONTEXT
    config.write_text(json.dumps(about))
    return str(directory)


def _texts(
    client: Client, mode: str, temperature: float, place: Place, depth: int = 0
) -> list[Generated]:
    """``depth``: 0 for the target's."""
    sampling = {key: SAMPLING[key] for key in ("top_p", "top_k")} if temperature else {}
    prompts = enumerate(story_prompts(place.prompts, seed=23))
    about = (mode, place.tokens, depth, temperature)
    return [
        client.generate(prompt, *about, seed, cache_salt=next(_salts), **sampling)
        for seed, prompt in prompts
    ]


# What is measured


def _modes(client: Client, temperature: float, place: Place) -> Rows:
    plain = _texts(client, "off", temperature, place)
    done = {mode: _texts(client, mode, temperature, place) for mode in MODES if mode != "off"}
    return [{"T": temperature, **_row(m, d, plain)} for m, d in {"off": plain, **done}.items()]


def _row(mode: str, done: list[Generated], plain: list[Generated]) -> dict[str, Any]:
    return {"mode": mode, **against(done, [one.tokens for one in plain]), **_speed(done)}


def _speed(done: Sequence[Generated]) -> dict[str, Any]:
    stats = [one.stats for one in done]
    rounds = sum(each.rounds for each in stats)
    return {
        "tokens/s": statistics.median(one.rate for one in done),
        "tokens a round": sum(len(one.tokens) - 1 for one in done) / rounds,
        "rounds": rounds,
        "hits": sum(each.hits for each in stats),
        "late": sum(each.late for each in stats),
    }


def _late(before: tuple[float, float], place: Place) -> dict[str, Any]:
    """Whether hidden states came before the next outcome."""
    rounds, late = (now - then for now, then in zip(_feature_rounds(), before, strict=True))
    row: dict[str, Any] = {"mode": "features late", "rounds": int(rounds), "late": int(late)}
    if not rounds or (place.has_limits and late > MOST_LATE * rounds):
        row[FAILED] = f"features of {late:g} of {rounds:g} rounds were late"
    return row


def _feature_rounds() -> tuple[float, float]:
    """Those of the head so far, and how many of them were late."""
    with urllib.request.urlopen(f"http://{HEAD_METRICS}/metrics", timeout=10) as page:
        text = page.read().decode()
    name = "ssd_draft_feature_rounds"
    return _value(text, f"{name}_total"), _value(text, f"{name}_late_total")


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M)
    return float(found.group(1)) if found else 0.0


def _told(client: Client, place: Place) -> dict[str, Any]:
    """Rows and bytes that were sent for some requests: those of committed tokens, and no others."""
    rows, sent, _ = _sent(client)
    done = _texts(client, "ssd", 0.0, place)
    more_rows, more_sent, kinds = _sent(client)
    rows, sent = more_rows - rows, more_sent - sent
    row: dict[str, Any] = {"mode": f"features by {kinds}", "rows": rows, "bytes": sent}
    least, most = rows_to_tell(done)
    row["rows must be"] = f"{least} to {most}"
    if not least <= rows <= most:
        row[FAILED] = f"{rows} rows were sent, {least} to {most} are those of committed tokens"
    elif sent != rows * place.row_bytes:
        row[FAILED] = f"{sent} bytes for {rows} rows of {place.row_bytes}"
    return row


def rows_to_tell(done: Sequence[Generated]) -> tuple[int, int]:
    """At least, and at most: a row for each committed token but the last one. What the last two
    rounds of a text have told may have found that it was over."""
    most = sum(one.prompt - one.cached + len(one.tokens) - 1 for one in done)
    return most - 2 * (DEPTH + 1) * len(done), most


def _sent(client: Client) -> tuple[int, int, str]:
    """Rows and bytes by features' planes, once they do not change any more, and their kinds."""
    before = -1
    while True:
        planes = [each for each in client.planes() if each.stream == "features"]
        rows = sum(each.rows for each in planes)
        if rows == before:
            break
        before = rows
        time.sleep(1.0)
    return rows, sum(each.bytes for each in planes), "/".join(each.kind for each in planes)


def _rounds(reads: Served, drafts: Served, usual: Served, place: Place) -> Rows:
    """Rounds as requests usually come, in turns: how many hit, their forwards and the gaps between
    them, misses included."""
    sides = [
        *((f"ssd, a head, {depth} deep", reads, "ssd", depth) for depth in (1, 2, DEPTH)),
        (f"ssd, a model, {DEPTH} deep", drafts, "ssd", DEPTH),
        ("a head, as it comes", usual, "not named", 0),
    ]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in sides}
    for _ in range(-(-place.repeats // 2)):
        for name, served, mode, depth in sides:
            before = Clock.read(served.metrics)
            done = _texts(served.client, mode, TEMPERATURES[-1], place, depth)
            clock = Clock.read(served.metrics).since(before)
            found[name].append({**_speed(done), **clock})
    return [
        {"mode": name, **{key: _median(each, key) for key in each[0]}}
        for name, each in found.items()
    ]


def _median(found: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in found)


def _first_tokens(client: Client, other: Client, place: Place) -> dict[str, Any]:
    """The time to the first token of a long prompt, with its features sent, and without a head."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    rows, _, _ = _sent(client)
    for i in range(place.repeats + 1):  # the first ones are to warm up
        times["with"].append(1e3 * client.first_token(_long(place, "ssd", 2 * i)))
        told, _, _ = _sent(client)  # nothing of it is left when the next one begins
        times["without"].append(1e3 * other.first_token(_long(place, "off", 2 * i + 1)))
    told, least = told - rows, (place.long_prompt - 1) * len(times["with"])
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    ratio = medians["with"] / medians["without"]
    what = f"first token of {place.long_prompt} tokens, ms"
    row: dict[str, Any] = {"mode": what, **medians, "ratio": ratio, "limit": MOST_FIRST}
    if told < least:
        row[FAILED] = f"{told} rows of prompts were sent, which have {least}"
    elif place.has_limits and ratio > MOST_FIRST:
        row[FAILED] = f"{ratio:.3f} times as long with a head, {MOST_FIRST} allowed"
    return row


def _long(place: Place, mode: str, number: int) -> pb.GenerateRequest:
    """Random tokens, others each time."""
    rng = Random(number)
    tokens = [rng.randrange(300, LARGEST_TOKEN) for _ in range(place.long_prompt)]
    return pb.GenerateRequest(
        token_ids=pack_tokens(tokens),
        sampling=pb.SamplingOptions(temperature=0.0),
        stop=pb.StopOptions(max_tokens=FEW_TOKENS, ignore_eos=True),
        speculation=pb.SpeculationOptions(mode=PB_MODES[mode]),
    )
