"""`ssd-client chat`: the loop of saying and hearing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ssd_client.bench.measure.openai import OpenAIServer, check_baseline
from ssd_client.chat.lines import history_file, lines
from ssd_client.chat.screen import ChatScreen, OriginScreen, PlainScreen
from ssd_client.chat.session import Quit, Session
from ssd_client.connection.failover import RetryPolicy
from ssd_client.errors import BadInputError, ClientError
from ssd_client.generate.api import Client
from ssd_client.generate.events import Moved, Tokens
from ssd_client.generate.request import build_request
from ssd_client.generate.request_options import RequestOptions
from ssd_client.local.launcher import LocalFlags, LocalPlan, plan_local
from ssd_client.openai.gateway_client import GatewayClient
from ssd_client.terminal import params, render
from ssd_client.terminal.options import (
    SectionedCommand,
    chat_options,
    local_options,
    sampling_options,
    speculation_options,
    url_option,
)
from ssd_client.terminal.security_options import security_options
from ssd_client.terminal.serving import check_local, check_url_alone, pick, serving

# A target that is started anew is waited for: the conversation is all here.
PATIENCE = RetryPolicy(retries=12)
_HINT = "/help for commands, Ctrl-C stops a reply, /quit or Ctrl-D ends"


@click.command(cls=SectionedCommand)
@click.option(
    "--target",
    type=params.TARGET,
    multiple=True,
    help="Where the chat is held; repeat it to name where it goes on.  [default: 127.0.0.1:7410]",
)
@click.option("--system", type=params.UTF8, help="System message.")
@click.option("--max-tokens", type=params.uint(), help="Tokens of a reply at most.")
@chat_options
@sampling_options
@speculation_options
@click.option("--metrics", is_flag=True, help="Statistics after each reply.")
@click.option("--show-origin", is_flag=True, help="Colour each token by where it came from.")
@click.option(
    "--baseline",
    type=params.Parsed(check_baseline, "openai:url"),
    help="Hear the reply of another server, too: openai:http://HOST:PORT/v1.",
)
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File in which lines are kept for the next chat.  [default: ~/.local/state/ssd/"
    "chat_history]",
)
@click.option("--no-history", is_flag=True, help="Keep no lines.")
@url_option
@security_options
@local_options
def chat(**flags: Any) -> None:
    """Talks to a chat model. /help lists what can be changed on the way.

    Exit codes: 0 ended, 1 failed, 2 bad input.
    """
    check_local(flags)
    check_url_alone(flags)
    plan = plan_local(pick(LocalFlags, flags)) if flags["local"] else None
    notes = Console(stderr=True)
    session = Session(pick(RequestOptions, flags), flags["system"])
    screen = _screen(flags["show_origin"], notes)
    with _client(notes, plan, flags) as (client, model, has_chat_template):
        if not has_chat_template:
            raise BadInputError(f"{model} has no chat template: use ssd-client generate")
        render.note(notes, f"{model} · {_HINT}")
        baseline = OpenAIServer(flags["baseline"]) if flags["baseline"] else None
        history = None if flags["no_history"] else flags["history"] or history_file()
        with lines(history) as read:
            Chat(session, client, screen, notes, flags["metrics"], baseline).run(read)


@contextlib.contextmanager
def _client(
    notes: Console, plan: LocalPlan | None, flags: Mapping[str, Any]
) -> Iterator[tuple[Client | GatewayClient, str, bool]]:
    """Who sends what is said; the model's name, and whether it has a chat template."""
    if flags["url"] is not None:
        gateway = GatewayClient(flags["url"], flags["security"])
        model = gateway.model()
        yield gateway, model["id"], model["has_chat_template"]
        return
    with serving(notes, flags["target"], plan, flags["security"]) as endpoints:
        info = endpoints[0].model_info(10.0)
        yield Client.over(endpoints, policy=PATIENCE), info.name, info.has_chat_template


def _screen(show_origin: bool, notes: Console) -> ChatScreen:
    if not show_origin:
        return PlainScreen()
    screen = OriginScreen()
    screen.legend(notes)
    return screen


class Chat:
    def __init__(
        self,
        session: Session,
        client: Client | GatewayClient,
        screen: ChatScreen,
        notes: Console,
        metrics: bool,
        baseline: OpenAIServer | None,
    ) -> None:
        self._session, self._screen = session, screen
        self._client = client
        self._notes, self._metrics, self._baseline = notes, metrics, baseline

    def run(self, read: Callable[[], str]) -> None:
        """Chats until the user leaves; nothing that goes wrong with one reply ends it."""
        while True:
            try:
                line = read().strip()
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._say(line)
            except (EOFError, Quit):
                render.write_stdout("\n" if sys.stdin.isatty() else "")
                return
            except KeyboardInterrupt:
                render.write_stdout("\n")
                render.note(self._notes, "(/quit or Ctrl-D ends the chat)")
            except ClientError as error:
                render.show_error(error)

    def _obey(self, line: str) -> None:
        try:
            render.note(self._notes, self._session.obey(line))
        except ValueError as error:
            render.note(self._notes, str(error))

    def _say(self, said: str) -> None:
        request = build_request(self._session.prompt(said), self._session.options)
        stopped = None
        events = self._client.send(request)
        result = events.result
        try:
            with events:
                for event in events:
                    if isinstance(event, Moved):
                        render.note(self._notes, render.move_text(event))
                    elif isinstance(event, Tokens):
                        self._screen.show(event)
        except KeyboardInterrupt:
            stopped = "stopped"
        except ClientError:
            render.write_stdout("\n")
            raise
        render.write_stdout("\n")
        if result.token_ids:  # else it was stopped before it began
            self._session.replied(said, result)
        if self._metrics or stopped:
            render.show_statistics(self._notes, result, stopped)
        if self._baseline is not None and stopped is None:
            self._ask_baseline(self._baseline, len(result.token_ids))

    def _ask_baseline(self, server: OpenAIServer, tokens: int) -> None:
        """Asks for as many tokens of the same conversation."""
        content: dict[str, Any] = {
            "messages": self._session.said(-1),
            "max_tokens": max(1, tokens),
        }
        temperature = self._session.options.get("temperature")
        if temperature is not None:
            content["temperature"] = temperature
        measured = server.measure(0, content)
        if measured.error is not None:
            raise ClientError(measured.error)
        render.note(self._notes, f"{server.model}: {measured.text.strip()}")
        rate = f"{1 / measured.tpot_s:.1f} tokens/s" if measured.tpot_s else "no rate"
        render.note(self._notes, f"{server.model}: {measured.num_tokens} tokens · {rate}")
