"""Options of every command that connects to services, and the files that they name."""

from __future__ import annotations

import contextlib
import functools
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ssd_client.connection.security import Security
from ssd_client.errors import BadInputError, printable
from ssd_client.terminal import params
from ssd_client.terminal.options import options

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MAX_TOKEN = 4096


def security_options(command: _Command) -> _Command:
    """Options of a command that connects; it gets what they make as ``security``."""

    @functools.wraps(command)
    def secured(*args: Any, **flags: Any) -> Any:
        own = {name: flags.pop(name) for name in _NAMES}
        return command(*args, security=_read(**own), **flags)

    return options("Security", *_OPTIONS)(secured)  # type: ignore[return-value]


_NAMES = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "insecure")
_OPTIONS = (
    click.option("--tls", is_flag=True, help="Connect over TLS, trusting whom the system trusts."),
    click.option("--tls-ca", type=click.Path(), help="Connect over TLS, trusting this CA (PEM)."),
    click.option("--tls-cert", type=click.Path(), help="Certificate to show, for mutual TLS."),
    click.option("--tls-key", type=click.Path(), help="Its key."),
    click.option(
        "--tls-server-name",
        type=params.UTF8,
        help="Name in the server's certificate, where it is not the host's.",
    ),
    click.option("--token-file", type=click.Path(), help="File with the bearer token to show."),
    click.option("--insecure", is_flag=True, help="Show the token without TLS, too."),
)


def _read(
    tls: bool,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_server_name: str | None,
    token_file: str | None,
    insecure: bool,
) -> Security:
    if (tls_cert is None) != (tls_key is None):
        raise BadInputError("--tls-cert and --tls-key belong together: give both, or none")
    secured = tls or tls_ca is not None
    if not secured and (tls_cert is not None or tls_server_name is not None):
        raise BadInputError("--tls-cert and --tls-server-name need --tls-ca or --tls")
    for flag, path in (("--tls-key", tls_key), ("--token-file", token_file)):
        _warn_of_readers(flag, path)
    return Security(
        tls=secured,
        ca=_bytes("--tls-ca", tls_ca),
        cert=_bytes("--tls-cert", tls_cert),
        key=_bytes("--tls-key", tls_key),
        server_name=tls_server_name,
        token=_token(token_file),
        insecure=insecure,
    )


def _bytes(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInputError(f"{flag} {path}: {error.strerror}") from None


def _warn_of_readers(flag: str, path: str | None) -> None:
    """Say so where every user may read or write a secret, as the services do."""
    with contextlib.suppress(OSError):  # reading it says what is wrong
        if path is not None and Path(path).stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            shown = printable(path)
            note = f"warning: {flag}: {shown} is open to every user: chmod o= {shown}"
            click.echo(note, err=True)


def _token(path: str | None) -> str | None:
    data = _bytes("--token-file", path)
    if data is None:
        return None
    token = data.decode("ascii", errors="replace").strip()
    if not token or len(token) > _MAX_TOKEN or not token.isascii() or not token.isprintable():
        raise BadInputError(f"--token-file {path}: one token is needed, printable ASCII on a line")
    return token
