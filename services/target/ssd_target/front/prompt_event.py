"""The prompt as the model read it: events of a stream, each of which goes on after the last."""

from collections.abc import Iterator, Sequence

import numpy as np

from ssd.v1 import target_pb2 as pb
from ssd_engine.sampling.params import Logprobs
from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.text.detokenizer import TextStream
from ssd_engine.text.token_ids import pack_tokens

MAX_TOKENS = 1024  # in one event: a slow reader takes it in time
SCORED_TOKENS = 256  # with log probabilities: with all that may be asked for it is quickly made


class PromptEvents:
    def __init__(
        self, spelled_bytes: Sequence[bytes], prompt: list[int], token_bytes: bool = False
    ) -> None:
        """``token_bytes``: log probabilities name the bytes of their tokens."""
        self._text = TextStream(spelled_bytes)
        self._prompt = prompt
        self._spellings = spelled_bytes if token_bytes else None
        self._told = 0  # tokens

    def event(
        self, num_tokens: int, logprobs: Sequence[pb.TokenLogprobs] = ()
    ) -> pb.GenerateResponse:
        """The next tokens; bytes of an unfinished character come with those that end it."""
        tokens = self._prompt[self._told : self._told + num_tokens]
        self._told += len(tokens)
        pieces = [self._text.push(token) for token in tokens]
        if self._told == len(self._prompt):
            pieces[-1] += self._text.flush()
        return pb.GenerateResponse(
            prompt=pb.GeneratePrompt(
                token_ids=pack_tokens(tokens),
                text="".join(pieces),
                text_lengths=[len(piece.encode()) for piece in pieces],
                logprobs=logprobs,
            )
        )

    def unscored(self) -> Iterator[pb.GenerateResponse]:
        """All tokens, without log probabilities."""
        while self._told < len(self._prompt):
            yield self.event(MAX_TOKENS)

    def first(self) -> pb.GenerateResponse:
        """The first token, which follows nothing and so has no log probability."""
        return self.event(1, [pb.TokenLogprobs()])

    def scored(self, scores: bytes, top_n: int) -> Iterator[pb.GenerateResponse]:
        """The next tokens, with log probabilities as the engine reports them."""
        lines = np.frombuffer(scores, dtype=np.int32).reshape(-1, 1 + 2 * top_n)
        for begin in range(0, len(lines), SCORED_TOKENS):
            some = lines[begin : begin + SCORED_TOKENS]
            reported = ReportedLogprobs(some)
            tokens = self._prompt[self._told : self._told + len(some)]
            values = (
                logprobs_message(token, reported.logprobs(row, top_n), self._spellings)
                for row, token in enumerate(tokens)
            )
            yield self.event(len(some), list(values))


def logprobs_message(
    token: int, value: Logprobs, spellings: Sequence[bytes] | None
) -> pb.TokenLogprobs:
    """``spellings``: the bytes of tokens, where they are asked for."""
    message = pb.TokenLogprobs(chosen=value.chosen)
    for other, logprob in value.top:
        message.top.add(token_id=other, logprob=logprob)
    if spellings is not None:
        message.token = spellings[token]
        for each in message.top:
            each.token = spellings[each.token_id]
    return message
