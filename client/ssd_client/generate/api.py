"""The client of a Python program. The commands of `ssd-client` go through it, too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from ssd_client.connection.closing import Closing
from ssd_client.connection.endpoints import DEFAULT_ADDRESS, Endpoint, Endpoints
from ssd_client.connection.failover import DEFAULT_STALL_S, RetryPolicy
from ssd_client.connection.security import PLAIN, Security
from ssd_client.generate import stream
from ssd_client.generate.events import Event, Tokens
from ssd_client.generate.request import Asked, Messages, build_request, chat_of, prompt_of
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult, Timing

if TYPE_CHECKING:
    from typing import Self, Unpack

    from ssd.v1 import target_pb2
    from ssd_client.generate.route import Metadata

INFO_TIMEOUT_S = 10.0


class Stream(Closing):
    """The events of one generation, as they come. `result` is what they came to so far.

    Leaving the `with` block ends the generation, wherever it is.
    """

    def __init__(self, events: Generator[Event, None, None]) -> None:
        self._events = events
        self.result = GenerationResult(Timing(sent=time.monotonic()))

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            event = next(self._events)
        except StopIteration:
            raise
        except BaseException:
            self.result.end(time.monotonic())
            raise
        self.result.add(event, time.monotonic())
        return event

    def text(self) -> Iterator[str]:
        """The text alone, piece by piece."""
        return (event.text for event in self if isinstance(event, Tokens) and event.text)

    def close(self) -> None:
        self._events.close()


class Client(Closing):
    """Talks to targets: to the first that answers, and on with another when one is lost.

    A target is HOST:PORT, or dns:///NAME:PORT for all addresses behind a name. `timeout` covers a
    whole request, waits and resumes included; `retries` says how often it is sent again after a
    target was lost; `stall_timeout`, how many seconds one may send nothing before another goes on.
    What goes wrong is a `ClientError`; `BadInputError` where the request is at fault. A client may
    be used by several threads.
    """

    def __init__(
        self,
        *targets: str,
        security: Security = PLAIN,
        timeout: float | None = None,
        retries: int | None = None,
        stall_timeout: float = DEFAULT_STALL_S,
    ) -> None:
        self._endpoints: Sequence[Endpoint] = Endpoints(targets or (DEFAULT_ADDRESS,), security)
        self._timeout = timeout
        self._policy = RetryPolicy(retries=retries, stall_timeout_s=stall_timeout)

    @classmethod
    def over(
        cls,
        endpoints: Sequence[Endpoint],
        timeout: float | None = None,
        policy: RetryPolicy | None = None,
    ) -> Self:
        """A client over endpoints that are the caller's."""
        client = cls.__new__(cls)
        client._endpoints, client._timeout = endpoints, timeout
        client._policy = policy or RetryPolicy()
        return client

    @classmethod
    @contextlib.contextmanager
    def local(
        cls, model: str | None = None, draft: str | None = None, device: str | None = None
    ) -> Iterator[Self]:
        """A target on this machine, and a draft beside it, for as long as the block runs.

        Without a model, the pair that ships with this project. It needs the extra `serve`.
        """
        from ssd_client.local.launcher import LocalFlags, LocalTarget, plan_local

        flags = LocalFlags(local_model=model, local_draft=draft, local_device=device)
        with LocalTarget(plan_local(flags)) as target, cls(target.address) as client:
            yield client

    def stream(self, prompt: Asked, **options: Unpack[RequestOptions]) -> Stream:
        """The continuation of a text, or of token ids, as it comes."""
        return self.send(build_request(prompt_of(prompt), options))

    def send(self, request: target_pb2.GenerateRequest, metadata: Metadata = ()) -> Stream:
        """A request as it goes over the wire; `metadata` goes with every call."""
        events = stream.generate(
            self._endpoints,
            request,
            timeout_s=self._timeout,
            policy=self._policy,
            metadata=metadata,
        )
        return Stream(events)

    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> Stream:
        """The reply of a chat model, as it comes."""
        return self.stream(chat_of(messages), **options)

    def generate(self, prompt: Asked, **options: Unpack[RequestOptions]) -> GenerationResult:
        """The whole continuation."""
        with self.stream(prompt, **options) as events:
            for _ in events:
                pass
        return events.result

    def chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> GenerationResult:
        """The whole reply."""
        return self.generate(chat_of(messages), **options)

    def model_info(self) -> target_pb2.GetModelInfoResponse:
        """What the first target serves, and within which bounds."""
        return self._endpoints[0].model_info(INFO_TIMEOUT_S)

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()
