"""Content encodings, undone piece by piece. The gateway records plain text and never encodes."""

from __future__ import annotations

import zlib
from typing import Protocol

import zstandard

from outrider.errors import RequestError

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


class Decoder(Protocol):
    def decompress(self, data: bytes) -> bytes: ...


def decoder(encoding: bytes) -> Decoder | None:
    """A decoder for the value of a Content-Encoding header; None for one we don't know (``br``, or several)."""
    name = encoding.strip().lower()
    if name in (b"gzip", b"x-gzip", b"deflate"):
        return zlib.decompressobj(_GZIP_OR_ZLIB)
    if name == b"zstd":
        return zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
    return None


def decode_request(body: bytes, encoding: bytes, limit: int) -> bytes:
    """Undo the encoding of a request body. Raises `RequestError`, also where the result exceeds `limit` bytes."""
    unpacked = bytearray()
    found = decoder(encoding)
    if found is None:
        raise RequestError(f"Content-Encoding {encoding.decode('latin-1')!r} is not supported.", status=415)
    try:
        # Small steps bound what a body that unpacks to gigabytes can take before the limit stops it.
        for start in range(0, len(body), 1024):
            unpacked += found.decompress(body[start : start + 1024])
            if len(unpacked) > limit:
                raise RequestError(f"The request body is larger than {limit} bytes once unpacked.", status=413)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"The request body is not valid {encoding.decode('latin-1')}: {error}.") from None
    return bytes(unpacked)
