"""Plain decoding of a real target process against transformers' generate, from one run.

    python tools/bench_plain.py [--model stories-target] [--repeats 5] [--new-tokens 128]

Greedy, the same prompts and token counts on both sides, interleaved repeats; prints medians with
their range and the ratios. transformers runs with the number of threads that suits it best (both
are tried first); the target runs with its defaults.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
import transformers

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client.local.launcher import LocalPlan, LocalTarget
from ssd_engine.checkpoints.model_store import resolve_model

SUBJECTS = (
    "a shy lamb who learns to sing",
    "a brave fox who crosses the river",
    "a little girl who finds a lost kitten",
    "an old bear who bakes bread",
    "two friends who build a boat",
    "a tiny dragon who is afraid of fire",
    "a boy who plants a magic seed",
    "a rabbit who wants to see the moon",
)


class Oracle:
    """transformers on the same weights, in float32."""

    def __init__(self, directory: str, new_tokens: int) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        self.new_tokens = new_tokens

    def encode(self, subject: str) -> list[int]:
        message = {"role": "user", "content": f"Tell me a story about {subject}."}
        text = self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """One call; prompts of unequal length are padded on the left."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=self.new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens


class Service:
    """The target, through gRPC."""

    def __init__(self, address: str, new_tokens: int) -> None:
        self.stub = rpc.TargetServiceStub(grpc.insecure_channel(address))
        self.new_tokens = new_tokens

    def generate(self, prompt: list[int]) -> list[int]:
        request = pb.GenerateRequest(
            token_ids=b"".join(t.to_bytes(4, "little") for t in prompt),
            sampling=pb.SamplingOptions(temperature=0.0),
            stop=pb.StopOptions(max_tokens=self.new_tokens, ignore_eos=True),
        )
        return [t for r in self.stub.Generate(request) for t in r.tokens.token_ids]

    def together(self, prompts: list[list[int]]) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.generate, prompts))


def best_threads(oracle: Oracle, prompt: list[int]) -> int:
    def timed(threads: int) -> float:
        torch.set_num_threads(threads)
        oracle.generate([prompt])
        return clock(lambda: oracle.generate([prompt]))

    return min(range(1, len(os.sched_getaffinity(0)) + 1), key=timed)


def clock(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(oracle: Oracle, service: Service, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each way, repeat by repeat.

    Every repeat has prompts of its own, and a stream prompts that differ from those of the
    concurrent ones, so that neither side finds anything in a cache.
    """
    torch.set_num_threads(best_threads(oracle, oracle.encode(SUBJECTS[0])))
    service.together(prompts_of(oracle, "in spring"))  # warm
    rates: dict[str, list[float]] = {}
    for repeat in range(repeats):
        one = oracle.encode(f"{SUBJECTS[0]} all alone on day {repeat}")
        eight = prompts_of(oracle, f"on day {repeat}")
        for name, (streams, work) in ways(oracle, service, one, eight).items():
            rates.setdefault(name, []).append(streams * oracle.new_tokens / clock(work))
    return rates


def prompts_of(oracle: Oracle, when: str) -> list[list[int]]:
    return [oracle.encode(f"{subject} {when}") for subject in SUBJECTS]


def ways(
    oracle: Oracle, service: Service, one: list[int], eight: list[list[int]]
) -> dict[str, tuple[int, Callable[[], object]]]:
    return {
        "transformers, 1 stream": (1, lambda: oracle.generate([one])),
        "ssd-target, 1 stream": (1, lambda: service.generate(one)),
        "transformers, 8 one after another": (8, lambda: [oracle.generate([p]) for p in eight]),
        "transformers, 8 in one batch": (8, lambda: oracle.generate(eight)),
        "ssd-target, 8 concurrent": (8, lambda: service.together(eight)),
    }


def check_equal(oracle: Oracle, service: Service) -> int:
    """How many of the prompts give the same tokens on both sides."""
    prompts = prompts_of(oracle, "in winter")
    return sum(service.generate(p) == oracle.generate([p])[0] for p in prompts)


def report(rates: dict[str, list[float]]) -> None:
    for name, values in rates.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:36} {middle:8.1f} tokens/s   ({low:.1f} to {high:.1f})")
    pairs = {
        "1 stream: ssd-target / transformers": (
            "ssd-target, 1 stream",
            "transformers, 1 stream",
        ),
        "8 streams: ssd-target / transformers one after another": (
            "ssd-target, 8 concurrent",
            "transformers, 8 one after another",
        ),
        "8 streams: ssd-target / transformers in one batch": (
            "ssd-target, 8 concurrent",
            "transformers, 8 in one batch",
        ),
    }
    for name, (ours, theirs) in pairs.items():
        ratios = sorted(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))
        print(
            f"{name:56} {statistics.median(ratios):5.2f} x   ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="stories-target")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    oracle = Oracle(str(resolve_model(options.model)), options.new_tokens)
    print(
        f"{options.model}, float32, {options.new_tokens} new tokens, greedy, "
        f"{options.repeats} interleaved repeats; {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    with LocalTarget(LocalPlan(options.model)) as target:
        service = Service(target.address, options.new_tokens)
        rates = measure(oracle, service, options.repeats)
        print(f"transformers uses {torch.get_num_threads()} threads")
        report(rates)
        print(f"equal texts: {check_equal(oracle, service)} of {len(SUBJECTS)}")


if __name__ == "__main__":
    main()
