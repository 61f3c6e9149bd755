"""What is asked for: a pool of requests whose texts are known, and some that are wrong."""

import random
from dataclasses import dataclass

import grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client.bench.measure.prompts import STORIES, load_prompts
from ssd_engine.text.token_ids import pack_tokens
from tools.attack.callers import OTHER, bearer

SSD, OFF = pb.SPECULATION_MODE_SSD, pb.SPECULATION_MODE_OFF
CALL_SECONDS = 240.0
LENGTHS = (1, 5, 20, 60, 120, 240)
CROWD, CROWD_LETTERS = 6, 1200
STOPS = ((), (), (), (".",), ("\n\n", "the end"), (" and", "zebra"))


@dataclass(frozen=True)
class Known:
    """A request, and what plain decoding made of it."""

    message: pb.GenerateRequest
    text: str
    tokens: tuple[int, ...]
    released: tuple[int, ...]  # bytes of text after each token
    logprobs: tuple[float, ...]


def make_pool(count: int, seed: int) -> list[pb.GenerateRequest]:
    """Different in length, temperature, prompt, stops and options; none says how it is sped up."""
    draw = random.Random(seed)
    prompts = load_prompts(STORIES, count, seed).prompts
    return [_make(draw, prompts[number % len(prompts)]) for number in range(count)]


def make_crowd(seed: int) -> list[pb.GenerateRequest]:
    """Long requests, more of them than a target's cache holds at a time: some are set aside."""
    return [
        pb.GenerateRequest(
            text=(f"{prompt}. " * CROWD_LETTERS)[:CROWD_LETTERS],
            sampling=pb.SamplingOptions(temperature=0.7, seed=seed),
            stop=pb.StopOptions(max_tokens=LENGTHS[-1], ignore_eos=True),
        )
        for prompt in load_prompts(STORIES, CROWD, seed).prompts
    ]


def _make(draw: random.Random, prompt: str) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(
        temperature=draw.choice((0.0, 0.7, 1.0)), seed=draw.getrandbits(63)
    )
    if draw.random() < 0.3:
        sampling.top_p = 0.9
    if draw.random() < 0.3:
        sampling.top_k = 40
    if draw.random() < 0.2:
        sampling.repetition_penalty = 1.1
    stop = pb.StopOptions(
        max_tokens=draw.choice(LENGTHS), strings=draw.choice(STOPS), ignore_eos=draw.random() < 0.5
    )
    message = pb.GenerateRequest(sampling=sampling, stop=stop)
    if draw.random() < 0.3:
        message.logprobs.CopyFrom(pb.LogprobOptions(chosen=True, top_n=draw.choice((0, 3))))
    if draw.random() < 0.4:
        message.chat.messages.add(role="user", content=prompt)
    else:
        message.text = f"{prompt}. " * draw.choice((1, 1, 4))
    return message


def sped_up(message: pb.GenerateRequest, **options: object) -> pb.GenerateRequest:
    changed = pb.GenerateRequest()
    changed.CopyFrom(message)
    changed.speculation.CopyFrom(pb.SpeculationOptions(**options))  # type: ignore[arg-type]
    return changed


def know(stub: rpc.TargetServiceStub, message: pb.GenerateRequest) -> Known:
    """Ask for it plainly."""
    text, tokens, released, logprobs = b"", [], [], []
    plain, who = sped_up(message, mode=OFF), bearer(OTHER)
    for response in stub.Generate(plain, timeout=CALL_SECONDS, metadata=who):
        part = response.tokens
        tokens += part.token_ids
        for size in part.text_lengths:
            released.append((released[-1] if released else 0) + size)
        text += part.text.encode()
        logprobs += [each.chosen for each in part.logprobs]
    return Known(message, text.decode(), tuple(tokens), tuple(released), tuple(logprobs))


def resumed(known: Known, count: int) -> Known:
    """The same, begun after so many tokens."""
    message = pb.GenerateRequest()
    message.CopyFrom(known.message)
    message.generated_token_ids = pack_tokens(list(known.tokens[:count]))
    rest = known.text.encode()[known.released[count - 1] :].decode()
    return Known(message, rest, known.tokens[count:], (), known.logprobs[count:])


def wrong(draw: random.Random) -> pb.GenerateRequest:
    """A request that must be refused as INVALID_ARGUMENT."""
    return draw.choice(
        (
            pb.GenerateRequest(),
            pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(temperature=-1.0)),
            pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(top_p=7.0)),
            pb.GenerateRequest(text="a", stop=pb.StopOptions(max_tokens=10**7)),
            pb.GenerateRequest(text="word " * 5000),
            pb.GenerateRequest(token_ids=b"abc"),
            pb.GenerateRequest(token_ids=b"\xff\xff\xff\x7f"),
            pb.GenerateRequest(text="a", speculation=pb.SpeculationOptions(endpoints=["no where"])),
            pb.GenerateRequest(text="a", stop=pb.StopOptions(strings=[""])),
        )
    )


def endless(draw: random.Random) -> pb.GenerateRequest:
    """Whose answer is more than a connection takes without being read."""
    return pb.GenerateRequest(
        text="Once upon a time",
        sampling=pb.SamplingOptions(temperature=1.0, seed=draw.getrandbits(60)),
        stop=pb.StopOptions(max_tokens=1200, ignore_eos=True),
        logprobs=pb.LogprobOptions(chosen=True, top_n=20),
        speculation=pb.SpeculationOptions(mode=draw.choice((SSD, OFF))),
    )


def code_of(error: grpc.RpcError) -> str:
    return str(error.code().name).lower()
