"""OpenTelemetry: one span per request, sent to a collector (the extra `otel`)."""

from __future__ import annotations

import time

from freehold import __version__
from freehold.server.access.log import Record


class Traces:
    """Exports spans. Attributes follow OpenTelemetry's conventions for generative AI where possible, and never hold
    content. A request's `traceparent` header makes its span part of the caller's trace. Raises ValueError without the
    extra."""

    def __init__(self, endpoint: str):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ValueError("otlp_traces_endpoint: traces need more packages: pip install 'freehold[otel]'") from None
        resource = Resource.create({"service.name": "freehold", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("freehold")
        self._propagator = TraceContextTextMapPropagator()

    def write(self, record: Record) -> None:
        """Record the span of an ended request. A thread sends spans; those that the collector rejects are lost."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = self._propagator.extract({"traceparent": record.traceparent or ""})
        end = time.time_ns()
        start = end - int((time.monotonic() - record.started) * 1e9)
        attributes = {
            "http.route": record.route,
            "http.response.status_code": record.status,
            "gen_ai.request.id": record.id,
            "enduser.id": record.client or None,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cached_tokens": record.cached_tokens,
            "gen_ai.latency.time_in_queue": record.queued,
            "gen_ai.latency.time_to_first_token": record.first_token,
            "gen_ai.response.finish_reasons": record.ends or None,
        }
        known = {name: value for name, value in attributes.items() if value is not None}
        span = self._tracer.start_span(record.route, context, SpanKind.SERVER, attributes=known, start_time=start)
        if record.status >= 500 or record.status == 0:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
