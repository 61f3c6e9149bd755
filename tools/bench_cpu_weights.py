"""Products on a CPU with packed weights: beside the speed of its memory, and beside F.linear.

    python -m tools.bench_cpu_weights [--shape qwen2.5-1.5b] [--layers 8] [--threads 1,2]

A checkpoint of dense random bfloat16 weights is loaded three ways: packed and widened to float32,
packed as bfloat16, and plain in float32, as torch multiplies it. A pass is every product of one
forward, the head included, so that no weight is still in a cache when its turn comes again. Passes
are interleaved; medians are printed, and the fastest in brackets. A sum over the bytes of the
float32 panels is the speed of the memory.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.kernels.cpu.panels import PackedWeight, PanelKernel, load_kernel
from ssd_engine.models.decoder import DecoderWeights
from ssd_engine.models.linear import Linear, Matrix, packed_linear, plain_linear
from ssd_engine.models.loader import load_weights
from ssd_engine.models.tensor_parallel import SingleRank
from tools.bench_kit import setting
from tools.gpu.dense_checkpoint import write_dense
from tools.gpu.shapes import SHAPES

ROWS = "1,2,4,8,16,32,128,512"
FLOAT32, BFLOAT16, PLAIN = "float32", "bfloat16", "F.linear"
WAYS = (FLOAT32, BFLOAT16, PLAIN)
SAMPLE_SECONDS = 0.002
MIB = 1 << 20


def load(folder: Path, way: str, kernel: PanelKernel) -> DecoderWeights:
    config = load_model_config(folder)
    panels = None
    if way != PLAIN:
        panels = copy.copy(kernel)
        panels.keeps_bfloat16 = way == BFLOAT16
    checkpoint, cpu = open_checkpoint(folder, config), torch.device("cpu")
    return load_weights(config, config, checkpoint, SingleRank(), torch.float32, cpu, panels)


def matrices(weights: DecoderWeights) -> list[Matrix]:
    layers = [m for each in weights.layers for m in (each.qkv, each.o, each.gate_up, each.down)]
    return [*layers, weights.head]


class Products:
    """Every product of a forward, one way."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.matrices = matrices(weights)
        packed = isinstance(weights.head, PackedWeight)
        self._linear: Linear = packed_linear if packed else plain_linear
        self.bytes = sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [m.panels if isinstance(m, PackedWeight) else m for m in self.matrices]

    def run(self, x: dict[int, Tensor]) -> Tensor:
        for matrix in self.matrices:
            last = self._linear(x[matrix.shape[1]], matrix, None)
        return last

    def read(self) -> None:
        for tensor in self.tensors():
            tensor.view(-1).sum()


def clock(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(
    ways: dict[str, Products], rows: int, repeats: int
) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each way, and of reading; and whether both dtypes gave the same bits."""
    widths = {m.shape[1] for m in ways[PLAIN].matrices}
    x = {width: torch.randn(rows, width) for width in widths}
    work = {name: lambda products=products: products.run(x) for name, products in ways.items()}
    work["read"] = ways[FLOAT32].read
    same = torch.equal(ways[FLOAT32].run(x), ways[BFLOAT16].run(x))
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            seconds[name].append(clock(run))
    return seconds, same


def shown(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):9.1f} ({1e3 * min(seconds):8.1f})"


def report(ways: dict[str, Products], rows: list[int], repeats: int) -> bool:
    size, same = ways[FLOAT32].bytes, True
    print(f"{'rows':>5} {'float32, ms':>20} {'bfloat16, ms':>20} {'F.linear, ms':>20}", end="")
    print("   of one row  bfloat16/float32  float32/F.linear  of memory's speed")
    one, speeds = 0.0, []
    for number in rows:
        seconds, equal = measure(ways, number, repeats if number <= 32 else max(3, repeats // 3))
        middle = {name: statistics.median(values) for name, values in seconds.items()}
        one, same = one or middle[FLOAT32], same and equal
        speeds += seconds["read"]
        print(f"{number:5} " + " ".join(shown(seconds[way]) for way in WAYS), end="")
        print(f" {middle[FLOAT32] / one:12.2f} {middle[BFLOAT16] / middle[FLOAT32]:17.2f}", end="")
        print(f" {middle[FLOAT32] / middle[PLAIN]:17.2f}", end="")
        print(f" {middle['read'] / middle[FLOAT32]:18.2f}")
    print(f"memory is read at {size / statistics.median(speeds) / 1e9:.1f} GB/s", end="")
    print(f" (at best {size / min(speeds) / 1e9:.1f}); {size / MIB:.0f} MiB in float32")
    return same


class PeakMemory:
    """The most memory that this process had to itself, files that are mapped not counted."""

    def __init__(self) -> None:
        self.before = self.peak = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.peak - self.before

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0


def print_peak(folder: Path, way: str, kernel: PanelKernel) -> None:
    """In a process of its own: what loading one way takes at most, and what is left then."""
    memory = PeakMemory()
    weights = load(folder, way, kernel)
    peak = memory.end()
    products = Products(weights)
    largest = max(tensor.nbytes for tensor in products.tensors())
    print(json.dumps({"weights": products.bytes, "largest": largest, "peak": peak}))


def report_memory(folder: Path) -> None:
    for way in WAYS:
        command = [sys.executable, "-m", "tools.bench_cpu_weights", "--peak", way, str(folder)]
        told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        weights, largest, peak = (told[name] / MIB for name in ("weights", "largest", "peak"))
        print(
            f"memory of {way:8}: weights {weights:6.0f} MiB, largest {largest:5.0f} MiB, "
            f"at most {peak:6.0f} MiB while loading"
        )


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=8, help="0: as many as the shape has")
    parser.add_argument("--threads", type=numbers, default=sorted({1, cores}))
    parser.add_argument("--rows", type=numbers, default=numbers(ROWS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--instructions", help="AVX-512, AVX2, NEON or portable; else the best")
    parser.add_argument("--vocab", type=int, help="rows of the head; else as many as the shape has")
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    kernel = load_kernel(args.instructions)
    if kernel is None:
        raise SystemExit("the extension was not built, or the processor lacks these instructions")
    if args.peak:
        print_peak(Path(args.peak[1]), args.peak[0], kernel)
        return
    layers = args.layers or SHAPES[args.shape]["num_hidden_layers"]
    print(f"{setting()}, {kernel.instructions}")
    print(f"{args.shape}, {layers} of {SHAPES[args.shape]['num_hidden_layers']} layers")
    with tempfile.TemporaryDirectory() as temporary:
        changes = {"vocab_size": args.vocab} if args.vocab else None
        folder = write_dense(args.shape, Path(temporary) / "model", layers, changes=changes)
        report_memory(folder)
        ways = {way: Products(load(folder, way, kernel)) for way in WAYS}
    for threads in args.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} {'thread' if threads == 1 else 'threads'}, {args.repeats} repeats")
        with torch.inference_mode():
            same = report(ways, args.rows, args.repeats)
        print(f"bfloat16 and float32 give the same bits: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
