"""Spans of calls, as a collector gets them over OTLP/HTTP; and nothing of it where none is configured."""

from __future__ import annotations

import builtins
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from fakes.engine import Sampled, json_answer
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES, RunningGateway
from outrider.errors import SetupError
from outrider.gateway.telemetry.tracing import Tracer, is_configured

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "secret words"}]}


class Collector(ThreadingHTTPServer):
    def __init__(self):
        self.requests = []
        super().__init__(("127.0.0.1", 0), Receiver)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self):
        return [
            span for request in self.requests for resource in request.resource_spans
            for scope in resource.scope_spans for span in scope.spans
        ]  # fmt: skip

    def stop(self):
        self.shutdown()
        self._thread.join()
        self.server_close()


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *args):
        pass


@pytest.fixture
def collector(monkeypatch):
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    yield collector
    collector.stop()


def attributes(found):
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in found.attributes}


def test_each_call_is_a_span_of_the_conventions(engine, collector, tmp_path):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway:
        key = gateway.open("a-1")
        gateway.client.resume(3)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        asked = {**ASK, "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 1, "n": 2, "stop": ["x"]}
        gateway.post(f"/s/{key}{CHAT}", asked, headers)
        gateway.chat(key, stream=True)
        gateway.post(f"/s/{key}/v1/messages", {**ASK, "model": "claude-x", "max_tokens": 9})
        gateway.post(f"/s/{key}{COMPLETIONS}", {"model": "policy", "prompt": "x"})
        engine.answers.append(json_answer({"error": {"message": "no"}}, status=400))
        gateway.chat(key)
        gateway.post(f"/s/{key}{CHAT}", b"{bad")
        calls = gateway.recorded(5, "a-1")
    spans = collector.spans()
    resource = attributes(collector.requests[0].resource_spans[0].resource)
    assert resource["service.name"] == "outrider-gateway"
    assert [span.name for span in spans] == [
        "chat policy", "chat policy", "chat claude-x", "text_completion policy", "chat policy", "chat",
    ]  # fmt: skip
    assert (spans[0].trace_id.hex(), spans[0].parent_span_id.hex()) == (TRACE, PARENT)
    assert spans[1].parent_span_id == b""
    first = attributes(spans[0])
    assert first == first | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 1,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2 * len(Sampled().ids),
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "gen_ai.conversation.id": "a-1",
        "outrider.call_id": calls[0].id,
        "outrider.fidelity": "exact",
        "outrider.mode": "train",
        "outrider.policy_version": 3,
        "http.response.status_code": 200,
    }
    assert attributes(spans[1])["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes(spans[2])["gen_ai.provider.name"] == "anthropic"
    assert [span.status.code for span in spans] == [0, 0, 0, 0, 2, 2]
    assert [attributes(span)["error.type"] for span in spans[4:]] == ["upstream_400", "400"]
    for span, call in zip(spans, calls, strict=False):
        assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
        assert abs(span.start_time_unix_nano / 1e9 - call.started_at) < 5
    assert b"secret words" not in b"".join(request.SerializeToString() for request in collector.requests)
    assert key.encode() not in b"".join(request.SerializeToString() for request in collector.requests)


def test_a_collector_that_is_away_harms_no_call(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway:
        assert gateway.chat(gateway.open()).status == 200


def test_a_bad_parent_is_none(engine, collector, tmp_path):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="passthrough") as gateway:
        gateway.post(CHAT, {"messages": MESSAGES}, {"traceparent": "nonsense"})
    (span,) = collector.spans()
    assert (span.name, span.parent_span_id) == ("chat", b"")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_an_endpoint_turns_it_on(environ, expected):
    assert is_configured(environ) is expected


def test_without_the_packages_the_extra_is_named(monkeypatch):
    load = builtins.__import__

    def missing(name, *rest):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SetupError, match=r"outrider\[otel\]"):
        Tracer()


def test_where_nothing_is_configured_nothing_is_imported(tmp_path):
    script = (
        "import sys\n"
        "from outrider.gateway.app import GatewayOptions, GatewayServer\n"
        f"GatewayServer(GatewayOptions(upstream='http://127.0.0.1:9', store='sqlite:///{tmp_path}/s', port=0))\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
