"""What the gateway costs: the first token, chunks a second, and the memory of idle streams.

    python -m tools.bench_gateway [--repeats 40]

First tokens and whole answers are asked of the same pair in turns, over gRPC and over HTTP. Chunks
come from a scripted target that computes nothing; the gateway's own processor time counts, so that
what else runs on the machine does not.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tools.bench_kit import service, story_prompts

TICK = os.sysconf("SC_CLK_TCK")
IDLE = 1000
LIMITS = {"first token, ms": 2.0, "chunks/s": 4000, "tokens/s": 20_000, "idle MiB": 300}


@contextlib.contextmanager
def process(module: str, *flags: str) -> Iterator[tuple[str, int]]:
    """A module that writes the port that it listens on: its address, and its process."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", module, *flags, "--port-file", str(port_file)]
        with (Path(folder) / "log").open("wb") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not port_file.exists():
                if running.poll() is not None:
                    raise RuntimeError((Path(folder) / "log").read_text())
                time.sleep(0.05)
            yield f"127.0.0.1:{port_file.read_text().strip()}", running.pid
        finally:
            running.kill()
            running.wait()


@contextlib.contextmanager
def gateway(target: str) -> Iterator[tuple[str, int]]:
    flags = ("serve", "--target", target, "--listen", "127.0.0.1:0", "--max-connections", "8000")
    with process("ssd_gateway", *flags) as (address, pid):
        while not _is_ready(address):
            time.sleep(0.05)
        yield address, pid


def _is_ready(address: str) -> bool:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/ready")
    return connection.getresponse().status == 200


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# First tokens, on a real pair


def first_by_grpc(stub: rpc.TargetServiceStub, prompt: str, tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token, and to the last. No prompt is found in the cache."""
    request = pb.GenerateRequest(text=prompt, cache_salt="gRPC")
    request.sampling.seed, request.stop.max_tokens = 5, tokens
    request.stop.ignore_eos = True
    begin, first = time.perf_counter(), 0.0
    for response in stub.Generate(request):
        if not first and response.WhichOneof("event") == "tokens":
            first = time.perf_counter() - begin
    return 1e3 * first, 1e3 * (time.perf_counter() - begin)


def first_by_http(
    connection: http.client.HTTPConnection, prompt: str, tokens: int
) -> tuple[float, float]:
    content = {"prompt": prompt, "seed": 5, "max_tokens": tokens, "stream": True}
    body = json.dumps({**content, "ignore_eos": True, "cache_salt": "HTTP"})
    begin, first = time.perf_counter(), 0.0
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    for line in connection.getresponse():
        if not first and line.startswith(b"data: {"):
            first = time.perf_counter() - begin
    return 1e3 * first, 1e3 * (time.perf_counter() - begin)


def compare_first_tokens(repeats: int) -> None:
    prompts = story_prompts(repeats + 4, seed=21)
    found: dict[str, list[tuple[float, float]]] = {"gRPC": [], "HTTP": []}
    with (
        service("ssd_target", "stories-target", "--draft-model", "stories-draft") as target,
        gateway(target) as (address, _),
        grpc.insecure_channel(target) as channel,
    ):
        stub, connection = rpc.TargetServiceStub(channel), http.client.HTTPConnection(address)
        for i, prompt in enumerate(prompts):
            ways = {
                "gRPC": lambda prompt=prompt: first_by_grpc(stub, prompt, 48),
                "HTTP": lambda prompt=prompt: first_by_http(connection, prompt, 48),
            }
            for way in sorted(ways, reverse=bool(i % 2)):
                taken = ways[way]()
                if i >= 4:  # the first ones warm
                    found[way].append(taken)
    for index, what in enumerate(("first token, ms", "48 tokens, ms")):
        direct, through = ([each[index] for each in found[way]] for way in ("gRPC", "HTTP"))
        added = statistics.median(b - a for a, b in zip(direct, through, strict=True))
        print(f"{what}: gRPC {_interval(direct)}, HTTP {_interval(through)}, added {added:+.2f}")


def _interval(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


# Chunks, from a scripted target


async def ask(
    address: str, content: dict[str, object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A streamed completion, on a connection of its own."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    body = json.dumps({**content, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    return reader, writer


async def read_answer(address: str, content: dict[str, object]) -> str:
    """The text of a streamed completion."""
    reader, writer = await ask(address, content)
    data = b""
    while more := await reader.read(1 << 18):
        data += more
    writer.close()
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


async def read_stream(address: str, max_tokens: int = 100, until: int | None = None) -> int:
    """The number of chunks; with ``until`` it stops there, and leaves the connection open."""
    reader, writer = await ask(address, {"prompt": "a", "max_tokens": max_tokens})
    count = 0
    while data := await reader.read(1 << 18):
        count += data.count(b"data: {")
        if until is not None and count >= until:
            _kept.append(writer)
            return count
    writer.close()
    return count


_kept: list[asyncio.StreamWriter] = []


async def read_streams(address: str, streams: int) -> int:
    return sum(await asyncio.gather(*(read_stream(address) for _ in range(streams))))


def measure_chunks(streams: int, messages: int, tokens: int) -> None:
    flags = ("--messages", str(messages), "--tokens", str(tokens))
    with process("tools.scripted_target", *flags) as (target, _), gateway(target) as (address, pid):
        asyncio.run(read_streams(address, streams))  # warm
        rates = []
        for _ in range(5):
            before, begin = cpu_seconds(pid), time.perf_counter()
            chunks = asyncio.run(read_streams(address, streams))
            cpu, wall = cpu_seconds(pid) - before, time.perf_counter() - begin
            sent = streams * messages
            rates.append((sent / cpu, chunks / cpu, sent * tokens / cpu, chunks / wall))
        middle = [statistics.median(column) for column in zip(*rates, strict=True)]
        print(
            f"{streams} streams, {tokens} tokens a message, for a second of the gateway's core: "
            f"{middle[0]:,.0f} messages in {middle[1]:,.0f} chunks, {middle[2]:,.0f} tokens "
            f"({middle[3]:,.0f} chunks/s by the clock)"
        )


async def hold_streams(address: str) -> None:
    for _ in range(IDLE // 50):
        await asyncio.gather(*(read_stream(address, max_tokens=1, until=1) for _ in range(50)))


def measure_idle() -> None:
    with process("tools.scripted_target") as (target, _), gateway(target) as (address, pid):
        before = memory_mib(pid)

        async def hold() -> None:
            await hold_streams(address)
            print(f"{IDLE} idle streams: {memory_mib(pid):.0f} MiB ({before:.0f} without)")

        asyncio.run(hold())
        _kept.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    compare_first_tokens(args.repeats)
    measure_chunks(streams=1, messages=4000, tokens=1)
    measure_chunks(streams=32, messages=200, tokens=1)
    measure_chunks(streams=32, messages=200, tokens=5)
    measure_idle()
    print("to be reached: " + ", ".join(f"{name} {limit:,}" for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
