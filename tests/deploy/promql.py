"""As much of PromQL as our alert rules use, over samples in memory.

Held against Prometheus itself where promtool is there: both run alerts.test.yaml. A rate is the
rise between the first and the last sample of its range over the time between them; Prometheus
extrapolates to the ends of the range, which no rule of ours is fine enough to notice.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
LOOK_BACK = 300.0  # seconds, for which a sample is good
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
    ">=": lambda a, b: a >= b,
}
COMPUTE: dict[str, Callable[[float, float], float]] = {
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.nan,
}
MATCH: dict[str, Callable[[str, str], bool]] = {
    "Equal": lambda have, want: have == want,
    "NotEqual": lambda have, want: have != want,
    "Re": lambda have, want: re.fullmatch(want, have) is not None,
    "NotRe": lambda have, want: re.fullmatch(want, have) is None,
}


@dataclass
class Samples:
    """Of each series the samples as (seconds, value), oldest first."""

    series: dict[tuple[str, Labels], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, name: str, labels: dict[str, str], at: float, value: float) -> None:
        self.series[name, frozenset(labels.items())].append((at, value))

    def select(
        self, selector: promql.VectorSelector, begin: float, end: float
    ) -> dict[Labels, list[tuple[float, float]]]:
        found = {}
        for (name, labels), samples in self.series.items():
            if name == selector.name and _matches(dict(labels), selector.matchers.matchers):
                found[labels] = [(at, v) for at, v in samples if begin < at <= end]
        return {labels: samples for labels, samples in found.items() if samples}


def _matches(labels: dict[str, str], matchers: Iterable[promql.Matcher]) -> bool:
    return all(
        MATCH[str(each.op).split(".")[1]](labels.get(each.name, ""), each.value)
        for each in matchers
    )


def evaluate(expression: str, samples: Samples, at: float) -> Vector:
    result = _evaluate(promql.parse(expression), samples, at)
    assert isinstance(result, dict), "a rule gives a vector"
    return result


def _evaluate(node: Any, samples: Samples, at: float) -> Vector | float:
    match node:
        case promql.NumberLiteral():
            return float(node.val)
        case promql.ParenExpr():
            return _evaluate(node.expr, samples, at)
        case promql.VectorSelector():
            found = samples.select(node, at - LOOK_BACK, at)
            return {labels: points[-1][1] for labels, points in found.items()}
        case promql.Call():
            return _call(node, samples, at)
        case promql.AggregateExpr():
            return _aggregate(node, _vector(node.expr, samples, at))
        case promql.BinaryExpr():
            left, right = (_evaluate(each, samples, at) for each in (node.lhs, node.rhs))
            return _binary(str(node.op), left, right)
    raise NotImplementedError(type(node).__name__)


def _vector(node: Any, samples: Samples, at: float) -> Vector:
    result = _evaluate(node, samples, at)
    assert isinstance(result, dict)
    return result


def _call(node: promql.Call, samples: Samples, at: float) -> Vector:
    name = node.func.name
    if name in ("rate", "increase"):
        return _rises(node.args[0], samples, at, per_second=name == "rate")
    if name == "absent":
        wanted = node.args[0].matchers.matchers
        labels = frozenset((m.name, m.value) for m in wanted if str(m.op).endswith(".Equal"))
        return {} if _vector(node.args[0], samples, at) else {labels: 1.0}
    if name == "histogram_quantile":
        return _quantile(node.args[0].val, _vector(node.args[1], samples, at))
    raise NotImplementedError(name)


def _rises(node: promql.MatrixSelector, samples: Samples, at: float, per_second: bool) -> Vector:
    seconds = node.range.total_seconds()
    rises: Vector = {}
    for labels, points in samples.select(node.vector_selector, at - seconds, at).items():
        if len(points) < 2:
            continue
        rise = sum(
            later - before if later >= before else later  # a counter that starts anew
            for (_, before), (_, later) in itertools.pairwise(points)
        )
        rate = rise / (points[-1][0] - points[0][0])
        rises[labels] = rate if per_second else rate * seconds
    return rises


def _aggregate(node: promql.AggregateExpr, vector: Vector) -> Vector:
    assert str(node.op) == "sum", "of aggregations, rules use sums"
    keep = set() if node.modifier is None else set(node.modifier.labels)
    sums: Vector = defaultdict(float)
    for labels, value in vector.items():
        sums[frozenset(each for each in labels if each[0] in keep)] += value
    return dict(sums)


def _binary(op: str, left: Vector | float, right: Vector | float) -> Vector | float:
    if op == "and":
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        return {labels: value for labels, value in left.items() if labels in right}
    if op in COMPARE:
        assert isinstance(left, dict)
        return {k: a for k, a, b in _pairs(left, right) if COMPARE[op](a, b)}
    if isinstance(left, float):
        assert isinstance(right, dict)
        return {labels: COMPUTE[op](left, value) for labels, value in right.items()}
    return {labels: COMPUTE[op](a, b) for labels, a, b in _pairs(left, right)}


def _pairs(left: Vector, right: Vector | float) -> list[tuple[Labels, float, float]]:
    if isinstance(right, float):
        return [(labels, value, right) for labels, value in left.items()]
    return [(labels, left[labels], right[labels]) for labels in left.keys() & right.keys()]


def _quantile(q: float, buckets: Vector) -> Vector:
    """As Prometheus does: by lines between the edges of the buckets."""
    by_series: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, value in buckets.items():
        edge = float(dict(labels)["le"].replace("+Inf", "inf"))
        by_series[frozenset(each for each in labels if each[0] != "le")].append((edge, value))
    return {labels: _one_quantile(q, sorted(found)) for labels, found in by_series.items()}


def _one_quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    rank, (low, below) = q * buckets[-1][1], (0.0, 0.0)
    if not buckets[-1][1]:
        return math.nan
    for edge, count in buckets:
        if count >= rank:
            if math.isinf(edge):
                return low
            return low + (edge - low) * (rank - below) / (count - below) if count > below else edge
        low, below = edge, count
    return low


def firing(rules: Iterable[dict[str, Any]], samples: Samples, at: float, step: float) -> set[str]:
    """Names of the alerts that fire: true for as long as they say, looked at in steps."""
    return {rule["alert"] for rule in rules if _fires(rule, samples, at, step)}


def _fires(rule: dict[str, Any], samples: Samples, at: float, step: float) -> bool:
    held = _seconds(rule.get("for", "0m"))
    times = [at - i * step for i in range(int(held // step) + 1)]
    held_by = [evaluate(rule["expr"], samples, each).keys() for each in times if each >= 0]
    return len(held_by) == len(times) and bool(set.intersection(*map(set, held_by)))


def _seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def expand(values: str) -> list[float | None]:
    """promtool's notation: 1x3 is 1 1 1 1, 1+2x3 is 1 3 5 7, _ is no sample."""
    points: list[float | None] = []
    for word in values.split():
        found = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?(?:x(\d+))?", word)
        if found is None:
            assert word == "_", word
            points.append(None)
            continue
        start, slope, times = float(found[1]), float(found[2] or 0), int(found[3] or 0)
        points += [start + slope * i for i in range(times + 1)]
    return points


def parse_series(text: str) -> tuple[str, dict[str, str]]:
    selector = promql.parse(text)
    return selector.name, {m.name: m.value for m in selector.matchers.matchers}
