"""Types of command line values that click does not have."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

import click

from ssd_client.connection.endpoints import check_address, check_target


class _Type(click.ParamType):
    """Turns the ValueError of `parse` into click's error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # converted before, or a default
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def parse(self, value: str) -> Any:
        raise NotImplementedError


class Parsed(_Type):
    """A value that a given function parses; the user is shown its ValueError."""

    def __init__(self, parse: Callable[[str], Any], name: str) -> None:
        self._parse = parse
        self.name = name

    def parse(self, value: str) -> Any:
        return self._parse(value)


class Uint(_Type):
    name = "n"

    def __init__(self, bits: int = 32, least: int = 0) -> None:
        self._bits = bits
        self._least = least

    def parse(self, value: str) -> int:
        if not _is_uint(value) or not self._least <= int(value) < 2**self._bits:
            raise ValueError(f"{value!r} is not a whole number in {self._least}..2^{self._bits}-1")
        return int(value)


class UintList(_Type):
    """Whole numbers, each at least 1: 1,2,4."""

    name = "n,n"

    def parse(self, value: str) -> tuple[int, ...]:
        return tuple(Uint(least=1).parse(each.strip()) for each in value.split(","))


class RatesParam(_Type):
    """Numbers above 0: 0.5,2."""

    name = "x,x"

    def parse(self, value: str) -> tuple[float, ...]:
        rates = tuple(parse_number(each) for each in value.split(","))
        if not all(0 < rate <= 1e6 for rate in rates):
            raise ValueError(f"{value!r} is not a list of numbers above 0")
        return rates


class Milliseconds(_Type):
    """Numbers from 0 to 10,000: 0,5,20."""

    name = "ms,ms"

    def parse(self, value: str) -> tuple[float, ...]:
        found = tuple(parse_number(each) for each in value.split(","))
        if not all(0 <= each <= 10_000 for each in found):
            raise ValueError(f"{value!r} is not a list of milliseconds, 0 to 10000")
        return found


class Percent(_Type):
    name = "percent"

    def parse(self, value: str) -> int:
        if not _is_uint(value) or not 1 <= int(value) <= 100:
            raise ValueError(f"{value!r} is not a whole number in 1..100")
        return int(value)


class Number(_Type):
    name = "x"

    def parse(self, value: str) -> float:
        return parse_number(value)


class Utf8(_Type):
    """Text that can go on the wire: the shell hands over any bytes."""

    name = "text"

    def parse(self, value: str) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            offset = len(os.fsencode(value[: error.start]))
            raise ValueError(f"not valid UTF-8 at byte {offset}") from None
        return value


class TextLinesParam(Utf8):
    """Several texts from an environment variable are one to a line, not one to a word."""

    envvar_list_splitter = "\n"


class Address(_Type):
    name = "host:port"

    def parse(self, value: str) -> str:
        return check_address(value)


class Target(_Type):
    """An address, or a name that stands for all addresses behind it."""

    name = "host:port"

    def parse(self, value: str) -> str:
        return check_target(value)


class TokenIds(_Type):
    name = "ids"

    def parse(self, value: str) -> tuple[int, ...]:
        return tuple(parse_token_id(each) for each in value.split(","))


class LogitBias(_Type):
    name = "token=value"

    def parse(self, value: str) -> tuple[int, float]:
        token_id, separator, bias = value.partition("=")
        if not separator:
            raise ValueError(f"{value!r} is not TOKEN=VALUE")
        return parse_token_id(token_id), parse_number(bias)


class JsonObject(_Type):
    name = "json"

    def parse(self, value: str) -> dict[str, Any]:
        try:
            content = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f'{value!r} is no JSON object such as {{"enable_thinking": false}}')
        return content


class Seconds(_Type):
    name = "seconds"

    def parse(self, value: str) -> float:
        seconds = parse_number(value)
        if not 0 < seconds <= 1e9:
            raise ValueError(f"{value} is not above 0 and at most 1e9")
        return seconds


def parse_token_id(text: str) -> int:
    number = text.strip()
    if not _is_uint(number) or int(number) >= 2**32:
        raise ValueError(f"{number!r} is not a token id")
    return int(number)


def parse_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    return number


def _is_uint(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20  # 2^64 has 20 digits
