"""All that can happen in a toy world, state by state, shortest way first."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

from ssd_target.records.speculation_stats import LookUp, SpeculationStats
from tests.speculation.freezer import freeze, thaw
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


def explore(setting: Setting, judge: Judge | None = None, limit: int | None = None) -> Explored:
    """Every reachable state is checked, and given to ``judge``.

    Ends at the first wrong one; ``limit`` ends it after so many states.
    """
    result = Explored()
    with toy_time(), counted(result.look_ups):
        _search(setting, result, judge, limit)
    return result


def _search(
    setting: Setting,
    result: Explored,
    judge: Judge | None,
    limit: int | None,
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
            if judge is not None:
                judge(world)
            queue.append((key, packed))
        except Exception as error:
            _report(result, error, parents, came)
            return False
        return True

    going = meet(start, None)
    while going and queue and (limit is None or len(parents) < limit):
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
