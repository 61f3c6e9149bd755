"""`ssd-client models` and `status`: what is served where, and how it is doing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ssd_client.connection.drafts import (
    draft_fields,
    draft_kind,
    inside_text,
    kind_text,
    message_fields,
    planes_text,
)
from ssd_client.connection.endpoints import (
    DEFAULT_ADDRESS,
    Endpoint,
    check_address,
    connect,
    linked_drafts,
)
from ssd_client.connection.security import PLAIN, Security
from ssd_client.errors import ClientError
from ssd_client.generate.speculation import stats_of
from ssd_client.printable import printable, printable_json
from ssd_client.terminal import params, render
from ssd_client.terminal.options import OWN, options
from ssd_client.terminal.security_options import security_options

_TIMEOUT_S = 3.0
_WIDE = 200


@dataclass(frozen=True)
class ServiceSnapshot:
    """A service as it was seen; `info` is None where it did not answer, `health` says why."""

    address: str
    role: str
    health: str
    info: Any = None


def see(endpoint: Endpoint, role: str) -> ServiceSnapshot:
    ask: Callable[[float], Any] = endpoint.model_info if role == "target" else endpoint.draft_info
    try:
        return ServiceSnapshot(
            endpoint.address, role, endpoint.readiness(_TIMEOUT_S), ask(_TIMEOUT_S)
        )
    except ClientError as error:
        return ServiceSnapshot(endpoint.address, role, str(error))


_services = options(
    OWN,
    click.option(
        "--target",
        "targets",
        type=params.TARGET,
        multiple=True,
        help=f"Repeatable.  [default: {DEFAULT_ADDRESS}]",
    ),
    click.option(
        "--draft",
        "drafts",
        type=params.ADDRESS,
        multiple=True,
        help="Repeatable; those that targets are linked to are found without.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    security_options,
)


@click.command()
@_services
def models(
    targets: Sequence[str], drafts: Sequence[str], as_json: bool, security: Security
) -> None:
    """Lists the models that targets and drafts serve.

    Exit codes: 0 all answered, 1 one did not, 2 bad input.
    """
    seen = see_all(targets, drafts, security)
    if as_json:
        render.write_json({"models": [_model_json(each) for each in seen]})
    else:
        _console().print(_models_table(seen))
    _exit(seen, drafts)


@click.command()
@_services
@click.option("--watch", type=params.SECONDS, help="Look again every so many seconds.")
def status(
    targets: Sequence[str],
    drafts: Sequence[str],
    as_json: bool,
    watch: float | None,
    security: Security,
) -> None:
    """Shows health, load, hit rates and links of targets and drafts.

    Exit codes: 0 all answered, 1 one did not, 2 bad input.
    """
    if watch is not None and not as_json and sys.stdout.isatty():
        _watch(targets, drafts, watch, security)
        return
    while True:
        seen = see_all(targets, drafts, security)
        if as_json:
            render.write_json({"services": [_status_json(each) for each in seen]})
        else:
            _console().print(_status_tables(seen))
        if watch is None:
            break
        time.sleep(watch)
    _exit(seen, drafts)


def _exit(seen: Sequence[ServiceSnapshot], drafts: Sequence[str]) -> None:
    """Only who was asked for must answer: a draft may be out of reach from here."""
    asked = [each for each in seen if each.role == "target" or each.address in drafts]
    if any(each.info is None for each in asked):
        raise SystemExit(1)


def _watch(
    targets: Sequence[str], drafts: Sequence[str], seconds: float, security: Security
) -> None:
    """Shows it again and again until Ctrl-C."""
    with Live(console=_console(), auto_refresh=False) as live:
        while True:
            live.update(_status_tables(see_all(targets, drafts, security)), refresh=True)
            time.sleep(seconds)


def see_all(
    targets: Sequence[str], drafts: Sequence[str], security: Security = PLAIN
) -> list[ServiceSnapshot]:
    """Targets, then drafts: those that are named, and those that targets are linked to."""
    addresses = targets or (() if drafts else (DEFAULT_ADDRESS,))
    with connect(addresses, security) as endpoints:
        seen = [see(endpoint, "target") for endpoint in endpoints]
    with connect(list(dict.fromkeys(drafts)), security) as endpoints:
        named = [see(endpoint, "draft") for endpoint in endpoints]
    known = {each.address for each in named}
    linked = [each for each in _see_linked(seen, security) if each.address not in known]
    return seen + named + linked


def _see_linked(seen: Sequence[ServiceSnapshot], security: Security) -> list[ServiceSnapshot]:
    """Drafts that nobody but their targets has named."""
    found: dict[str, str | None] = {}
    for each in seen:
        if each.info is not None:
            found |= linked_drafts(each.info)
    with contextlib.ExitStack() as stack:
        endpoints = [
            stack.enter_context(
                contextlib.closing(Endpoint(address, name, security.for_named_by_others()))
            )
            for address, name in found.items()
            if _is_address(address)
        ]
        return [see(endpoint, "draft") for endpoint in endpoints]


def _is_address(text: str) -> bool:
    """Whether a place, as the target knows it, is an address here, too."""
    try:
        check_address(text)
    except ValueError:
        return False
    return True


def _model_json(seen: ServiceSnapshot) -> dict[str, Any]:
    row: dict[str, Any] = {"address": seen.address, "role": seen.role, "health": seen.health}
    if seen.info is not None:
        names = ("name", "architecture", "num_parameters", "dtype", "device", "version")
        row |= {name: printable_json(getattr(seen.info, name)) for name in names}
        if seen.role == "draft":
            row["kind"] = draft_kind(seen.info)
    return row


def _models_table(seen: Sequence[ServiceSnapshot]) -> Table:
    table = _table(
        "role", "address", "health", "model", "kind", "parameters", "dtype", "device", "version"
    )
    for each in seen:
        row = _model_json(each)
        size = f"{row['num_parameters'] / 1e6:,.1f}M" if row.get("num_parameters") else ""
        model, rest = row.get("name", ""), [row.get(k, "") for k in ("dtype", "device", "version")]
        kind = kind_text(row.get("kind", ""))
        table.add_row(each.role, each.address, printable(each.health), model, kind, size, *rest)
    return table


def _status_json(seen: ServiceSnapshot) -> dict[str, Any]:
    row = _model_json(seen)
    if seen.info is None:
        return row
    if seen.role == "draft":
        fields = draft_fields(seen.info)
        names = ("links", "open_sequences", "features", "planes")
        return row | {name: printable_json(fields[name]) for name in names}
    load, stats = seen.info.load, stats_of(seen.info.load.speculation)
    return row | {
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.used_kv_blocks / max(1, seen.info.num_kv_blocks),
        "rounds": stats.rounds,
        "hit_rate": stats.hit_rate,
        "acceptance": stats.acceptance,
        "forward_ms": load.forward_micros / 1e3 / max(1, load.forwards),
        "synthetic_acceptance": seen.info.synthetic_acceptance,
        "draft_inside": printable_json(message_fields(seen.info)["draft_inside"]),
        "links": [printable_json(message_fields(link)) for link in seen.info.speculation_endpoints],
    }


def _status_tables(seen: Sequence[ServiceSnapshot]) -> Group:
    rows = [_status_json(each) for each in seen]
    services = _table(
        "role", "address", "health", "model", "draft", "running", "waiting", "KV", "forward",
        "hit rate", "acceptance",
    )  # fmt: skip
    links = _table(
        "target", "draft", "state", "model", "planes", "sequences", "payoff", "acceptance", "why"
    )
    for row in rows:
        is_target = row["role"] == "target" and "running" in row
        services.add_row(
            row["role"],
            row["address"],
            printable(row["health"]),
            _name(row),
            inside_text(row["draft_inside"]) if is_target else kind_text(row.get("kind", "")),
            str(row["running"]) if is_target else _sequences(row),
            str(row["waiting"]) if is_target else "",
            f"{row['kv_usage']:.0%}" if is_target else "",
            f"{row['forward_ms']:.1f} ms" if is_target and row["rounds"] else "",
            _percent(row.get("hit_rate")),
            _percent(row.get("acceptance")),
        )
        for link in row["links"] if is_target else ():
            links.add_row(
                row["address"],
                printable(render.place_text(link)),
                link["state"],
                printable(link["draft_name"]),
                planes_text(link["planes"]),
                str(link["open_sequences"]),
                link["payoff"],
                f"{link['acceptance']:.0%}" if link["acceptance"] else "",
                printable(link["reason"]),
            )
    return Group(services, links) if links.row_count else Group(services)


def _name(row: dict[str, Any]) -> str:
    made_up = row.get("synthetic_acceptance")
    return f"{row.get('name', '')} (SYNTHETIC {made_up:g})" if made_up else row.get("name", "")


def _sequences(row: dict[str, Any]) -> str:
    return f"{row['open_sequences']} on {row['links']} links" if "open_sequences" in row else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, highlight=False, emoji=False, width=width)
