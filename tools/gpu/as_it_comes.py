"""A section on a server as it comes: dense weights, no flag that changes its speed."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from ssd.v1 import target_pb2 as pb
from ssd_engine.text.token_ids import pack_tokens
from tools.bench_kit import Client, service
from tools.gpu import engines
from tools.gpu.dense_checkpoint import write_dense
from tools.gpu.report import Rows
from tools.gpu.serving import TIMED, Clock

SHAPE = "llama-3.1-8b"
STREAMS = (1, 8, 16, 32)
PROMPT, TOKENS = 17, 192
REPEATS = 3
LARGEST_TOKEN = 30_000
TOGETHER = 8  # prompts whose first tokens are waited for


def as_it_comes() -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        model = write_dense(SHAPE, Path(folder) / "model")
        engines.free_memory()
        flags = (str(model), "--device", "cuda", *TIMED)
        with service("ssd_target", *flags) as address:
            client = Client(address)
            _rate(client, max(STREAMS), 1)  # warm
            return [*(_row(client, streams) for streams in STREAMS), _first_tokens(client)]


def _row(client: Client, streams: int) -> dict[str, float]:
    before = Clock.read()
    rates = [_rate(client, streams, 2 + i) for i in range(REPEATS)]
    clock = Clock.read().since(before)
    print(streams, rates, clock, flush=True)
    return {"streams": streams, "tokens/s": statistics.median(rates), **clock}


def _rate(client: Client, streams: int, seed: int) -> float:
    """Tokens a second, from the first request to the last token."""
    prompts = _prompts(streams, seed)
    begin = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        counts = list(pool.map(lambda prompt: len(_tokens(client, prompt, TOKENS)), prompts))
    return sum(counts) / (time.perf_counter() - begin)


def _first_tokens(client: Client) -> dict[str, float]:
    """Until all of some prompts that are sent at once have their first token."""

    def once(seed: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(TOGETHER) as pool:
            list(pool.map(lambda p: _tokens(client, p, 1), _prompts(TOGETHER, seed)))
        return 1e3 * (time.perf_counter() - begin)

    return {"streams": TOGETHER, "first tokens, ms": statistics.median(map(once, range(100, 109)))}


def _prompts(count: int, seed: int) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(3, LARGEST_TOKEN) for _ in range(PROMPT)] for _ in range(count)]


def _tokens(client: Client, prompt: Sequence[int], most: int) -> list[int]:
    request = pb.GenerateRequest(
        token_ids=pack_tokens(list(prompt)),
        sampling=pb.SamplingOptions(temperature=0.7, seed=1),
        stop=pb.StopOptions(max_tokens=most, ignore_eos=True),
        speculation=pb.SpeculationOptions(mode=pb.SPECULATION_MODE_OFF),
    )
    return client.tokens(request)
