"""One choice of an answer as it grows: what its target has said, and what was passed on of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ssd.v1 import target_pb2 as pb
from ssd_client.generate.speculation import origin_name
from ssd_gateway.chat_formats.chat_parser import ChatParser
from ssd_gateway.chat_formats.chat_reading import ChatReading
from ssd_gateway.chat_formats.message import MessageDelta
from ssd_gateway.openai.translation import Wanted, unpack

REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
ORIGINS = {value: origin_name(value) for value in pb.TokenOrigin.values()}


@dataclass(slots=True)
class TokenEntry:
    """A token, and what is told of it."""

    token_id: int
    text: str  # that it released
    origin: str = ""
    logprobs: pb.TokenLogprobs | None = None  # None: the first token of a prompt has none


@dataclass(slots=True)
class ChoiceDelta:
    """What is new of a choice."""

    text: str = ""
    message: MessageDelta | None = None  # what a chat makes of the text
    entries: list[TokenEntry] = field(default_factory=list)  # where anything is told of tokens
    token_ids: list[int] = field(default_factory=list)
    first: bool = False
    prompt_token_ids: list[int] | None = None  # in the first delta, where token ids are asked for

    @property
    def is_empty(self) -> bool:
        has_text = self.text if self.message is None else not self.message.is_empty
        return not (has_text or self.entries or self.token_ids or self.first)


@dataclass(slots=True)
class Choice:
    index: int
    wanted: Wanted
    echo: str | None = None
    reading: ChatReading | None = None  # None: a text completion
    started: pb.GenerateStarted | None = None
    finish: pb.GenerateFinish | None = None
    prompt: list[pb.GeneratePrompt] = field(default_factory=list)
    pending: list[pb.GenerateTokens] = field(default_factory=list)  # not passed on yet
    passed_on: bool = False  # anything
    finish_told: bool = False
    num_characters: int = 0  # that were passed on
    num_tokens: int = 0
    target: str = ""
    num_moves: int = 0
    _parser: ChatParser | None = None
    _message: MessageDelta = field(default_factory=MessageDelta)  # not passed on yet

    def take(self, response: pb.GenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "tokens":
                self.pending.append(response.tokens)
                self.num_tokens += len(response.tokens.token_ids)
                self._read(response.tokens.text)
            case "started":
                self.started, self.prompt = response.started, []
            case "prompt":
                self.prompt.append(response.prompt)
            case "finish":
                self.finish = response.finish
                self._read("")

    @property
    def has_news(self) -> bool:
        return bool(self.pending) or (self.finish is not None and not self.finish_told)

    def pass_on(self) -> ChoiceDelta:
        """Everything that waits, as one delta."""
        messages, self.pending = self.pending, []
        delta = ChoiceDelta(first=not self.passed_on)
        if delta.first:
            self._begin(delta)
        if not self.wanted.no_output:
            self._extend(delta, messages)
        if self.reading is not None:
            delta.message, self._message = self._message, MessageDelta()
        self.passed_on, self.finish_told = True, self.finish is not None
        return delta

    @property
    def finish_reason(self) -> str | None:
        """None while it goes on. A text that ends by itself, with calls, ends for these."""
        finish, parser = self.finish, self._parser
        if finish is None:
            return None
        reason = REASONS.get(finish.reason, "stop")
        if reason != "stop" or parser is None or not parser.has_called:
            return reason
        cut = parser.is_calling and finish.WhichOneof("stopped_by") == "stop_string"
        return "stop" if cut else "tool_calls"

    def _read(self, text: str) -> None:
        """Texts of a chat are read as they come: a long one is never read all at once."""
        if self.reading is None:
            return
        if self._parser is None:
            self._parser = self.reading.parser("".join(part.text for part in self.prompt))
        self._parser.push(text, self._message)
        if self.finish is not None:
            self._parser.finish(self._message)

    def _begin(self, delta: ChoiceDelta) -> None:
        wanted = self.wanted
        if wanted.token_ids:
            delta.prompt_token_ids = [t for part in self.prompt for t in unpack(part.token_ids)]
        if not wanted.echo:
            return
        read = "".join(part.text for part in self.prompt)
        delta.text = read if self.echo is None else self.echo
        if wanted.logprobs:
            delta.entries.extend(self._prompt_entries())
            # Tokens that the tokenizer has put before the text have no place in it.
            self.num_characters = len(delta.text) - len(read)

    def _prompt_entries(self) -> Iterator[TokenEntry]:
        first = True
        for part in self.prompt:
            pieces = pieces_of(part.text, part.text_lengths)
            rows = zip(unpack(part.token_ids), pieces, part.logprobs, strict=True)
            for token, piece, logprobs in rows:
                yield TokenEntry(token, piece, logprobs=None if first else logprobs)
                first = False

    def _extend(self, delta: ChoiceDelta, messages: Sequence[pb.GenerateTokens]) -> None:
        wanted = self.wanted
        for message in messages:
            delta.text += message.text
            if wanted.token_ids:
                delta.token_ids.extend(message.token_ids)
            if wanted.logprobs or wanted.origins:
                delta.entries.extend(_entries(message))


def _entries(message: pb.GenerateTokens) -> Iterator[TokenEntry]:
    pieces = pieces_of(message.text, message.text_lengths)
    logprobs = message.logprobs or [None] * len(message.token_ids)
    rows = zip(message.token_ids, pieces, message.origins, logprobs, strict=True)
    for token, piece, origin, each in rows:
        yield TokenEntry(token, piece, ORIGINS.get(origin, ""), each)


def pieces_of(text: str, lengths: Sequence[int]) -> list[str]:
    """The text that each token released; ``lengths`` are bytes."""
    data, ends = text.encode(), [0, *accumulate(lengths)]
    return [data[begin:end].decode("utf-8", "replace") for begin, end in pairwise(ends)]
