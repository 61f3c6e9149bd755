"""Traces of requests for an OpenTelemetry collector: the only file here that knows of it.

Spans are handed to a bounded queue that a thread empties: a collector that is slow, dead or was
never there costs spans, never a request. Nothing of it is imported unless a collector is named.
"""

import threading
import time
from typing import Any, Protocol
from urllib.parse import urlsplit

from ssd_engine.errors import ConfigError

QUEUE = 2048  # spans that wait; more are dropped
EXPORT_SECONDS = 5.0  # for one batch, tries again included
DELAY_SECONDS = 0.5  # in which spans gather to a batch
LAST_SECONDS = 2.0  # for what is left when the service stops
NEEDS_EXTRA = '--otlp-endpoint needs the otel extra: pip install "ssd-serve[otel]"'


class Span:
    """One piece of work; where there is no collector, nobody hears of it. Only counts and short
    words are said of it, never text."""

    context = ""  # W3C traceparent of what is done under it; empty where it is not traced

    def event(self, name: str, at: float | None = None) -> None:
        """``at``: seconds of the monotonic clock; None: now."""

    def set(self, **about: str | int | float | bool) -> None: ...

    def end(self, error: str | None = None) -> None: ...


class Spans(Protocol):
    """Where spans come from."""

    def begin(self, name: str, parent: str | None) -> Span:
        """``parent``: a traceparent as it came; what cannot be read is none."""

    def stop(self) -> None:
        """Export what is left, within a bounded time."""


class NoSpans:
    def begin(self, name: str, parent: str | None) -> Span:
        return Span()

    def stop(self) -> None:
        pass


def check_otlp_endpoint(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-endpoint: http://HOST:PORT or https://HOST:PORT is needed, got {url!r}"
        )
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(NEEDS_EXTRA) from None


def make_spans(url: str | None, service: str, version: str) -> Spans:
    return NoSpans() if url is None else OtlpSpans(url, service, version)


class OtlpSpans:
    def __init__(self, url: str, service: str, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.name": service, "service.version": version}
        # A last export at exit would have no bound: stop has one.
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE, schedule_delay_millis=int(1000 * DELAY_SECONDS)
            )
        )
        self._tracer = self._provider.get_tracer(service, version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str | None) -> Span:
        from opentelemetry.trace import SpanKind

        carrier = {} if parent is None else {"traceparent": parent}
        context = self._propagator.extract(carrier)
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER)
        return OtlpSpan(span, self._propagator)

    def stop(self) -> None:
        """The thread that waits for the collector is left behind, wherever this is called."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_SECONDS)


class OtlpSpan(Span):
    def __init__(self, span: Any, propagator: Any) -> None:
        self._span = span
        self.context = _context(span, propagator) if span.is_recording() else ""

    def event(self, name: str, at: float | None = None) -> None:
        ago = 0.0 if at is None else time.monotonic() - at
        self._span.add_event(name, timestamp=time.time_ns() - int(ago * 1e9))

    def set(self, **about: str | int | float | bool) -> None:
        self._span.set_attributes({f"ssd.{name}": value for name, value in about.items()})

    def end(self, error: str | None = None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


def _context(span: Any, propagator: Any) -> str:
    from opentelemetry.trace import set_span_in_context

    carrier: dict[str, str] = {}
    propagator.inject(carrier, set_span_in_context(span))
    return carrier.get("traceparent", "")
