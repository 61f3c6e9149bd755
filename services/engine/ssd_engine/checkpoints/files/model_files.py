"""The files of a model's directory, which strangers have written.

Whatever is wrong with one of them is a ModelError of one line that names the file, the field and
what would be right. Only plain files are opened, and no more of them is read than a bound. No torch
here.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from ssd_engine.errors import ModelError

SETTINGS_BYTES = 1 << 20  # the longest file of settings
LISTING_BYTES = 1 << 26  # the longest vocabulary, or list of weights
MAX_SHOWN = 80  # characters of a value, in an error
MAX_REASON = 300  # characters of what a library says

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(path: Path) -> bool:
    """Whether there is anything of this name, a link that leads nowhere included."""
    return os.path.lexists(path)


def open_file(path: Path) -> BinaryIO:
    """Refuses pipes and devices: reading one may never end. A link to a plain file is one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        problem = "is a link that leads nowhere" if is_there(path) else "does not exist"
        raise ModelError(f"{path} {problem}: a file is needed") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{path} cannot be read: {reason}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ModelError(f"{path} is {_KINDS.get(stat.S_IFMT(mode))}: a file is needed")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    try:
        with open_file(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise ModelError(f"{path} is too long: at most {limit} bytes are read")
    return data


def read_text(path: Path, limit: int = SETTINGS_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} cannot be read: it is not UTF-8, {error.reason}") from None


def read_object(path: Path, limit: int = SETTINGS_BYTES) -> dict[str, Any]:
    return parse_object(path, read_text(path, limit))


def parse_object(source: object, text: str) -> dict[str, Any]:
    """The JSON object of a text; ``source`` is what errors name."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ModelError(f"{source} cannot be read: its values are nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{source} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source} is not a JSON object, but {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value as an error shows it: in one line, however large or nested it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def named(name: str) -> str:
    """A name of a file's author: as it is, unless it could do harm in a terminal or a log."""
    return name if name.isprintable() and len(name) <= MAX_SHOWN else shown(name)


def reason_of(error: BaseException) -> str:
    """What a library says is wrong, in one line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "".join(c for c in line[:MAX_REASON] if c.isprintable())


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object; null counts as absent, as everywhere in such files."""

    source: object  # the file, and the field of it where the object is nested
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def problem(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.source}: {key}: {what}")

    def wrong(self, key: str, needed: str) -> ModelError:
        return self.problem(key, f"{needed} is needed, got {shown(self.get(key))}")

    def read(self, key: str, kind: Any, needed: str, default: Any = None) -> Any:
        """A value that is of this kind to the letter: msgspec judges, ``needed`` says it better."""
        import msgspec  # not above: command lines are read without the serving extra

        value = self.get(key)
        if value is None and default is not None:
            return default
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise self.wrong(key, needed) from None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        from msgspec import Meta

        kind = Annotated[int, Meta(ge=low, le=high)]
        return int(self.read(key, kind, f"an integer in [{low}, {high}]", default))

    def number(
        self, key: str, below: float, default: float | None = None, least: float = 0
    ) -> float:
        """One that is greater than 0, or at least as large as ``least``. Neither NaN nor infinity
        is."""
        from msgspec import Meta

        kind = Annotated[float, Meta(ge=least, lt=below) if least else Meta(gt=0, lt=below)]
        lowest = f"from {least:g} on" if least else "above 0"
        return float(self.read(key, kind, f"a number {lowest} and below {below:g}", default))

    def flag(self, key: str) -> bool:
        """False where it is absent."""
        return bool(self.read(key, bool, "true or false", default=False))

    def text(self, key: str, default: str) -> str:
        return str(self.read(key, str, "a string", default))

    def items(self, key: str) -> list[Any]:
        """Empty where it is absent."""
        return list(self.read(key, list, "a list", default=[]))

    def nested(self, key: str) -> "Fields":
        """Those of an object; none where it is absent."""
        return Fields(f"{self.source}: {key}", self.read(key, dict, "an object", default={}))
