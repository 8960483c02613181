"""Reasoning that a client keeps for us, as an opaque string.

Neither protocol sends a model's reasoning back in the open: Anthropic's thinking blocks carry a ``signature``, and
Responses items an ``encrypted_content``. Ours hold the text itself, so that it comes back with the client's next
request and no server has to remember it. It is packed, not encrypted: the client was shown the same text.
"""

from __future__ import annotations

import base64

import msgspec
import zstandard

_PREFIX = "outrider.1."
_LIMIT = 8 << 20  # a client could send anything


class _Sealed(msgspec.Struct):
    text: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Sealed).decode


def seal(text: str) -> str:
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(_encode(_Sealed(text)))
    return _PREFIX + base64.urlsafe_b64encode(packed).decode()


def unseal(sealed: object) -> str | None:
    """The text of `seal`; None for what somebody else issued, or what is broken."""
    if not isinstance(sealed, str) or not sealed.startswith(_PREFIX):
        return None
    try:
        packed = base64.b64decode(sealed.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        if not 0 <= zstandard.frame_content_size(packed) <= _LIMIT:  # what `decompress` allocates
            return None
        return _decode(zstandard.ZstdDecompressor().decompress(packed)).text
    except (ValueError, zstandard.ZstdError, msgspec.MsgspecError):
        return None
