"""What may be wrong in a module: one place of its syntax tree, changed to what it is not."""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SAYS = {
    "debug",
    "info",
    "warning",
    "error",
    "exception",
    "log",
    "echo",
    "secho",
}  # say it to people
SKIPPED = {
    ast.FunctionDef: ("decorator_list", "returns", "args"),
    ast.AsyncFunctionDef: ("decorator_list", "returns", "args"),
    ast.AnnAssign: ("annotation",),
    ast.match_case: ("pattern",),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    module: Path
    line: int
    begin: int  # characters of the source
    end: int
    was: str
    instead: str
    is_statement: bool
    compiled: bool  # by Triton, so that nothing else can stand in its function

    def applied(self, source: str) -> str:
        return source[: self.begin] + self.instead + source[self.end :]

    def told(self, source: str, call: str) -> str:
        """The source unchanged, but for a call where the fault would be."""
        inside = f"{call}; {self.was}" if self.is_statement else f"({call}, ({self.was}))[1]"
        return source[: self.begin] + inside + source[self.end :]

    def __str__(self) -> str:
        was, instead = (" ".join(text.split()) for text in (self.was, self.instead))
        return f"{self.module}:{self.line}: {was}  ->  {instead}"


def draw(root: Path, modules: Sequence[Path], number: int, seed: int) -> list[Fault]:
    """One in each of so many of these modules."""
    chance = random.Random(seed)
    order = chance.sample(sorted(modules), len(modules))
    drawn: list[Fault] = []
    for module in order:
        if len(drawn) < number and (possible := list(faults(module, (root / module).read_text()))):
            drawn.append(chance.choice(possible))
    return drawn


def faults(module: Path, source: str) -> Iterator[Fault]:
    """All that are possible in its functions."""
    begins = list(accumulate((len(line) for line in source.splitlines(keepends=True)), initial=0))
    lines = source.splitlines(keepends=True)

    def at(line: int, column: int) -> int:
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node, compiled in _inside(ast.parse(source), False, False):
        for new in _changed(node):
            begin, end = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
            is_statement = isinstance(node, ast.stmt)
            text = ast.unparse(new)
            instead = text if is_statement else f"({text})"
            yield Fault(
                module, node.lineno, begin, end, source[begin:end], instead, is_statement, compiled
            )


def _inside(
    node: ast.AST, function: bool, compiled: bool
) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """What functions consist of, without defaults, types, patterns and texts in braces."""
    for name, value in ast.iter_fields(node):
        if name in SKIPPED.get(type(node), ()):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr) or _says(child):
                continue
            if function and isinstance(child, ast.stmt | ast.expr):
                yield child, compiled
            if isinstance(child, Function):
                jitted = any("jit" in ast.unparse(each) for each in child.decorator_list)
                yield from _inside(child, True, compiled or jitted)
            else:
                yield from _inside(child, function, compiled)


def _says(node: ast.AST) -> bool:
    """True for a line of a log, or of a terminal."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in SAYS
    )


def _changed(node: ast.stmt | ast.expr) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [first, *others], values) if type(first) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(first)](), *others], values)
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), value):
            yield value
        case ast.IfExp(test, body, other):
            yield ast.IfExp(test, other, body)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in NAMES:
            yield ast.Call(ast.Name(NAMES[name]), arguments, keywords)
        case ast.Return(value) if value and not _is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()], _):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
