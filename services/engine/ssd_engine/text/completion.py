"""The output of one request as it grows: its text, and when it ends. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ssd_engine.text.detokenizer import TextStream


class FinishReason(Enum):
    STOP = "stop"  # a stop string, a stop token or the end of sequence
    LENGTH = "length"  # max_tokens


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StopRules:
    max_tokens: int
    token_ids: frozenset[int] = frozenset()  # the model's end of sequence among them
    strings: tuple[str, ...] = ()
    # Neither ends the output before so many tokens: a stop string counts when it is complete with
    # this token or a later one, a stop token after it.
    min_tokens: int = 0
    include_stop: bool = False  # the text ends after what stops it, not before
    special_tokens: bool = False  # the text has control tokens spelled out: strings may be in them


class Completion:
    """Rules are applied token by token; what lies after a stop does not exist.

    A function of the pushed tokens alone: two processes that push the same tokens agree on
    text and finish, and a completion is resumed by pushing what was generated before.
    """

    def __init__(
        self, rules: StopRules, token_bytes: Sequence[bytes], wants_text: bool = True
    ) -> None:
        """Without ``wants_text`` only the finish matters: text is made where a rule reads it.
        ``token_bytes``: with control tokens spelled out where the rules say so."""
        self._rules = rules
        self._token_bytes = token_bytes
        self._text: TextStream | None = None
        if wants_text or rules.strings:
            self._text = TextStream(token_bytes, rules.strings, rules.include_stop)
        self.num_tokens = 0
        self.finish: Finish | None = None

    def push(self, token: int) -> str:
        """Count the token and return the text that it decides."""
        if self.finish is not None:
            raise RuntimeError("a token after the finish")
        self.num_tokens += 1
        if token in self._rules.token_ids and self.num_tokens > self._rules.min_tokens:
            self.finish = Finish(FinishReason.STOP, stop_token_id=token)
            last = self._token_bytes[token] if self._rules.include_stop else b""
            return self._text.flush(last) if self._text else ""
        may_stop = self.num_tokens >= self._rules.min_tokens
        text = self._text.push(token, may_stop) if self._text else ""
        if self._text and self._text.stopped_by is not None:
            self.finish = Finish(FinishReason.STOP, stop_string=self._text.stopped_by)
        elif self.num_tokens >= self._rules.max_tokens:
            self.finish = Finish(FinishReason.LENGTH)
            text += self._text.flush() if self._text else ""
        return text
