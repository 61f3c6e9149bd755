"""What a person or a program sees: text as it comes, lines of statistics, or one JSON object.

stdout carries the answer and nothing else; everything about it goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import click
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ssd.v1 import target_pb2
from ssd_client.connection.drafts import message_fields, planes_text
from ssd_client.errors import ClientError, count
from ssd_client.generate.events import Event, Moved, TokenLogprobs, Tokens
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.speculation import SpeculationStats, mode_name, served_otherwise
from ssd_client.printable import printable

_WIDE = 10_000  # a pipe has no width: nothing is folded in it


class Output(Protocol):
    """Shows one generation."""

    def show(self, event: Event) -> None: ...

    def end(self, result: GenerationResult, why: str | None) -> None:
        """Ends after the last event. `why` it ended early: "interrupted", "failed" or None."""


class TextOutput:
    """Streams the text to stdout and ends with statistics on stderr."""

    def __init__(
        self, notes: Console, mode: str | None = None, verification: str | None = None
    ) -> None:
        """`mode` and `verification`: as they were asked for, if they were."""
        self._notes = notes
        self._asked = mode, verification
        self._written = False

    def show(self, event: Event) -> None:
        match event:
            case Tokens():
                self._write(event.text)
            case Moved():
                show_move(self._notes, event)

    def end(self, result: GenerationResult, why: str | None) -> None:
        if self._written or why is None:
            write_stdout("\n")
        if why != "failed":
            show_statistics(self._notes, result, why)
            if result.speculation and (
                otherwise := served_otherwise(*self._asked, result.speculation)
            ):
                note(self._notes, otherwise)

    def _write(self, text: str) -> None:
        if text:
            self._written = True
            write_stdout(text)


class JsonOutput:
    """Prints one JSON object at the end, also of a generation that ended early."""

    def __init__(self, notes: Console, *, logprobs: bool) -> None:
        self._notes = notes
        self._logprobs = logprobs

    def show(self, event: Event) -> None:
        if isinstance(event, Moved):
            show_move(self._notes, event)

    def end(self, result: GenerationResult, why: str | None) -> None:
        if result.started is not None:
            write_json(result_json(result, logprobs=self._logprobs))


def show_statistics(notes: Console, result: GenerationResult, why: str | None) -> None:
    """The line of statistics, and that of speculation where there was any."""
    note(notes, " · ".join(statistics(result, why)))
    speculation = speculation_line(result)
    if speculation:
        note(notes, speculation)


def statistics(result: GenerationResult, why: str | None = None) -> list[str]:
    """The parts of the statistics line."""
    first_s = result.timing.first_after_s()
    rate = result.timing.tokens_per_s(len(result.token_ids))
    times = "once" if result.resumed == 1 else f"{result.resumed} times"
    parts = (
        count(result.completion_tokens, "token"),
        "" if first_s is None else f"first after {duration(first_s)}",
        "" if rate is None else f"{rate:.1f} tokens/s",
        why or (result.finished.reason.value if result.finished else "unfinished"),
        f"seed {result.started.seed}" if result.started else "",
        f"resumed {times}" if result.resumed else "",
    )
    return [part for part in parts if part]


def speculation_line(result: GenerationResult) -> str:
    """How speculation went, as far as a server said it; empty without speculation."""
    stats = result.speculation
    if stats is None or not stats.rounds or not (stats.mode in ("ssd", "sync") or stats.speculated):
        return ""
    title = "speculation after the resume" if result.resumed else "speculation"
    return f"{title}: {' · '.join(speculation_statistics(stats, result.speculation_tokens))}"


def speculation_statistics(stats: SpeculationStats, tokens: int) -> list[str]:
    """The parts of the speculation line; `tokens` is what the rounds gave."""
    made_up, hit_rate, acceptance = stats.synthetic_acceptance, stats.hit_rate, stats.acceptance
    cached = f"{stats.cache_tokens} of {count(tokens, 'token')} from the cache"
    misses = f"{stats.length_misses} length, {stats.token_misses} token"
    parts = (
        f"SYNTHETIC acceptance {made_up:g}" if made_up else "",
        count(stats.rounds, "round"),
        f"{tokens / stats.rounds:.1f} tokens/round",
        cached if stats.mode == "ssd" or hit_rate is not None else "",
        "" if hit_rate is None else f"hit rate {hit_rate * 100:.0f} %",
        "" if acceptance is None else f"acceptance {acceptance * 100:.0f} %",
        f"{stats.late} late" if stats.late else "",
        f"{stats.stale} stale" if stats.stale else "",
        f"{stats.missed} missed ({misses})" if stats.missed else "",
        f"fallbacks: {_fallbacks(stats)}" if stats.fallbacks else "",
    )
    return [part for part in parts if part]


def _fallbacks(stats: SpeculationStats) -> str:
    """The server's reasons, the most frequent first, each on this one line."""
    ranked = sorted(stats.fallbacks.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{' '.join(printable(reason).split())} {n}" for reason, n in ranked)


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def result_json(result: GenerationResult, *, logprobs: bool) -> dict[str, Any]:
    """The object that --json prints; `finish_reason` is null where the generation was cut off."""
    finished, started = result.finished, result.started
    content: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": finished.reason.value if finished else None,
        "stopped_by": finished.stopped_by if finished else None,
        "seed": started.seed if started else None,
        "usage": _usage_json(result),
        "timing": _timing_json(result.timing, len(result.token_ids)),
        "speculation": _speculation_json(result),
    }
    if logprobs:
        content["logprobs"] = [_logprobs_json(each) for each in result.logprobs]
    return {**content, "endpoints": result.endpoints, "resumed": result.resumed}


def _usage_json(result: GenerationResult) -> dict[str, Any]:
    if result.finished:
        return dataclasses.asdict(result.finished.usage)
    return {
        "prompt_tokens": result.started.prompt_tokens if result.started else None,
        "completion_tokens": len(result.token_ids),
        "cached_prompt_tokens": None,
    }


def _timing_json(timing: Timing, tokens: int) -> dict[str, float | None]:
    return {
        "ttft_ms": _rounded(timing.first_after_s(), 1e3),
        "tokens_per_s": _rounded(timing.tokens_per_s(tokens)),
        "total_ms": _rounded(timing.total_s(), 1e3),
    }


def _speculation_json(result: GenerationResult) -> dict[str, Any] | None:
    if result.speculation is None:
        return None
    return {"tokens": result.speculation_tokens, **dataclasses.asdict(result.speculation)}


def _logprobs_json(logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": _finite(value)} for token, value in logprobs.top]
    return {"token_id": logprobs.token_id, "logprob": _finite(logprobs.chosen), "top": top}


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else round(value * scale, 3)


def _finite(value: float) -> float | None:
    """JSON has no infinity: a token that cannot be drawn has the log probability null."""
    return value if math.isfinite(value) else None


def show_move(notes: Console, moved: Moved) -> None:
    """Says in a terminal that, and why, the request goes on elsewhere."""
    if notes.is_terminal:
        note(notes, move_text(moved))


def move_text(moved: Moved) -> str:
    if moved.full:
        happened = f"{moved.origin} is full"
    elif moved.leaving:
        happened = f"{moved.origin} is not serving"
    elif moved.tokens:
        happened = f"{moved.origin} lost after {count(moved.tokens, 'token')}"
    else:
        happened = moved.reason
    verb = "resuming on" if moved.tokens else "trying"
    later = f" in {duration(moved.wait_s)}" if moved.wait_s >= 0.1 else ""
    return f"{happened}, {verb} {moved.to}{later}"


def note(console: Console, line: str) -> None:
    console.print(Text(printable(line), style="dim"), soft_wrap=True)


@contextlib.contextmanager
def startup_status(console: Console, title: str) -> Iterator[Any]:
    """A spinner while local services start; yields what takes their phases."""
    with console.status(f"{title}: starting …") as status:
        yield lambda phase: status.update(f"{title}: {phase} …")


def show_error(error: ClientError, hint: str = "") -> None:
    click.echo(f"error: {printable(str(error))}{hint}", err=True)


def model_info_json(info: target_pb2.GetModelInfoResponse) -> dict[str, Any]:
    values = _fields(info)
    del values["speculation_endpoints"]  # the longest goes last
    return {
        **values,
        "load": _load_json(info.load),
        "sampling_defaults": _sampling_json(info.sampling_defaults),
        "eos_token_ids": list(info.eos_token_ids),
        "speculation_modes": [mode_name(each) for each in info.speculation_modes],
        "chat_format": _fields(info.chat_format),
        "draft_inside": message_fields(info)["draft_inside"],
        "speculation_endpoints": [message_fields(each) for each in info.speculation_endpoints],
    }


def _sampling_json(options: target_pb2.SamplingOptions) -> dict[str, float]:
    """Options that are set, as they were written: they travel as float32."""
    return {each.name: float(f"{value:.7g}") for each, value in options.ListFields()}


def _load_json(load: target_pb2.TargetLoad) -> dict[str, Any]:
    names = ("running", "waiting", "used_kv_blocks", "prompt_tokens", "forwards", "forward_micros")
    return {name: getattr(load, name) for name in names}


def _fields(message: Message) -> dict[str, Any]:
    return {each.name: getattr(message, each.name) for each in message.DESCRIPTOR.fields}


def show_model_info(rows: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), printable(_cell(value)))
    width = None if sys.stdout.isatty() else _WIDE
    Console(markup=False, highlight=False, emoji=False, width=width).print(table)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case dict():
            return ", ".join(
                f"{name.replace('_', ' ')} {_cell(each)}" for name, each in value.items()
            )
        case [dict(), *_]:
            return "\n".join(endpoint_text(each) for each in value)
        case Sequence() if not isinstance(value, str):
            return ", ".join(str(each) for each in value) or "none"
    return str(value)


def endpoint_text(endpoint: dict[str, Any]) -> str:
    """A speculation endpoint: where it is, how it is, and what it serves or why it does not."""
    about = [endpoint["draft_name"], endpoint["reason"], planes_text(endpoint.get("planes", ()))]
    if endpoint["open_sequences"]:
        about.append(count(endpoint["open_sequences"], "sequence"))
    details = ", ".join(each for each in about if each)
    head = f"{place_text(endpoint)} {endpoint['state']}"
    return f"{head} ({details})" if details else head


def place_text(endpoint: dict[str, Any]) -> str:
    """Where a speculation endpoint is, and what named it."""
    source = endpoint.get("source")  # files of earlier versions have none
    return f"{endpoint['address']} of {source}" if source else str(endpoint["address"])


def write_json(content: dict[str, Any]) -> None:
    write_stdout(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def write_stdout(text: str) -> None:
    """Writes at once: UTF-8 to a pipe or a file, what a terminal can show to a terminal."""
    terminal = sys.stdout.isatty()
    data = printable(text).encode(sys.stdout.encoding, "replace") if terminal else text.encode()
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the reader has enough: click ends the program quietly
        raise
    except OSError as error:
        _drop_stdout()
        raise ClientError(f"cannot write to standard output: {error.strerror}") from error


def _drop_stdout() -> None:
    """What is still buffered goes nowhere; else the interpreter would fail on it again at exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
