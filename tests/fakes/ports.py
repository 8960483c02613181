"""A port that outlives the server on it."""

from __future__ import annotations

import socket


def claim(port: int = 0) -> socket.socket:
    """A socket that keeps a port of this machine and does not listen.

    Servers that reuse addresses can come and go on it. Nobody else gets it while there is none; and no client that asks
    for it then is given the very port as its own by the system, and so connected with itself.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held
