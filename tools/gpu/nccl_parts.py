"""The parts of the section on NCCL, each run in a process of its own.

    python -m tools.gpu.nccl_parts PART FOLDER

A part writes its rows to a file as it gets them: what was found before it failed is kept.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import ssd_client
from ssd_draft.speculators.registry import KINDS
from ssd_engine.checkpoints.model_store import shipped_models
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.models.tensor_parallel import RankGroup
from ssd_engine.parallel.ranks.group import dial_store, join_group, loopback_store
from ssd_engine.parallel.ranks.rank_start import RankPlacement
from ssd_engine.process.nccl_library import loaded_version, share_gpus
from tests.process_tree import computing, descendants
from tools.bench_kit import (
    Client,
    Generated,
    log_of,
    process_of,
    service,
    story_prompts,
    wait_until_ready,
)
from tools.gpu.dense_checkpoint import write_dense, write_noisy
from tools.gpu.report import FAILED
from tools.gpu.serving import MODES, against

Row = dict[str, Any]

# Its heads can be dealt out to four ranks; twice as deep as published, so that a draft has time.
SHAPE, LAYERS = "llama-3.2-1b", 32
# Layers add less and less, so that a copy of the first ones is often right, as in tools.gpu.dense.
FADING, DRAFT_LAYERS = 0.6, 3
SUM_BYTES, SUMS, ROUNDS = 16_384, 20, 50
PROMPTS, TOKENS = 4, 48
DEPTH = 2
SEED = 5
ROOM = ("--max-model-len", "512", "--max-num-seqs", "4", "--num-kv-blocks", "256")
SPECULATES = ("--depth", str(DEPTH), "--no-auto-off", "--no-adapt-depth")
DEATH_SECONDS = 10.0  # until a service that lost a rank must have said so
BACK_SECONDS = 30.0  # until rows must come again
EXIT_SECONDS = 5.0  # that a rank has to end in, once it is done
LAST_ERRORS = 400  # letters of what a rank said that failed
HEAD, HEAD_TARGET = "stories-eagle", "stories-target"
HEAD_SHAPE = "llama-3.1-8b"  # both are grown to it on a GPU: else the head is always late


@dataclass(frozen=True)
class Place:
    """Where services run, and how rows travel there; on a CPU the parts are only rehearsed."""

    device: str = "cuda"
    plane_kind: str = "nccl"
    changes: Mapping[str, Any] | None = None  # of the models' config.json

    def flags(self, ranks: int = 1) -> list[str]:
        devices = ["--devices", ",".join("0" * ranks)] if self.device == "cuda" else []
        return ["--device", self.device, *ROOM, "--tp", str(ranks), *devices]

    @property
    def plane(self) -> list[str]:
        return ["--plane-kind", self.plane_kind]


GPU = Place()


def models(folder: Path, place: Place = GPU) -> Iterator[Row]:
    """A dense target, a draft that is often right, and whether ranks may share the GPU."""
    missing = share_gpus() if place.device == "cuda" else None
    version = ".".join(map(str, loaded_version() or ()))
    yield {"what": f"NCCL {version}", **({FAILED: missing} if missing else {})}
    layers = None if place.changes else LAYERS  # a rehearsal has layers of its own
    about: Row = {"layers": layers, "changes": place.changes, "fading": FADING}
    target = write_dense(SHAPE, folder / "target", **about)
    count = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    write_noisy(target, folder / "draft", layers=-(-count * DRAFT_LAYERS // LAYERS))


# Sums


def all_reduce(folder: Path, place: Place = GPU) -> Iterator[Row]:
    """16 kB in bfloat16: what one token of the 70B shape adds up in a layer."""
    for ranks in (2, 4):
        store = loopback_store()  # as long as the ranks are
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = [(rank, ranks, store.port, place.device, answers) for rank in range(ranks)]
        with ranks_started(_time_sums, arguments, folder) as started:
            found = answer_of(started, answers, folder)
            yield {"what": "all-reduce of 16 kB", "ranks": ranks, **found}


@contextlib.contextmanager
def ranks_started(
    run: Callable[..., None], arguments: Sequence[tuple[Any, ...]], folder: Path
) -> Iterator[list[BaseProcess]]:
    """A process for each rank, whose errors go to a file of ``folder``. They have a while to end:
    one may hang at its exit, with a graph that NCCL was captured in."""
    context = multiprocessing.get_context("spawn")
    files = [errors_of(rank, folder) for rank in range(len(arguments))]
    started: list[BaseProcess] = [
        context.Process(target=_with_errors_in, args=(file, run, *each))
        for file, each in zip(files, arguments, strict=True)
    ]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        until = time.monotonic() + EXIT_SECONDS
        for process in started:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()


def errors_of(rank: int, folder: Path) -> Path:
    return folder / f"rank {rank}.err"


def _with_errors_in(file: Path, run: Callable[..., None], *arguments: Any) -> None:
    """What NCCL says goes there too, as it writes to the descriptor."""
    with file.open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    run(*arguments)


def answer_of(started: Sequence[BaseProcess], answers: Any, folder: Path) -> Row:
    """What the first rank has found, or how one of them has ended without it."""
    while answers.empty():
        codes = [process.exitcode for process in started]
        # Others may be done before the first one answers.
        lost = next((i for i, code in enumerate(codes) if code or (i, code) == (0, 0)), None)
        if lost is not None and answers.empty():
            said = errors_of(lost, folder).read_text(errors="replace").strip()[-LAST_ERRORS:]
            return {FAILED: f"rank {lost} ended with code {codes[lost]}: {said}"}
        time.sleep(0.05)
    found: Row = answers.get()
    return found


def _time_sums(rank: int, ranks: int, port: int, device: str, answers: Any) -> None:
    """In a process for each rank; the first one answers."""
    devices = (0,) * ranks if device == "cuda" else None
    options = RunnerOptions(Path(), "bfloat16", device, 16, 64, 1, 64, devices=devices)
    group = join_group(rank, RankPlacement(ranks, 0, ranks), dial_store(port), options)
    x = torch.ones(SUM_BYTES // 2, dtype=torch.bfloat16, device=device)
    right = bool((group.all_reduce(x.clone()) == ranks).all())
    found = {"eager, us": _micros(lambda: group.all_reduce(x), 1, device)}
    if group.in_graphs and device == "cuda":
        found["in a graph, us"] = _micros(_captured_sums(group, x).replay, SUMS, device)
    if rank == 0:
        answers.put({**found, **({} if right else {FAILED: "a sum is wrong"})})


def _captured_sums(group: RankGroup, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            group.all_reduce(x)
    return graph


def _micros(run: Callable[[], object], sums: int, device: str) -> float:
    """The median time of a sum."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begin) / sums)
    return statistics.median(times[ROUNDS // 5 :])


# Ranks


def float32(folder: Path, place: Place = GPU) -> Iterator[Row]:
    """Two ranks beside one: other sums, the same tokens."""
    target = [str(folder / "target"), "--dtype", "float32"]
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(service("ssd_target", *target, *place.flags(ranks), ready=False))
            for ranks in (1, 2)
        ]
        for address in both:
            wait_until_ready(address)
        for temperature in (0.0, 1.0):
            one, two = (_texts(Client(address), "off", temperature) for address in both)
            about = {"what": "float32, two ranks as one", "ranks": 2, "T": temperature}
            yield {**about, **against(two, [each.tokens for each in one])}


def two_ranks(folder: Path, place: Place = GPU) -> Iterator[Row]:
    return _ranks(2, folder, place)


def four_ranks(folder: Path, place: Place = GPU) -> Iterator[Row]:
    return _ranks(4, folder, place)


def _ranks(ranks: int, folder: Path, place: Place) -> Iterator[Row]:
    """Every mode against plain decoding on the same ranks; at last one of them is killed."""
    with _pair(folder, place, place.flags(ranks), ()) as (client, _):
        for temperature in (0.0, 1.0):
            plain: list[list[int]] = []
            for mode in MODES:
                done = _texts_that_hit(client, mode, temperature)
                plain = plain or [one.tokens for one in done]
                hits = _hits(done)
                row = {"what": mode, "ranks": ranks, "T": temperature, **against(done, plain)}
                row |= {"hits": hits, "tokens/s": statistics.median(one.rate for one in done)}
                missed = mode == "ssd" and not hits and FAILED not in row
                yield {**row, **({FAILED: "no round hit"} if missed else {})}
        yield {"what": "kill -9 of a rank", "ranks": ranks, **_kill_rank(client)}


def _texts_that_hit(client: Client, mode: str, temperature: float) -> list[Generated]:
    """By ssd again and again until a branch is there in time, as soon as the draft is warm."""
    begin = time.monotonic()
    while True:
        done = _texts(client, mode, temperature)
        if mode != "ssd" or _hits(done) or time.monotonic() - begin > BACK_SECONDS:
            return done


def _kill_rank(client: Client) -> Row:
    """The last rank dies while a text is generated: the service says why, starts its engine again,
    and the text goes on as it would have."""
    rank = computing(process_of(client.address).pid)[-1]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(_long_text, client.address)
        time.sleep(0.5)
        begin = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        reason = _reason(client.address, begin + DEATH_SECONDS)
        seconds = time.monotonic() - begin
        text = running.result()
    equal = isinstance(text, list) and text == _long_text(client.address)
    found = {"seconds": seconds, "says": reason, "request": "equal" if equal else str(text)[:200]}
    problem = "" if reason else "the service does not say why"
    problem = problem or ("" if equal else "the text is not the one that was begun")
    return {**found, **({FAILED: problem} if problem else {})}


def _reason(address: str, until: float) -> str:
    """What the service's log says of the death, "" if nothing."""
    while True:
        found = re.search(r"rank \d+ died with exit code -9", log_of(address))
        if found or time.monotonic() > until:
            return found.group() if found else ""
        time.sleep(0.01)


def _long_text(address: str) -> list[int] | str:
    """The tokens of a text, by a client that goes on where it was lost; or why there is none."""
    try:
        with ssd_client.Client(address, retries=100) as client:
            asked = dict(mode="off", max_tokens=400, temperature=0.0, seed=0, ignore_eos=True)
            return list(client.generate("A long story", **asked).token_ids)
    except ssd_client.ClientError as error:
        return str(error)


# Planes


def plane(folder: Path, place: Place = GPU) -> Iterator[Row]:
    """Distributions for rejection; then the draft is killed, and comes back."""
    with _pair(folder, place, place.flags(), place.plane) as (client, draft):
        plain = [one.tokens for one in _texts(client, "off", 0.0)]
        yield {"what": "rejection", **_until_rows_come(client, "draft_distributions", place)}
        with ThreadPoolExecutor(1) as thread:
            running = [thread.submit(_text, client, prompt) for prompt in _prompts()]
            running[0].result()
            draft.kill()  # the second has begun
            during = [each.result() for each in running]
        yield {"what": "coupled, draft killed half way", **against(during, plain)}
        yield {"what": "coupled, without it", **against(_texts(client, "ssd", 0.0), plain)}
        with draft.started_again():
            client.wait_for_links(1)
            back = _until_rows_come(client, "draft_distributions", place)
            yield {"what": "rejection, draft is back", **back}
            yield {"what": "coupled, draft is back", **against(_texts(client, "ssd", 0.0), plain)}


def features(folder: Path, place: Place = GPU) -> Iterator[Row]:
    """A head is told of the target's hidden states: tokens are plain decoding's, and some hit."""
    if "head" not in KINDS or HEAD not in shipped_models():
        yield {"what": f"left out: there is no {HEAD}"}
        return
    grown = ["--expand-to", HEAD_SHAPE] if place.device == "cuda" else []
    head = [HEAD, *grown, "--budget", "8"]
    about = ([HEAD_TARGET, *grown], head, place, place.flags(), place.plane)
    with _linked(*about) as (client, draft):
        for temperature in (0.0, 1.0):
            plain = [one.tokens for one in _texts(client, "off", temperature)]
            row = {"what": "ssd with features", "T": temperature}
            yield row | _until_features_come(client, plain, temperature, place, planes=1)
        draft.kill()
        with draft.started_again():
            client.wait_for_links(1)
            plain = [one.tokens for one in _texts(client, "off", 0.0)]
            row = {"what": "ssd with features, head is back", "T": 0.0}
            yield row | _until_features_come(client, plain, 0.0, place, planes=2)


def _until_rows_come(client: Client, stream: str, place: Place) -> Row:
    """Requests by rejection until distributions have been there: a plane comes up after its link.
    All requests count."""
    begin, done = time.monotonic(), list[Generated]()
    while not done or not _rejected(done) or not _hits(done):
        if time.monotonic() - begin > BACK_SECONDS:
            break
        done += _texts(client, "ssd", 0.7, "rejection")
    whole = sum(len(one.tokens) == TOKENS for one in done)
    row = {
        "texts whole": f"{whole} of {len(done)}",
        "rejection rounds": f"{_rejected(done)} of {sum(one.stats.rounds for one in done)}",
        "hits": _hits(done),
        **_plane_row(client, stream, place),
    }
    problems = [
        *(["texts are cut off"] if whole < len(done) else []),
        *([] if _rejected(done) else ["no distributions came"]),
        *([] if row["hits"] else ["no round hit"]),
        *([row[FAILED]] if FAILED in row else []),
    ]
    return {**row, **({FAILED: ", ".join(problems)} if problems else {})}


def _until_features_come(
    client: Client, plain: list[list[int]], temperature: float, place: Place, planes: int
) -> Row:
    """Requests until so many planes have come up, and branches hit. All requests count."""
    begin = time.monotonic()
    same, hits = True, 0
    while True:
        done = _texts(client, "ssd", temperature)
        same, hits = same and [one.tokens for one in done] == plain, hits + _hits(done)
        up = len(planes_up(log_of(client.address), "features"))
        if (hits and up >= planes) or time.monotonic() - begin > BACK_SECONDS:
            break
    row = {"hits": hits, **against(done, plain), **_plane_row(client, "features", place)}
    problems = [
        *([] if same else ["a text is not plain decoding's"]),
        *([] if up >= planes else [f"{up} planes came up, not {planes}"]),
        *([] if hits else ["no round hit"]),
        *([row[FAILED]] if FAILED in row else []),
    ]
    return {**row, **({FAILED: ", ".join(problems)} if problems else {})}


def _hits(done: Sequence[Generated]) -> int:
    return sum(one.stats.hits for one in done)


def _rejected(done: Sequence[Generated]) -> int:
    return sum(one.stats.rejection_rounds for one in done)


def planes_up(log: str, stream: str) -> list[str]:
    """The kinds of the planes that came up, by the target's log."""
    return re.findall(rf"(\w+) \w+ of {stream} \d+ is up", log)


def _plane_row(client: Client, stream: str, place: Place) -> Row:
    """How often a plane of this stream and kind came up, by the target's log; and its rows."""
    up = planes_up(log_of(client.address), stream)
    planes = [each for each in client.planes() if each.stream == stream]
    row: Row = {"planes up": f"{len(up)} {'/'.join(sorted(set(up)))}"}
    if planes:
        row["rows"] = sum(each.rows for each in planes)
    return row if set(up) == {place.plane_kind} else {**row, FAILED: f"no {stream} by NCCL"}


# Services


class Draft:
    """A draft at a port that it keeps; it can be killed, and started there again."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = flags
        self.address = "127.0.0.1:0"

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        with service("ssd_draft", *self._flags, ready=False, listen=self.address) as self.address:
            yield

    @contextlib.contextmanager
    def started_again(self) -> Iterator[None]:
        with self.started():
            wait_until_ready(self.address)
            yield

    def kill(self) -> None:
        """With kill -9, the engine first: the front could not end it."""
        front = process_of(self.address)
        for process in [*reversed(descendants(front.pid)), front.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        front.wait()


def _pair(
    folder: Path, place: Place, serving: Sequence[str], planes: Sequence[str]
) -> contextlib.AbstractContextManager[tuple[Client, Draft]]:
    """The dense target, with the draft beside it and inside."""
    target, draft = str(folder / "target"), str(folder / "draft")
    return _linked([target, "--draft-model", draft], [draft], place, serving, planes)


@contextlib.contextmanager
def _linked(
    target: Sequence[str],
    draft: Sequence[str],
    place: Place,
    serving: Sequence[str],
    planes: Sequence[str],
) -> Iterator[tuple[Client, Draft]]:
    """``serving``: flags of the target that place it; ``planes``: of both."""
    drafting = Draft([*draft, *place.flags(), "--depth", str(DEPTH), *planes])
    with contextlib.ExitStack() as stack:
        stack.enter_context(drafting.started())
        linked = ["--draft", drafting.address, "--trust-draft", drafting.address]
        flags = [*target, *serving, *SPECULATES, *linked, *planes]
        client = Client(stack.enter_context(service("ssd_target", *flags)))
        wait_until_ready(drafting.address)
        client.wait_for_links(1)
        yield client, drafting


def _texts(
    client: Client, mode: str, temperature: float, verification: str = "coupled"
) -> list[Generated]:
    return [_text(client, prompt, mode, temperature, verification) for prompt in _prompts()]


def _text(
    client: Client,
    prompt: str,
    mode: str = "ssd",
    temperature: float = 0.0,
    verification: str = "coupled",
) -> Generated:
    return client.generate(prompt, mode, TOKENS, 0, temperature, SEED, verification=verification)


def _prompts() -> list[str]:
    return story_prompts(PROMPTS, seed=21)


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "models": models,
    "all-reduce": all_reduce,
    "float32": float32,
    "2 ranks": two_ranks,
    "4 ranks": four_ranks,
    "plane": plane,
    "features": features,
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    with (folder / f"{name}.jsonl").open("w") as file:
        for row in PARTS[name](folder):
            print(name, row, flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
