"""OpenTelemetry spans of model calls, by the semantic conventions for generative AI (``gen_ai.*``).

Only where an OTLP endpoint is configured by OpenTelemetry's own variables; else nothing of it is imported. A span holds
what the log holds and the sampling parameters, and no content. It goes on with the agent's own trace where the agent
sends a ``traceparent``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.errors import SetupError
from outrider.gateway.telemetry.note import Note
from outrider.types import Call, CallState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE = "outrider-gateway"
_PROVIDERS = {"anthropic_messages": "anthropic"}
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "n": "choice.count",
}


def is_configured(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in ENDPOINTS) and environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


class Tracer:
    """Satisfies `note.Observer`. Spans are sent by a thread of OpenTelemetry's."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        """`processor` takes the spans in place of an exporter over OTLP/HTTP. Raises `SetupError`."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise SetupError(
                f"{ENDPOINTS[1]} is set, and the package {error.name!r} is not installed: "
                "pip install 'outrider[otel]', or unset the variable."
            ) from error
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("outrider.gateway")
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, note: Note) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        operation = "text_completion" if note.dialect == "openai_completions" else "chat"
        parent = self._propagator.extract({"traceparent": note.parent.decode("latin-1")}) if note.parent else None
        started = int(note.started_at * 1e9)
        span = self._tracer.start_span(
            f"{operation} {note.model}".rstrip(),
            context=parent,
            kind=SpanKind.CLIENT,
            start_time=started,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _PROVIDERS.get(note.dialect, "openai"),
                **_attributes(note),
            },
        )
        error = _error(note)
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(started + int(note.duration_s * 1e9))

    def close(self) -> None:
        """Send what is queued."""
        self._provider.shutdown()


def _attributes(note: Note) -> dict[str, Any]:
    found: dict[str, Any] = {"outrider.mode": note.mode, "http.response.status_code": note.status}
    for name, value in (
        ("gen_ai.request.model", note.model),
        ("gen_ai.conversation.id", note.attempt_id),
        ("outrider.call_id", note.call_id),
    ):
        if value:
            found[name] = value
    return found | (_of_call(note.call) if note.call is not None else {})


def _of_call(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = {"outrider.fidelity": call.fidelity.value, "gen_ai.request.stream": call.streamed}
    for name, attribute in _PARAMETERS.items():
        value = call.sampling.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"gen_ai.request.{attribute}"] = value
    if call.usage is not None:
        found["gen_ai.usage.input_tokens"] = call.usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = call.usage.completion_tokens
    reasons = [choice.finish_reason for choice in call.choices if choice.finish_reason]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    if call.first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = call.first_token_s
    if call.version_start is not None:
        found["outrider.policy_version"] = call.version_start
    return found


def _error(note: Note) -> str:
    """A word for what went wrong; empty where nothing did."""
    if note.code:
        return note.code
    if note.call is not None and note.call.state is not CallState.COMPLETE:
        return note.call.state.value
    return str(note.status) if note.status >= 400 else ""
