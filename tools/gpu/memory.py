"""Chat requests without ``max_tokens``, more than the KV cache has room for."""

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client.generate.speculation import MODES as MODE_VALUES
from tools.bench_kit import service, story_prompts
from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import METRICS, MODES, TIMED

SHAPE = "llama-3.1-8b"
REQUESTS, CONTEXTS, CONTEXT = 64, 8, 512
BLOCK = 16


@dataclass(frozen=True)
class Kind:
    name: str
    seqs: int  # that may run at a time
    more: tuple[str, ...] = ()


# Whoever reserves whole contexts has room for so many requests, and no more.
KINDS = (
    Kind("whole contexts", CONTEXTS),
    Kind("what is needed", REQUESTS),
    Kind("what is needed, swapped", REQUESTS, ("--swap-gib", "8")),
)


def memory() -> Rows:
    """The draft is inside the target, so that both need no more than one device."""
    rows: Rows = []
    alone: list[list[int]] = []
    for kind in KINDS:
        flags = ["stories-target", "--device", "cuda", "--expand-to", SHAPE, *TIMED, *kind.more]
        flags += ["--draft-model", "stories-draft", "--max-num-seqs", str(kind.seqs)]
        flags += ["--max-model-len", str(CONTEXT)]
        flags += ["--num-kv-blocks", str(CONTEXTS * CONTEXT // BLOCK)]
        with service("ssd_target", *flags) as address:
            stub = rpc.TargetServiceStub(grpc.insecure_channel(address))
            # A server with room for more sequences may round otherwise: texts are held against
            # those of such a one.
            if kind.seqs == REQUESTS and not alone:
                alone = [_generate(stub, i, "off") for i in range(REQUESTS)]
            for mode in MODES[:2]:
                rows.append({"admission": kind.name, "mode": mode, **_together(stub, mode, alone)})
                print(rows[-1], flush=True)
    least = {row["mode"]: row["tokens/s"] for row in rows if row["admission"] == KINDS[0].name}
    for row in rows:
        row["of whole contexts"] = row["tokens/s"] / least[row["mode"]]
    return rows


def _together(stub: Any, mode: str, alone: list[list[int]]) -> dict[str, Any]:
    before, begin = _counted(), time.monotonic()
    with ThreadPoolExecutor(REQUESTS) as pool:
        done = list(pool.map(lambda i: _generate(stub, i, mode), range(REQUESTS)))
    seconds, after = time.monotonic() - begin, _counted()
    equal = sum(map(list.__eq__, done, alone)) if alone else REQUESTS
    return {
        "texts equal": f"{equal} of {REQUESTS}" if alone else "",
        "tokens/s": sum(map(len, done)) / seconds,
        **{name: after[name] - before[name] for name in after},
        **({FAILED: f"{REQUESTS - equal} texts differ"} if equal < REQUESTS else {}),
    }


def _generate(stub: Any, number: int, mode: str) -> list[int]:
    request = pb.GenerateRequest(
        sampling=pb.SamplingOptions(temperature=0.7, top_p=0.9, top_k=20, seed=number),
        speculation=pb.SpeculationOptions(mode=MODE_VALUES[mode]),
    )
    prompt = story_prompts(REQUESTS, seed=17)[number]
    request.chat.messages.add(role="user", content=prompt)
    return [token for response in stub.Generate(request) for token in response.tokens.token_ids]


def _counted() -> dict[str, float]:
    """Since the target began."""
    page = urllib.request.urlopen(f"http://{METRICS}/metrics").read().decode()
    names = {"set aside": "ssd_sequences_set_aside", "swapped": "ssd_sequences_swapped_out"}
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[:1] != "#")
    return {name: float(values[f"{metric}_total"]) for name, metric in names.items()}
