"""A connection that is lost while the server still takes it for open: its transport refuses to read on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.gateway.exchange import WATCHABLE, ClientGone, Exchange
from outrider.gateway.upstreams.connection import UpstreamConnection


class Lost:
    def __init__(self, closed: bool) -> None:
        self.closed = closed

    def watch(self, on_lost) -> None: ...

    def unwatch(self) -> None: ...


def exchange(closed: bool) -> Exchange:
    async def receive():
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def send(message) -> None: ...

    scope = {"method": "POST", "raw_path": b"/", "query_string": b"", "headers": [], WATCHABLE: Lost(closed)}
    return Exchange(scope, receive, send)


async def test_a_body_that_can_no_longer_be_read_is_an_agent_that_left():
    with pytest.raises(ClientGone):
        await exchange(closed=True).body(1000)


async def test_what_goes_wrong_on_an_open_connection_is_told():
    with pytest.raises(RuntimeError, match="handler"):
        await exchange(closed=False).body(1000)


def test_an_upstreams_connection_that_is_lost_in_the_moment_of_its_use_is_stale():
    def write(data):
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    told = []
    connection = UpstreamConnection([])
    connection.connection_made(SimpleNamespace(write=write, is_closing=lambda: True, get_extra_info=lambda name: None))
    connection.reused = True
    connection.send(SimpleNamespace(stale=lambda: told.append("stale")), b"head", b"body")
    assert told == ["stale"]
