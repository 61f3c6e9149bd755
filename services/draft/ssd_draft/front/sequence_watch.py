"""Follows the sequences of all links for the log and for traces, with their text only where an
operator asks for it. Whether anybody looks is decided once; if not, frames pass unwatched."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd_engine.speculation.frames import (
    Branches,
    Close,
    DraftFrame,
    Launch,
    Notice,
    Open,
    TargetFrame,
)
from ssd_engine.text.token_ids import unpack_tokens
from ssd_serving.observability.telemetry import NoSpans, Span, Spans

log = logging.getLogger(__name__)

SPAN = "ssd.draft.sequence"
MAX_TRACED = 4096  # sequences at a time; further ones go untraced
TextOf = Callable[[list[int]], str]


@dataclass(slots=True)
class TracedSequence:
    span: Span
    rounds: int = 1
    branch_tokens: int = 0

    def pushed(self, tokens: int) -> None:
        if not self.branch_tokens and tokens:
            self.span.event("first branches")
        self.branch_tokens += tokens

    def end(self, how: str) -> None:
        self.span.set(rounds=self.rounds, branch_tokens=self.branch_tokens, end=how)
        self.span.end()


class NoSequenceWatch:
    """Ignores all frames, where nobody is interested in them."""

    def received(self, link: int, frames: Sequence[TargetFrame]) -> None:
        pass

    def sent(self, link: int, frames: Sequence[DraftFrame]) -> None:
        pass

    def ended(self, link: int) -> None:
        pass


class SequenceWatch(NoSequenceWatch):
    def __init__(self, spans: Spans, text_of: TextOf | None) -> None:
        """``text_of`` tokens: only where prompts are to be logged."""
        self._spans = spans
        self._text_of = text_of
        self._traced: dict[tuple[int, int], TracedSequence] = {}  # by link and sequence

    def received(self, link: int, frames: Sequence[TargetFrame]) -> None:
        for frame in frames:
            if isinstance(frame, Open):
                self._opened(link, frame)
            elif isinstance(frame, Launch):
                if (traced := self._traced.get((link, frame.sequence))) is not None:
                    traced.rounds += 1
            elif isinstance(frame, Close):
                log.debug("sequence %d is closed", frame.sequence, extra=_about(link, frame))
                self._end(link, frame.sequence, "closed")

    def sent(self, link: int, frames: Sequence[DraftFrame]) -> None:
        for frame in frames:
            if isinstance(frame, Branches):
                if (traced := self._traced.get((link, frame.sequence))) is not None:
                    traced.pushed(sum(len(branch.tokens) for branch in frame.branches))
            elif isinstance(frame, Notice) and frame.sequence:
                kind = frame.kind.name.lower()
                extra = _about(link, frame)
                log.debug("sequence %d: %s, %s", frame.sequence, kind, frame.reason, extra=extra)
                self._end(link, frame.sequence, kind)

    def ended(self, link: int) -> None:
        for held, sequence in list(self._traced):
            if held == link:
                self._end(link, sequence, "link ended")

    def _opened(self, link: int, frame: Open) -> None:
        self._end(link, frame.sequence, "opened again")
        self._log(link, frame)
        if not frame.trace_context or len(self._traced) >= MAX_TRACED:
            return
        span = self._spans.begin(SPAN, frame.trace_context)
        prompt, output = len(frame.prompt) // 4, len(frame.output) // 4
        span.set(link=link, sequence=frame.sequence, prompt_tokens=prompt, output_tokens=output)
        self._traced[link, frame.sequence] = TracedSequence(span)

    def _log(self, link: int, frame: Open) -> None:
        extra = _about(link, frame)
        words = (frame.sequence, frame.round)
        message = "sequence %d is opened in round %d"
        if self._text_of is None:
            log.debug(message, *words, extra=extra)
        else:
            text = self._text_of(unpack_tokens(frame.prompt + frame.output))
            log.info(f"{message}, prompt %r", *words, text, extra={**extra, "prompt": text})

    def _end(self, link: int, sequence: int, how: str) -> None:
        if (traced := self._traced.pop((link, sequence), None)) is not None:
            traced.end(how)


def _about(link: int, frame: TargetFrame | DraftFrame) -> dict[str, int]:
    return {"link": link, "sequence": frame.sequence}


def make_watch(spans: Spans, text_of: TextOf | None) -> NoSequenceWatch:
    looks = not isinstance(spans, NoSpans) or text_of is not None
    if looks or log.isEnabledFor(logging.DEBUG):
        return SequenceWatch(spans, text_of)
    return NoSequenceWatch()
