"""Content encodings on answers of recorded calls, for agents that take them."""

from __future__ import annotations

import gzip
import http.client
import json
import math
import threading

import openai
import pytest
import zstandard

from fakes.engine import Sampled, chunk, stream
from fakes.gateway import CHAT, MESSAGES
from outrider.gateway.encoding import packer_for, unpacker
from outrider.types import Fidelity

UNPACK = {"gzip": gzip.decompress, "zstd": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)}
LONG = Sampled(pieces=["x" * 2000, ""], ids=[5, 2], logprobs=[-1.0, -2.0])


@pytest.fixture
def gateway(start):
    with start(mode="train", pack_answers=True) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("accepted", "name"),
    [
        ("gzip", b"gzip"),
        ("gzip, deflate, br, zstd", b"zstd"),
        ("zstd;q=0, gzip;q=0.5", b"gzip"),
        ("GZIP ; q=1.0", b"gzip"),
        ("gzip;q=0.0", None),
        ("br, identity", None),
        ("", None),
    ],
)
def test_the_agent_says_what_it_takes(accepted, name):
    packer = packer_for(accepted.encode())
    assert (packer.name if packer else None) == name


@pytest.mark.parametrize("encoding", UNPACK)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_is_packed_and_recorded_plain(engine, gateway, encoding, streamed):
    engine.sampled = [LONG]
    body = json.dumps({"messages": MESSAGES, "stream": streamed}).encode()
    got = gateway.post(f"/s/{gateway.open()}{CHAT}", body, {"accept-encoding": encoding})
    assert got.headers["content-encoding"] == encoding
    assert got.headers["vary"] == "accept-encoding"
    assert "x" * 2000 in UNPACK[encoding](got.body).decode()
    call = gateway.call()
    assert call.fidelity is Fidelity.EXACT
    assert b"x" * 2000 in call.response


@pytest.mark.parametrize("encoding", UNPACK)
def test_S12_each_event_can_be_read_before_the_next_is_made(engine, gateway, encoding):
    gate = threading.Event()
    engine.answers.append(
        stream(chunk({"content": "a"}), chunk({"content": "b"}, finish_reason="stop"), done=False, gate=gate)
    )
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    body = b'{"messages": [], "stream": true}'
    connection.request("POST", f"/s/{gateway.open()}{CHAT}", body, {"accept-encoding": encoding})
    answer = connection.getresponse()
    found, text = unpacker(encoding.encode(), math.inf), b""
    while b'"a"' not in text:
        text += found.unpack(answer.read1(65536))
    assert b'"b"' not in text
    gate.set()
    while piece := answer.read1(65536):
        text += found.unpack(piece)
    assert b'"b"' in text
    connection.close()


def test_short_answers_and_agents_that_take_nothing_get_them_plain(engine, gateway):
    key = gateway.open()
    for headers in ({"accept-encoding": "gzip"}, {}):
        got = gateway.post(f"/s/{key}{CHAT}", {"messages": MESSAGES}, headers)
        assert "content-encoding" not in got.headers
        assert got.json["choices"]


@pytest.mark.parametrize("streamed", [False, True])
def test_the_sdk_reads_it(engine, gateway, streamed):
    engine.sampled = [LONG]
    with openai.OpenAI(base_url=f"{gateway.base_url}/s/{gateway.open()}/v1", api_key="k", max_retries=0) as client:
        if streamed:
            with client.chat.completions.stream(model="m", messages=MESSAGES) as chunks:
                reply = chunks.get_final_completion()
        else:
            reply = client.chat.completions.create(model="m", messages=MESSAGES)
    assert reply.choices[0].message.content == LONG.text


def test_by_default_nothing_is_packed(engine, start):
    engine.sampled = [LONG]
    with start(mode="train") as gateway:
        got = gateway.post(f"/s/{gateway.open()}{CHAT}", {"messages": MESSAGES}, {"accept-encoding": "gzip"})
        assert "content-encoding" not in got.headers
