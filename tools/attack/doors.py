"""Attacks by callers whom nothing keeps from calling: connections, hellos, chats that take long."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from ssd.v1 import target_pb2 as pb
from tools.attack.attackers import HandMadeLink
from tools.attack.callers import SLOW_TEMPLATE, chat
from tools.attack.scenes import LONG_CONTEXT, PROBES, is_alive, serving, started, watch
from tools.attack.watch import Row, Watch, attacker, first_token_of
from tools.soak.services import Service

NEWCOMER_SECONDS = 10.0  # within which each has to be served


def greeted_connections(folder: Path) -> Row:
    """Newcomers are those who count: each probe has a connection of its own."""
    answered: list[bool] = []
    with serving(folder) as service:
        watched = watch(service)

        @contextlib.contextmanager
        def probed() -> Iterator[None]:
            with attacker("greeted_connections", service.address):
                yield
                answered.extend(is_served_soon(service.address) for _ in range(PROBES))

        row = watched.row("greeted_connections", probed())
    row.note = f"{sum(answered)} of {PROBES} newcomers were served"
    if not all(answered):
        row.problems.append("newcomers were kept out")
    return row


def is_served_soon(address: str) -> bool:
    """Who is hung up tries again, as clients do."""
    end = time.monotonic() + NEWCOMER_SECONDS
    while time.monotonic() < end:
        if is_alive(address):
            return True
        time.sleep(0.2)
    return False


def hellos(folder: Path) -> Row:
    """Others are targets that come while somebody has taken all links."""
    draft = Service("draft", "ssd_draft", ["--speculator", "ngram"], folder)
    refused = 0
    with started(draft):

        def ask(number: int) -> float:
            """First branches on a link that has just come up."""
            nonlocal refused
            begin = time.monotonic()
            try:
                with grpc.insecure_channel(draft.address) as channel:
                    link = HandMadeLink(channel)
                    link.open(number, [7 + i % 10 for i in range(60)])
                    link.wait_for(number)
            except grpc.RpcError:
                refused += 1
            return 1e3 * (time.monotonic() - begin)

        watched = Watch(draft, ask)
        watched.phase(1.0)
        row = watched.row("hellos", attacker("hellos", draft.address))
    row.note = f"first branches of new targets, {refused} of which were refused"
    if refused:
        row.problems.append("targets were kept out")
    return row


def template_hogs(folder: Path) -> Row:
    """Others chat, beside eight whose chats take the template seconds."""
    template = folder / "slow.jinja"
    template.write_text(SLOW_TEMPLATE)
    with serving(folder, *LONG_CONTEXT, "--chat-template", str(template)) as service:
        ask = first_token_of(service.address, chat_of_another)
        watched = Watch(service, ask)
        watched.phase(1.0)
        return watched.row("template_hogs", attacker("template_hogs", service.address))


def chat_of_another(number: int) -> pb.GenerateRequest:
    return chat([f"Tell me a story about {number} lambs."])


def tls_alone(folder: Path) -> str:
    """Ports beyond this host whose certificates say nothing of the callers."""
    files = ["--tls-cert", str(folder / "a.crt"), "--tls-key", str(folder / "a.key")]
    served = {
        "ssd_target": ["stories-target"],
        "ssd_draft": ["stories-draft"],
        "ssd_gateway": ["--target", "127.0.0.1:1"],
    }
    opened = [name for name, about in served.items() if not _is_refused(name, [*about, *files])]
    told = f"refused by {len(served) - len(opened)} of {len(served)} services"
    return f"PROBLEM: not refused by {', '.join(opened)}" if opened else told


def _is_refused(service: str, flags: list[str]) -> bool:
    command = [sys.executable, "-m", service, "serve", *flags]
    command += ["--listen", "0.0.0.0:0", "--check-config"]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode == 2 and "TLS alone lets everybody in" in ended.stderr


WATCHED: dict[str, Callable[[Path], Row]] = {
    each.__name__: each for each in (greeted_connections, hellos, template_hogs)
}
TOLD: dict[str, Callable[[Path], str]] = {"tls_alone": tls_alone}
