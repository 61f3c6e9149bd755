"""Answers over HTTP beside the same ones over gRPC, from one target and in turns."""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tools.bench_gateway import gateway as gateway_to
from tools.bench_gateway import read_answer
from tools.bench_kit import MODES, story_prompts
from tools.gpu.engines import SAMPLING
from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import PAIRS, as_it_comes, grown, mps

STREAMS = 32
TOKENS = (128, 256)  # of an answer
ANSWERS = 4  # of a stream, one after the other
REPEATS = 5
LEAST = 0.97  # of the tokens per second over gRPC

Answer = Callable[[str, int, int], Awaitable[str]]  # to a prompt: the seed, and how many tokens


def gateway() -> Rows:
    """The 8B shape with a draft beside it, as they come; with and without speculation."""
    prompts = story_prompts(STREAMS * ANSWERS, seed=31)
    rows: Rows = []
    with mps(), as_it_comes(grown(*PAIRS[1])) as client, gateway_to(client.address) as (through, _):
        for mode in ("off", "not named"):
            rows.append(asyncio.run(_compare(prompts, client.address, through, mode)))
    return rows


async def _compare(prompts: list[str], target: str, through: str, mode: str) -> dict[str, object]:
    lengths = random.Random(0)
    asked = [(prompt, i, lengths.randint(*TOKENS)) for i, prompt in enumerate(prompts)]
    seconds: dict[str, list[float]] = {"gRPC": [], "HTTP": []}
    texts: dict[str, list[str]] = {}
    async with grpc.aio.insecure_channel(target) as channel:
        stub = rpc.TargetServiceStub(channel)
        ways: dict[str, Answer] = {
            "gRPC": partial(_over_grpc, stub, mode),
            "HTTP": partial(_over_http, through, mode),
        }
        for repeat in range(REPEATS + 1):
            for way in sorted(ways, reverse=bool(repeat % 2)):
                begin = time.perf_counter()
                texts[way] = await _stream_by_stream(ways[way], asked)
                if repeat:  # the first time, things are not warm
                    seconds[way].append(time.perf_counter() - begin)
    total = sum(count for _, _, count in asked)
    direct, through_http = (total / statistics.median(seconds[way]) for way in ("gRPC", "HTTP"))
    problems = [
        *(["texts differ"] if texts["gRPC"] != texts["HTTP"] else []),
        *([f"less than {LEAST} of gRPC"] if through_http < LEAST * direct else []),
    ]
    return {
        "streams": STREAMS,
        "mode": mode,
        "gRPC, tokens/s": direct,
        "HTTP, tokens/s": through_http,
        "of gRPC": through_http / direct,
        "texts": "equal" if texts["gRPC"] == texts["HTTP"] else "differ",
        **({FAILED: ", ".join(problems)} if problems else {}),
    }


async def _stream_by_stream(ask: Answer, asked: Sequence[tuple[str, int, int]]) -> list[str]:
    """As many at a time as there are streams; each asks again when it has its answer."""

    async def one(mine: Sequence[tuple[str, int, int]]) -> list[str]:
        return [await ask(*about) for about in mine]

    answers = await asyncio.gather(*(one(asked[i::STREAMS]) for i in range(STREAMS)))
    return [text for stream in answers for text in stream]


async def _over_grpc(
    stub: rpc.TargetServiceStub, mode: str, prompt: str, seed: int, tokens: int
) -> str:
    request = pb.GenerateRequest(
        text=prompt,
        sampling=pb.SamplingOptions(seed=seed, **SAMPLING),
        stop=pb.StopOptions(max_tokens=tokens, ignore_eos=True),
        speculation=pb.SpeculationOptions(mode=MODES[mode]),
    )
    return "".join([response.tokens.text async for response in stub.Generate(request)])


async def _over_http(address: str, mode: str, prompt: str, seed: int, tokens: int) -> str:
    content = {"prompt": prompt, "seed": seed, "max_tokens": tokens, "ignore_eos": True, **SAMPLING}
    if mode in ("off", "sync", "ssd"):
        content["speculation"] = {"mode": mode}
    return await read_answer(address, content)
