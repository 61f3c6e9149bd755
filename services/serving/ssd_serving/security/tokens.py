"""Bearer tokens: who may do what. Read from a file that may change at any time.

The file is TOML, one table for each token; a name may have several, so that they can be rotated::

    [[token]]
    name = "team-a"                  # the identity: limits and logs go by it
    roles = ["generate"]             # generate, speculate, admin
    sha256 = "9f86d081…"             # the token's; or token = "…", as it is
    expires = 2027-01-01T00:00:00Z   # optional
    limit_requests = 8               # optional, instead of --limit-requests; so the other limits
"""

import hashlib
import hmac
import re
import tomllib
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ssd_engine.errors import ConfigError
from ssd_serving.files.descriptors import read_surely
from ssd_serving.files.reloading import Unreadable
from ssd_serving.security.allowances import Allowance

MIN_TOKEN = 16  # characters: shorter ones can be guessed
MAX_NAME = 128
MAX_TOKENS = 1000  # each call is compared with all of them
MAX_FILE = 16 * 1024 * 1024


class Role(Enum):
    GENERATE = "generate"
    SPECULATE = "speculate"
    ADMIN = "admin"  # traces and reflection, and all that the others may


Limit = Annotated[int, Meta(ge=1)]


class _TokenTable(msgspec.Struct, forbid_unknown_fields=True):
    """One table of the file."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    roles: Annotated[frozenset[Role], Meta(min_length=1)]
    token: Annotated[str, Meta(min_length=MIN_TOKEN)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")] | None = None
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    limit_requests: Limit | None = None
    limit_tokens_per_minute: Limit | None = None
    limit_prompt_tokens: Limit | None = None


# What each key must be. Errors show no value that may be a secret.
_NEEDED = {
    "name": f"text of 1 to {MAX_NAME} printable characters",
    "roles": f"a list of {', '.join(role.value for role in Role)}, got {{!r}}",
    "token": f"text of at least {MIN_TOKEN} characters",
    "sha256": "64 hexadecimal digits",
    "expires": "a time with a zone: 2027-01-01T00:00:00Z",
    **{f"limit_{field.name}": "a whole number above 0, got {!r}" for field in fields(Allowance)},
}


@dataclass(frozen=True)
class Token:
    name: str
    roles: frozenset[Role]
    digest: bytes  # SHA-256: the file's own words are not kept
    expires: datetime | None
    allowance: Allowance

    def allows(self, role: Role) -> bool:
        return role in self.roles or Role.ADMIN in self.roles

    def is_expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


def find_token(tokens: tuple[Token, ...], presented: str) -> Token | None:
    """Takes the same time whichever token it is, and whether it is one at all."""
    digest = hashlib.sha256(presented.encode()).digest()
    found = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def load_tokens(path: Path) -> tuple[Token, ...]:
    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(MAX_FILE + 1)

    try:
        data = read_surely(read)
    except OSError as error:
        raise Unreadable(f"--token-file {path}: {error.strerror}") from None
    if len(data) > MAX_FILE:
        raise ConfigError(f"--token-file {path}: larger than {MAX_FILE} bytes")
    try:
        return _parse(tomllib.loads(data.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: is not TOML ({error})") from None
    except ValueError as error:
        raise ConfigError(f"--token-file {path}: {error}") from None


def _parse(content: dict[str, Any]) -> tuple[Token, ...]:
    tables = content.get("token")
    if set(content) != {"token"} or not isinstance(tables, list) or not tables:
        raise ValueError("[[token]] tables are needed, and nothing else")
    if len(tables) > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} tokens, got {len(tables)}")
    tokens = tuple(_parse_token(f"token {i}", table) for i, table in enumerate(tables, start=1))
    if len({token.digest for token in tokens}) < len(tokens):
        raise ValueError("the same token twice")
    return tokens


def _parse_token(where: str, table: Any) -> Token:
    try:
        entry = msgspec.convert(table, _TokenTable, builtin_types=(datetime,))
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_translated(str(error), table)}") from None
    if not entry.name.isprintable():
        raise ValueError(f"{where}: name must be {_NEEDED['name']}")
    if (entry.token is None) == (entry.sha256 is None):
        raise ValueError(f"{where}: either token or sha256 is needed")
    return Token(
        name=entry.name,
        roles=entry.roles,
        digest=hashlib.sha256((entry.token or "").encode()).digest()
        if entry.sha256 is None
        else bytes.fromhex(entry.sha256),
        expires=entry.expires,
        allowance=Allowance(
            entry.limit_requests, entry.limit_tokens_per_minute, entry.limit_prompt_tokens
        ),
    )


def _translated(problem: str, table: Any) -> str:
    """What msgspec found wrong, in the words of this file: it would not say what is needed."""
    unknown = re.search("(?s)unknown field `(.*)`", problem)
    if unknown:
        return f"{unknown[1]} is not known; known are {', '.join(sorted(_NEEDED))}"
    field = re.search(r"field `(\w+)`|\$\.(\w+)", problem)
    if field is None:
        return "a [[token]] table is needed"
    key = field[1] or field[2]
    return f"{key} must be {_NEEDED[key].format(table.get(key))}"
