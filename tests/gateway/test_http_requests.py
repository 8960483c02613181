"""Requests as HTTP allows them and clients of all languages send them, byte by byte; and those that no one should."""

from __future__ import annotations

import json
import re
import socket

import pytest

from fakes.gateway import CHAT, MESSAGES

BODY = json.dumps({"model": "policy", "messages": MESSAGES}).encode()
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)


def post(headers=LENGTH, body=BODY, path=CHAT):
    return b"POST %s HTTP/1.1\r\nhost: gw\r\n%s\r\n%s" % (path.encode(), headers, body)


def answers(gateway, *pieces, closing=True):
    """Status codes of what comes back for these bytes, until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            raw.sendall(piece)
        if closing:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: gw\r\nconnection: close\r\n\r\n")
        data = b""
        while more := raw.recv(1 << 16):
            data += more
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


@pytest.fixture
def gateway(start):
    with start(mode="record") as gateway:
        yield gateway


# -- another protocol is asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 60, 150, 220, len(post(H2C + LENGTH)) - 3])
def test_a_client_that_would_rather_speak_http2_is_answered(engine, gateway, cut):
    """As Java's does with its first request; its body was lost."""
    asked = post(H2C + LENGTH)
    assert answers(gateway, asked[:cut], asked[cut:]) == [200, 200]
    assert engine.received[0].json["messages"] == MESSAGES
    assert "upgrade" not in engine.received[0].headers


def test_a_body_behind_an_upgrade_is_not_the_next_request(engine, gateway):
    """Else whoever can put bytes into somebody's body can ask in their name."""
    inner = post()
    asked = post(b"connection: upgrade\r\nupgrade: x\r\ncontent-length: %d\r\n" % len(inner), inner)
    split = len(asked) - len(inner)
    assert answers(gateway, asked[:split], asked[split:]) == [400, 200]
    assert engine.received == []


def test_pipelined_upgrades_are_answered_in_order(engine, gateway):
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    last = post(H2C + b"transfer-encoding: chunked\r\n", chunked)
    assert answers(gateway, post(H2C + LENGTH) + post() + post(H2C + LENGTH) + last) == [200, 200, 200, 200, 200]
    assert len(engine.received) == 4


def test_C04_a_websocket_is_told_to_post(gateway):
    upgrade = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"
    for path in (b"/v1/responses", b"/v1/chat/completions"):
        assert answers(gateway, b"GET %b HTTP/1.1\r\nhost: gw\r\n%b\r\n" % (path, upgrade)) == [426, 200]


def test_there_is_no_tunnel(gateway):
    assert answers(gateway, b"CONNECT gw:80 HTTP/1.1\r\nhost: gw\r\n\r\n", closing=False) == [400]


# -- other spellings of a route ----------------------------------------------------------------------------------------


SPELLINGS = ("/v1/chat%2fcompletions", "/v1/chat/completion%73", "/v1/%63hat/completions", f"{CHAT}/", f"{CHAT}%2F")


@pytest.mark.parametrize("path", SPELLINGS)
def test_a_route_in_another_spelling_leads_past_no_store(engine, gateway, path):
    """An upstream decodes its paths, so that an agent could talk to the model unrecorded."""
    assert gateway.post(path, BODY).status == 404
    assert engine.received == []


def test_what_passes_through_may_be_spelled_as_one_likes(engine, start):
    with start(mode="passthrough") as gateway:
        for path in SPELLINGS:
            gateway.post(path, BODY)
    assert len(engine.received) == len(SPELLINGS)


def test_a_model_may_have_a_slash_in_its_name(engine, gateway):
    gateway.request("GET", "/v1/models/org%2Fmodel")
    assert engine.received[0].path == "/v1/models/org/model"  # as the engine's own server reads it
