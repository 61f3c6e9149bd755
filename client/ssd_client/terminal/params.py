"""Types of command line values that click does not have."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ssd_client.connection.endpoints import check_address, check_target
from ssd_client.openai.url import check_url


class Parsed(click.ParamType):
    """A value that a given function parses; the user is shown its ValueError."""

    def __init__(self, parse: Callable[[str], Any], name: str) -> None:
        self._parse = parse
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # converted before, or a default
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _ParsedLines(Parsed):
    """Several values from an environment variable are one to a line, not one to a word."""

    envvar_list_splitter = "\n"


def uint(bits: int = 32, least: int = 0) -> Parsed:
    return Parsed(partial(parse_uint, bits=bits, least=least), "n")


def parse_uint(text: str, bits: int = 32, least: int = 0) -> int:
    if not _is_uint(text) or not least <= int(text) < 2**bits:
        raise ValueError(f"{text!r} is not a whole number in {least}..2^{bits}-1")
    return int(text)


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


def _parse_uints(text: str) -> tuple[int, ...]:
    return tuple(parse_uint(each.strip(), least=1) for each in text.split(","))


def _parse_token_ids(text: str) -> tuple[int, ...]:
    return tuple(parse_token_id(each) for each in text.split(","))


def _parse_rates(text: str) -> tuple[float, ...]:
    rates = tuple(parse_number(each) for each in text.split(","))
    if not all(0 < rate <= 1e6 for rate in rates):
        raise ValueError(f"{text!r} is not a list of numbers above 0")
    return rates


def _parse_milliseconds(text: str) -> tuple[float, ...]:
    found = tuple(parse_number(each) for each in text.split(","))
    if not all(0 <= each <= 10_000 for each in found):
        raise ValueError(f"{text!r} is not a list of milliseconds, 0 to 10000")
    return found


def _parse_percent(text: str) -> int:
    if not _is_uint(text) or not 1 <= int(text) <= 100:
        raise ValueError(f"{text!r} is not a whole number in 1..100")
    return int(text)


def _parse_seconds(text: str) -> float:
    seconds = parse_number(text)
    if not 0 < seconds <= 1e9:
        raise ValueError(f"{text} is not above 0 and at most 1e9")
    return seconds


def _check_utf8(text: str) -> str:
    """Text that can go on the wire: the shell hands over any bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        offset = len(os.fsencode(text[: error.start]))
        raise ValueError(f"not valid UTF-8 at byte {offset}") from None
    return text


def _check_listen(text: str) -> str:
    """An address to listen on: port 0 takes a free one."""
    host, _, port = text.rpartition(":")
    check_address(f"{host}:1" if port == "0" else text)
    return text


def _parse_logit_bias(text: str) -> tuple[int, float]:
    token_id, separator, bias = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} is not TOKEN=VALUE")
    return parse_token_id(token_id), parse_number(bias)


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f'{text!r} is no JSON object such as {{"enable_thinking": false}}')
    return content


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text") from None


UINTS = Parsed(_parse_uints, "n,n")  # each at least 1: 1,2,4
RATES = Parsed(_parse_rates, "x,x")  # above 0: 0.5,2
MILLISECONDS = Parsed(_parse_milliseconds, "ms,ms")  # from 0 to 10,000: 0,5,20
PERCENT = Parsed(_parse_percent, "percent")
NUMBER = Parsed(parse_number, "x")
SECONDS = Parsed(_parse_seconds, "seconds")
TEXT_FILE = Parsed(_read_text, "file")  # its text
UTF8 = Parsed(_check_utf8, "text")
UTF8_LINES = _ParsedLines(_check_utf8, "text")
ADDRESS = Parsed(check_address, "host:port")
URL = Parsed(check_url, "url")
LISTEN = Parsed(_check_listen, "host:port")
TARGET = Parsed(check_target, "host:port")  # an address, or a name for all addresses behind it
TOKEN_IDS = Parsed(_parse_token_ids, "ids")
LOGIT_BIAS = Parsed(_parse_logit_bias, "token=value")
JSON_OBJECT = Parsed(_parse_json_object, "json")
