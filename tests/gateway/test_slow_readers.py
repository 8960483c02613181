"""An agent that does not read holds the upstream back: the gateway takes in little more than the agent does."""

from __future__ import annotations

import socket
import time

import pytest

from fakes.engine import chunk, raw_stream, stream
from fakes.gateway import CHAT
from outrider.gateway.upstreams.upstream import UpstreamCall

BIG = 32 << 20
AHEAD = 2 << 20


@pytest.fixture
def taken(monkeypatch):
    """Bytes that came from the upstream, in one number."""
    sizes = [0]
    piece = UpstreamCall.piece

    def counted(self, data):
        sizes[0] += len(data)
        return piece(self, data)

    monkeypatch.setattr(UpstreamCall, "piece", counted)
    return sizes


@pytest.mark.parametrize("mode", ["record", "passthrough"])
def test_the_kernel_does_not_read_for_an_agent(engine, start, taken, mode):
    part = stream(chunk({"content": "x" * (1 << 16)}), done=False).chunks[0]
    engine.answers.append(raw_stream(*[part] * (BIG // len(part))))
    with start(mode=mode) as gateway, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", gateway.port))
        body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
        raw.sendall(b"POST %s HTTP/1.1\r\nhost: gw\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        before = -1
        while taken[0] != before or not taken[0]:
            before = taken[0]
            time.sleep(0.5)
        assert taken[0] < AHEAD
