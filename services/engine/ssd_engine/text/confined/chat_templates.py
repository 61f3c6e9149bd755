"""Chat templates: programs of strangers, in Jinja's sandbox, with the names that transformers gives
them. Run as a program, it renders what it is asked to.

transformers' own rendering comes to the same text.
"""

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ssd_engine.text.confined.answers import BrokenError, answer_questions, within


def render(question: dict[str, Any]) -> str:
    """``template`` with the values of ``names``, within ``seconds`` where these are given."""
    template = _compiled(question["template"])
    with within(question.get("seconds")):
        return template.render(question["names"])


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    """A template is compiled once: a chat is rendered for every request."""
    try:
        return _environment().from_string(template)
    except MemoryError:
        raise
    except Exception as error:  # Jinja's, or Python's, which compiles what Jinja makes of it
        raise BrokenError(str(error) or type(error).__name__) from error


class _OpenNames(Namespace):
    """What ``namespace()`` makes: no name of Python's own can be hidden in it."""

    def __init__(*arguments: Any, **names: Any) -> None:
        self, *rest = arguments
        given = dict(*rest, **names)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not keep a name such as {name!r}")


class _Dictionaries:
    """Takes the place of the class ``dict`` in templates."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _TrainingMark(Extension):
    """``{% generation %}`` marks what an assistant said. That counts in training alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_TrainingMark, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dictionaries()
    environment.globals["namespace"] = _OpenNames
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter is made for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    answer_questions(render)
