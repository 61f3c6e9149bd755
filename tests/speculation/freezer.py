"""Copies of a toy world, fast: what never changes, or never matters, is shared between them."""

import io
import pickle
from enum import Enum
from types import FunctionType
from typing import Any

import msgspec

from ssd_draft.engine.link_sequences import Counters
from ssd_draft.planning.plan import Planner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.fan_out import AcceptanceRate
from ssd_engine.speculation.frames import Branches, Close, Launch, Load, Notice, Open, Outcome
from ssd_engine.speculation.latency_model import Average, StepClock
from ssd_engine.text.completion import StopRules
from ssd_engine.text.detokenizer import TextStream
from ssd_target.records.speculation_options import SpeculationOptions, SpeculationRequest
from ssd_target.records.speculation_stats import SpeculationStats
from ssd_target.scheduling.scheduler import CacheCounters
from ssd_target.speculation.endpoints.payoff import Payoff

FRAMES = (Open, Outcome, Launch, Close, Branches, Notice, Load)
CONSTANT = (Enum, type, FunctionType)
SHARED = {
    *FRAMES,
    *(SamplingParams, StopRules, SpeculationOptions, SpeculationRequest),
    # Counted and measured in vain: depth, fan-out and wait are given, nothing is ever left for
    # not paying, and the text has no bytes.
    *(Counters, CacheCounters, SpeculationStats, StepClock, Average, AcceptanceRate),
    *(Payoff, Planner, TextStream),
}


_objects: list[Any] = []
_numbers: dict[int | bytes, int] = {}  # of an object that is kept by its id, of a frame by value


def freeze(world: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(world)
    return buffer.getvalue()


def thaw(frozen: bytes) -> Any:
    return pickle.loads(frozen)


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if thing is _recall or (type(thing) not in SHARED and not isinstance(thing, CONSTANT)):
            return NotImplemented
        return _recall, (_number(thing),)


def _recall(number: int) -> Any:
    return _objects[number]


def _number(thing: Any) -> int:
    number = _numbers.get(id(thing))
    if number is None and isinstance(thing, FRAMES):
        number = _numbers.get(msgspec.msgpack.encode(thing))
    if number is None:
        number = len(_objects)
        _objects.append(thing)
        _numbers[id(thing)] = number
        if isinstance(thing, FRAMES):
            _numbers[msgspec.msgpack.encode(thing)] = number
    return number
