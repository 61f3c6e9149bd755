"""All that can happen in a toy world, state by state, shortest way first."""

import hashlib
import io
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

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
from ssd_target.records.speculation_stats import LookUp, SpeculationStats
from ssd_target.scheduling.scheduler import CacheCounters
from ssd_target.speculation.endpoints.payoff import Payoff
from tests.speculation.toy_world import (
    LONGER,
    Action,
    NeedsChoice,
    Setting,
    World,
    Wrong,
)

Key = bytes
Judge = Callable[[World], None]  # of a state, which it may change


@dataclass
class Explored:
    states: int = 0
    transitions: int = 0
    actions: Counter[str] = field(default_factory=Counter)  # how often each kind was taken
    look_ups: Counter[LookUp] = field(default_factory=Counter)
    wrong: str | None = None
    trace: list[Action] = field(default_factory=list)  # that leads there


@contextmanager
def toy_time() -> Iterator[None]:
    """No time but the world's own."""
    with patch("ssd_engine.forward.result.time", SimpleNamespace(monotonic=lambda: 0.0)):
        yield


@contextmanager
def counted(look_ups: Counter[LookUp]) -> Iterator[None]:
    def count(stats: SpeculationStats, result: LookUp) -> None:
        look_ups[result] += 1

    with patch.object(SpeculationStats, "looked_up", count):
        yield


def explore(setting: Setting, judge: Judge) -> Explored:
    """Every reachable state is checked, and given to ``judge``, until one is wrong."""
    result = Explored()
    with toy_time(), counted(result.look_ups):
        _search(setting, result, judge)
    return result


def _search(
    setting: Setting,
    result: Explored,
    judge: Judge,
) -> None:
    start = World(setting)
    parents: dict[Key, tuple[Key, Action] | None] = {}
    queue: deque[tuple[Key, bytes]] = deque()

    def meet(world: World, came: tuple[Key, Action] | None) -> bool:
        """False when something is wrong with this state."""
        try:
            world.check()
            key = _digest(world)
            if key in parents:
                return True
            parents[key] = came
            packed = freeze(world)
            judge(world)
            queue.append((key, packed))
        except Exception as error:
            _report(result, error, parents, came)
            return False
        return True

    going = meet(start, None)
    while going and queue:
        key, packed = queue.popleft()
        spare: World | None = _thawed(packed, setting)
        pending = deque(spare.actions() if spare else ())
        while pending and going:
            action = pending.popleft()
            world, spare = spare or _thawed(packed, setting), None
            try:
                world.apply(action)
            except NeedsChoice as wait:
                kind, number, arrivals, *script = action
                so_far = script[0] if script else ()
                pending.extend(
                    (kind, number, arrivals, (*so_far, choice)) for choice in wait.choices
                )
                continue
            except Exception as error:
                _report(result, error, parents, (key, action))
                going = False
                break
            result.transitions += 1
            result.actions[action[0]] += 1
            going = meet(world, (key, action))
    result.states = len(parents)


class Recovery:
    """From every state, once nothing more goes wrong: speculation resumes, and all ends well."""

    def __init__(self, patience: int) -> None:
        """``patience``: rounds within which speculation has to be back."""
        self._patience = patience
        self._known: set[Key] = set()  # states, with nothing in flight, from which it was shown
        self.slowest = 0

    def __call__(self, world: World) -> None:
        world.settle()
        world.check()
        key = _digest(world)
        if key not in self._known:
            self._known.add(key)
            settled = freeze(world)
            self._resume(_thawed(settled, world.setting))
            self._end(_thawed(settled, world.setting))

    def _resume(self, world: World) -> None:
        world.lengthen(LONGER)
        for rounds in range(self._patience + 1):
            world.settle()
            if world.speculates():
                self.slowest = max(self.slowest, rounds)
                return
            world.calm_round()
            world.check()
        raise Wrong(f"speculation is not back within {self._patience} rounds")

    def _end(self, world: World) -> None:
        for _ in range(LONGER):
            if not any(target.has_work for target in world.targets):
                world.settle()
                world.check_quiet()
                return
            world.calm_round()
            world.check()
        raise Wrong("a sequence does not end")


def _thawed(packed: bytes, setting: Setting) -> World:
    world: World = thaw(packed)
    world.setting = setting
    return world


def _digest(world: World) -> Key:
    return hashlib.blake2b(world.key(), digest_size=12).digest()


def _report(
    result: Explored,
    error: Exception,
    parents: dict[Key, tuple[Key, Action] | None],
    came: tuple[Key, Action] | None,
) -> None:
    result.wrong = f"{type(error).__name__}: {error}"
    while came is not None:
        key, action = came
        result.trace.insert(0, action)
        came = parents[key]


# Copies of a world, fast: what never changes, or never matters, is shared between them.

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
