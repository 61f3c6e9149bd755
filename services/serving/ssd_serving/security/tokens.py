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
from typing import Any

from ssd_engine.errors import ConfigError
from ssd_serving.files.descriptors import read_surely
from ssd_serving.files.reloading import Unreadable
from ssd_serving.security.allowances import Allowance

MIN_TOKEN = 16  # characters: shorter ones can be guessed
MAX_NAME = 128
MAX_TOKENS = 1000  # each call is compared with all of them
MAX_FILE = 16 * 1024 * 1024
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LIMITS = tuple(f"limit_{field.name}" for field in fields(Allowance))
_KEYS = {"name", "roles", "token", "sha256", "expires", *_LIMITS}


class Role(Enum):
    GENERATE = "generate"
    SPECULATE = "speculate"
    ADMIN = "admin"  # traces and reflection, and all that the others may


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
    if not isinstance(table, dict):
        raise ValueError(f"{where}: a [[token]] table is needed")
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise ValueError(
            f"{where}: {unknown[0]} is not known; known are {', '.join(sorted(_KEYS))}"
        )
    name = table.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(f"{where}: name must be text of 1 to {MAX_NAME} printable characters")
    return Token(
        name=name,
        roles=_roles(where, table.get("roles")),
        digest=_digest(where, table),
        expires=_expires(where, table.get("expires")),
        allowance=Allowance(*(_limit(where, key, table.get(key)) for key in _LIMITS)),
    )


def _roles(where: str, names: Any) -> frozenset[Role]:
    known = [role.value for role in Role]
    if not isinstance(names, list) or not names or not all(name in known for name in names):
        raise ValueError(f"{where}: roles must be a list of {', '.join(known)}, got {names!r}")
    return frozenset(map(Role, names))


def _digest(where: str, table: dict[str, Any]) -> bytes:
    token, digest = table.get("token"), table.get("sha256")
    if (token is None) == (digest is None):
        raise ValueError(f"{where}: either token or sha256 is needed")
    if token is not None:
        if not isinstance(token, str) or len(token) < MIN_TOKEN:
            raise ValueError(f"{where}: token must be text of at least {MIN_TOKEN} characters")
        return hashlib.sha256(token.encode()).digest()
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{where}: sha256 must be 64 hexadecimal digits")
    return bytes.fromhex(digest)


def _expires(where: str, value: Any) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{where}: expires must be a time with a zone: 2027-01-01T00:00:00Z")
    return value


def _limit(where: str, key: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key} must be a whole number above 0, got {value!r}")
    return value
