"""The root of a request's trace, for an OpenTelemetry collector. Imported with --otlp-endpoint.

A collector that is slow or dead costs spans, never a generation: they wait in a bounded queue that
a thread empties, and at the end the command waits a little for it, not longer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

from ssd_client.errors import BadInputError
from ssd_client.generate.events import Event, Finished, Moved, Started, Tokens
from ssd_client.generate.route import Metadata

_EXPORT_S = 5.0  # for one batch, tries again included
_LAST_S = 2.0  # for what is left at the end
_NEEDS_EXTRA = '--otlp-endpoint needs the otel extra: pip install "ssd-serve[otel]"'
_SERVICE = "ssd-client"


def check_otlp_endpoint(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInputError(
            f"--otlp-endpoint: http://HOST:PORT or https://HOST:PORT is needed, got {url!r}"
        )
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ModuleNotFoundError:
        raise BadInputError(_NEEDS_EXTRA) from None


class RootSpan:
    """The root span of one generation."""

    def __init__(self, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind

        resource = Resource.create({"service.name": _SERVICE})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = self._provider.get_tracer(_SERVICE)
        self._span = tracer.start_span("ssd.client.generate", kind=SpanKind.CLIENT)
        self._seen_tokens = False

    @property
    def metadata(self) -> Metadata:
        """What calls of this generation carry: W3C trace context."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return tuple(carrier.items())

    def see(self, events: Iterator[Event]) -> Iterator[Event]:
        """The same events, noted on their way: counts and addresses, no text."""
        for event in events:
            self._note(event)
            yield event

    def _note(self, event: Event) -> None:
        match event:
            case Started():
                about = {"endpoint": event.endpoint, "request_id": event.request_id}
                self._set(**about, prompt_tokens=event.prompt_tokens)
                self._span.add_event("started", {"ssd.endpoint": event.endpoint})
            case Tokens() if not self._seen_tokens:
                self._seen_tokens = True
                self._span.add_event("first token")
            case Moved():
                self._span.add_event("moved", {"ssd.origin": event.origin, "ssd.to": event.to})
            case Finished():
                self._set(completion_tokens=event.usage.completion_tokens)
                self._set(finish=event.reason.value)

    def _set(self, **about: str | int) -> None:
        self._span.set_attributes({f"ssd.{name}": value for name, value in about.items()})

    def fail(self, kind: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, kind))

    def end(self) -> None:
        self._span.end()
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_LAST_S)


@contextlib.contextmanager
def root_span(url: str) -> Iterator[RootSpan]:
    span = RootSpan(url)
    try:
        yield span
    except BaseException as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span.end()
