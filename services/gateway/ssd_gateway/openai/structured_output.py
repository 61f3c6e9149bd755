"""What a text must be: the fields for it, and the grammar of the targets' contract."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ssd.v1 import target_pb2 as pb
from ssd_gateway.chat_formats.reasoning import Thinking
from ssd_gateway.chat_formats.tool_grammar import answer_alone, json_rule
from ssd_gateway.http.errors import bad_request
from ssd_gateway.openai.fields import GenerationFields, ResponseFormat, StructuredOutputs

_SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)
ANY_OBJECT = {"type": "object"}
MAX_CHOICES = 4096


@dataclass(frozen=True)
class NamedGrammar:
    """A grammar, and the field of the request that it comes from."""

    param: str
    grammar: pb.Grammar
    # The rule of a larger grammar that stands for this one; None where there is none.
    answer: str | None = None
    rules: Mapping[str, str] = field(default_factory=dict)  # fields that single rules come from

    @property
    def params(self) -> dict[str, str]:
        """What the targets' contract calls the field, and what the caller does."""
        place = f"grammar.{self.grammar.WhichOneof('rule')}"
        return {f"{place}.{rule}": param for rule, param in self.rules.items()} | {
            place: self.param
        }

    def after_thoughts(self, thinking: Thinking) -> "NamedGrammar":
        if thinking is Thinking.NEVER or self.answer is None:
            return self
        text = answer_alone(thinking, self.answer)
        return NamedGrammar(self.param, pb.Grammar(context_free=text), rules={"answer": self.param})


def _with_schema(place: str, schema: Any) -> NamedGrammar:
    schema = {} if schema is True else schema  # they say the same
    try:
        text = msgspec.json.encode(schema).decode()
        answer = json_rule(schema) if isinstance(schema, dict) else None
    except RecursionError:
        raise bad_request(place, "is nested too deeply") from None
    return NamedGrammar(place, pb.Grammar(json_schema=text), answer)


def _with_regex(place: str, regex: str) -> NamedGrammar:
    answer = "/" + _SPECIAL.sub(_escaped, regex) + "/"
    is_whole = (len(regex) - len(regex.rstrip("\\"))) % 2 == 0
    return NamedGrammar(place, pb.Grammar(regex=regex), answer if is_whole else None)


def _escaped(found: "re.Match[str]") -> str:
    """As it stands between slashes, on one line."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _with_choices(place: str, texts: list[str]) -> NamedGrammar:
    if len(texts) > MAX_CHOICES:
        raise bad_request(place, f"at most {MAX_CHOICES}, got {len(texts)}")
    answer = " | ".join(json.dumps(text) for text in texts)
    return NamedGrammar(place, pb.Grammar(choices=pb.Choices(texts=texts)), answer or None)


def grammar_of(fields: GenerationFields) -> NamedGrammar | None:
    """None: any text. Raises where two fields ask for one."""
    found = list(_found(fields))
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise bad_request(second, f"cannot be together with {first}: leave one of them out")
    return found[0] if found else None


def _found(fields: GenerationFields) -> Iterator[NamedGrammar]:
    if fields.response_format is not None:
        yield from _response_format(fields.response_format)
    if fields.structured_outputs is not None:
        yield _structured_outputs(fields.structured_outputs)
    if fields.regex is not None:
        yield _with_regex("regex", fields.regex)
    if fields.ebnf is not None:
        yield NamedGrammar("ebnf", pb.Grammar(context_free=fields.ebnf))


def _response_format(given: ResponseFormat) -> Iterator[NamedGrammar]:
    inner = given.json_schema
    if (inner is not None) != (given.type == "json_schema"):
        raise bad_request(
            "response_format.json_schema", 'belongs to "type": "json_schema", and is needed there'
        )
    if given.type == "json_object":
        yield _with_schema("response_format", ANY_OBJECT)
    if inner is not None:
        place = "response_format.json_schema.schema"
        if inner.schema is None:
            raise bad_request(place, "is missing", "missing_required_parameter")
        yield _with_schema(place, inner.schema)


def _structured_outputs(given: StructuredOutputs) -> NamedGrammar:
    values = {name: getattr(given, name) for name in given.__struct_fields__}
    named = [name for name, value in values.items() if value is not None and value is not False]
    if len(named) != 1:
        got = ", ".join(named) or "none"
        raise bad_request(
            "structured_outputs", f"exactly one of {', '.join(values)} is needed, got {got}"
        )
    place, value = f"structured_outputs.{named[0]}", values[named[0]]
    match named[0]:
        case "json":
            return _with_schema(place, _schema(place, value))
        case "regex":
            return _with_regex(place, value)
        case "choice":
            return _with_choices(place, value)
        case "grammar":
            return NamedGrammar(place, pb.Grammar(context_free=value))
    return _with_schema(place, ANY_OBJECT)


def _schema(place: str, given: dict[str, Any] | str) -> Any:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_request(place, f"is no JSON: {error}") from None
