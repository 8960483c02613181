"""Content encodings: undone for what is recorded, and put on answers for agents that want it."""

from __future__ import annotations

import zlib
from typing import Protocol

import zstandard

from outrider.errors import RequestError

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_ZSTD_WINDOW = 8 << 20  # what RFC 9659 lets a sender ask for
_STEP = 1 << 10  # packed bytes that are unpacked at a time: four may become 128 KiB


class Decoder(Protocol):
    def decompress(self, data: bytes) -> bytes: ...


class TooLong(Exception):
    """What was packed exceeds a limit."""


class Unpacker:
    """Undoes the content encoding of an answer that comes in pieces."""

    def __init__(self, decoder: Decoder, limit: float) -> None:
        """`limit` is the most that it unpacks, bytes."""
        self._decoder = decoder
        self._left = limit

    def unpack(self, data: bytes) -> bytes:
        """Raises `TooLong`, and `zlib.error` or `zstandard.ZstdError` for what is broken."""
        parts = []
        for at in range(0, len(data), _STEP):
            parts.append(self._decoder.decompress(data[at : at + _STEP]))
            self._left -= len(parts[-1])
            if self._left < 0:
                raise TooLong
        return b"".join(parts)


def unpacker(encoding: bytes, limit: float) -> Unpacker | None:
    """For the value of a Content-Encoding header; None for one we don't know (``br``, or several)."""
    name = encoding.strip().lower()
    if name in (b"gzip", b"x-gzip", b"deflate"):
        return Unpacker(zlib.decompressobj(_GZIP_OR_ZLIB), limit)
    if name == b"zstd":
        return Unpacker(zstandard.ZstdDecompressor().decompressobj(read_across_frames=True), limit)
    return None


def decode_request(body: bytes, encoding: bytes, limit: int) -> bytes:
    """Undo the encoding of a request body. Raises `RequestError`, also where the result exceeds `limit` bytes.

    No more than `limit` bytes are ever unpacked, whatever a body claims to hold.
    """
    name = encoding.strip().lower()
    shown = encoding.decode("latin-1")
    try:
        if name in (b"gzip", b"x-gzip", b"deflate"):
            unpacked = _unzip(body, limit + 1)
        elif name == b"zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(
                body, read_across_frames=True
            )
            unpacked = reader.read(limit + 1)
        else:
            raise RequestError(f"Content-Encoding {shown!r} is not supported.", status=415)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"The request body is not valid {shown}: {error}.") from None
    if len(unpacked) > limit:
        raise RequestError(f"The request body is larger than {limit} bytes once unpacked.", status=413)
    return unpacked


def _unzip(body: bytes, limit: int) -> bytes:
    """The first `limit` bytes. Raises `zlib.error`, also for a body that was cut."""
    parts = []
    left = limit
    while body and left:
        unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
        parts.append(unpacker.decompress(body, left))
        left -= len(parts[-1])
        if left and not unpacker.eof:
            raise zlib.error("it ends too early")
        body = unpacker.unused_data  # gzip may come in several members
    return b"".join(parts)


class Packer:
    """Packs an answer, whole or piece by piece; each piece can be unpacked as soon as it arrives."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self._zstd = zstandard.ZstdCompressor(level=3).compressobj() if name == b"zstd" else None
        self._gzip = zlib.compressobj(level=4, wbits=16 + zlib.MAX_WBITS) if name == b"gzip" else None

    def piece(self, data: bytes) -> bytes:
        if self._zstd is not None:
            return self._zstd.compress(data) + self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        assert self._gzip is not None
        return self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)

    def last(self, data: bytes) -> bytes:
        if self._zstd is not None:
            return self._zstd.compress(data) + self._zstd.flush()
        assert self._gzip is not None
        return self._gzip.compress(data) + self._gzip.flush()


def packer_for(accepted: bytes) -> Packer | None:
    """For an Accept-Encoding header: zstd before gzip; None where it takes neither."""
    taken = set()
    for part in accepted.lower().split(b","):
        name, _, parameters = part.partition(b";")
        quality = parameters.strip().removeprefix(b"q=").strip()
        if quality.strip(b"0.") or not quality:  # q=0 means never
            taken.add(name.strip())
    return next((Packer(name) for name in (b"zstd", b"gzip") if name in taken), None)
