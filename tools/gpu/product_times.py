"""A section on products alone: all of some layers and the head, against torch.mm."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from ssd_engine.checkpoints.model_config import parse_model_config
from ssd_engine.kernels.kernel_set import KernelSet, choose_kernels
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.streamed_products import NormedRows, StreamedProduct
from tools.gpu.report import Rows
from tools.gpu.shapes import SHAPES

SHAPE, LAYERS = "llama-3.1-8b", 8  # far beyond what a cache holds
ROWS = (1, 8, 16, 32, 64, 128, 192, 256)
REPEATS, EPS = 15, 1e-5


def products() -> Rows:
    config = parse_model_config(SHAPES[SHAPE])
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    width = (config.num_heads + 2 * config.num_kv_heads) * dim
    sizes = (
        (width, hidden),
        (hidden, config.num_heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
    )
    layers = [[_random(*size) for size in sizes] for _ in range(LAYERS)]
    head = _random(config.head_rows, hidden)
    kernels = choose_kernels("auto", torch.device("cuda"), steady=True)
    size = sum(w.numel() * w.itemsize for w in [head, *(w for layer in layers for w in layer)])
    rows: Rows = []
    for count in ROWS:
        times = _in_turns(_streamed(layers, head, count, kernels), _multiplied(layers, head, count))
        rows.append(
            {
                "rows": count,
                "streamed, us": times[0],
                "torch.mm, us": times[1],
                "ratio": times[0] / times[1],
                "streamed, TB/s": size / times[0] / 1e6,
            }
        )
        print(rows[-1], flush=True)
    return rows


def _random(*sizes: int) -> Tensor:
    return torch.randn(sizes, device="cuda").bfloat16()


def _streamed(
    layers: list[list[Tensor]], head: Tensor, rows: int, kernels: KernelSet
) -> Callable[[], None]:
    """As a step has them: norms, gates and residuals are part of them."""
    first = layers[0]
    kinds = ({"norm": True}, {"residual": True}, {"norm": True, "gated": True}, {"residual": True})
    qkv, o, gate_up, down = (
        StreamedProduct(ProductShape(*w.shape, rows, **kind), kernels, w.device)
        for w, kind in zip(first, kinds, strict=True)
    )
    score = StreamedProduct(
        ProductShape(*head.shape, rows, norm=True, wide=True), kernels, head.device
    )
    width, inner = first[0].shape[1], first[3].shape[1]
    normed = NormedRows(rows, width, head.device)
    hidden, norm, attended = _random(rows, width), _random(width), _random(rows, first[1].shape[1])
    projected, gated = _random(rows, first[0].shape[0]), _random(rows, inner)
    logits = torch.zeros(rows, head.shape[0], device="cuda")
    normed.take(hidden, norm)

    def run() -> None:
        for of_qkv, of_o, of_gate_up, of_down in layers:
            qkv.normed(of_qkv, normed, projected, EPS)
            o.onto(of_o, attended, hidden, None, norm, normed)
            gate_up.normed(of_gate_up, normed, gated, EPS)
            down.onto(of_down, gated, hidden, None, norm, normed)
        score.normed(head, normed, logits, EPS)

    return run


def _multiplied(layers: list[list[Tensor]], head: Tensor, rows: int) -> Callable[[], None]:
    weights = [weight for layer in layers for weight in layer] + [head]
    xs = {w.shape[1]: _random(rows, w.shape[1]) for w in weights}
    outs = {w.shape[0]: _random(rows, w.shape[0]) for w in weights}

    def run() -> None:
        for weight in weights:
            torch.mm(xs[weight.shape[1]], weight.t(), out=outs[weight.shape[0]])

    return run


def _in_turns(*runs: Callable[[], None]) -> list[float]:
    """Medians, in microseconds."""
    graphs = [_captured(run) for run in runs]
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for graph, times in zip(graphs, found, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
    return [statistics.median(times) for times in found]


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
