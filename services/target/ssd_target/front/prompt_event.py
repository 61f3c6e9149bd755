"""The prompt as the model read it: events of a stream, each of which goes on after the last."""

from collections.abc import Iterator, Sequence

import numpy as np

from ssd.v1 import target_pb2 as pb
from ssd_engine.sampling.params import Logprobs
from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.text.detokenizer import TextStream
from ssd_engine.text.token_ids import pack_tokens
from ssd_engine.text.tokenizer import Tokenizer

SCORED_TOKENS = 256  # in one event, at most: with all that may be asked for it is quickly made


class PromptEvents:
    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._text = TextStream(tokenizer.spelled_bytes)
        self._prompt = prompt
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

    def unscored(self) -> pb.GenerateResponse:
        """The first token, which follows nothing."""
        return self.event(1, [pb.TokenLogprobs()])

    def scored(self, scores: bytes, top_n: int) -> Iterator[pb.GenerateResponse]:
        """The next tokens, with log probabilities as the engine reports them."""
        lines = np.frombuffer(scores, dtype=np.int32).reshape(-1, 1 + 2 * top_n)
        for begin in range(0, len(lines), SCORED_TOKENS):
            some = lines[begin : begin + SCORED_TOKENS]
            reported = ReportedLogprobs(some)
            values = (reported.logprobs(row, top_n) for row in range(len(some)))
            yield self.event(len(some), [logprobs_message(value) for value in values])


def logprobs_message(value: Logprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in value.top]
    return pb.TokenLogprobs(chosen=value.chosen, top=top)
