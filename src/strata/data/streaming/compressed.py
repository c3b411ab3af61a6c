"""Random access to files compressed with gzip or zstd.

`DecompressedSource` reads a compressed `Source` as if it were not: any range of what it holds. While it is read for the first
time it learns where decoding may start (`arrays`), which is kept with the file's index; later any range costs decoding of
the few megabytes before it. In gzip, decoding may start at a block inside a member, with the 32 KiB before it; in zstd,
where a frame starts. A zstd file of one frame has one such place, its beginning: it is read well from front to back, and
slowly in a shuffled order, and a warning says so.

Checksums of members and frames are verified by the decoders where a member or frame is decoded from its beginning to its end.
"""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.data.errors import DataError
from strata.data.readers.base import arrow
from strata.data.streaming.sources import Source
from strata.files import RangeFile

log = logging.getLogger("strata.data")

SUFFIXES = (".gz", ".zst", ".zstd")
SPAN_BYTES = 2 * 2**20
"""What is decoded at once."""
_KEPT_SPANS = 16
_INPUT_BYTES = 256 * 1024
_WINDOW_BYTES = 32 * 1024
_SLOW_BYTES = 64 * 2**20
"""A single frame that is longer than this is worth a warning."""


def is_compressed(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A place where decoding may start."""

    at: int
    """In the compressed file."""
    out: int
    """In what it decodes to."""
    bits: int = -1
    """-1: a member or frame starts here. Else how many bits of the byte before belong to the block that starts here."""
    window: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    start: int
    stop: int
    entry: Entry


class _Decoder(Protocol):
    def read(self, least: int, most: int) -> bytes:
        """The next bytes: at least `least` and up to a place where decoding may start, at most `most`; fewer at the end."""
        ...

    def entry(self, out: int) -> Entry | None:
        """Where decoding may start, if that is just here."""
        ...


class DecompressedSource:
    """What a compressed file holds."""

    def __init__(
        self,
        packed: Source,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        unfinished: Mapping[str, NDArray[Any]] | None = None,
        extended: Callable[[], None] | None = None,
    ) -> None:
        """`arrays` as they were learned; or, of a first reading that was interrupted, what `unfinished` gave. `extended` is
        called now and then while the whole file is decoded only to learn how much it holds."""
        self._extended = extended
        self.path = packed.path
        self._packed = packed
        self._is_zstd = packed.read(0, 4) == b"\x28\xb5\x2f\xfd"
        if not self._is_zstd and packed.read(0, 2) != b"\x1f\x8b":
            raise DataError.at(packed.path, "it is neither gzip nor zstd, despite its name")
        self._spans: list[_Span] = []
        self._is_complete = False
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._live: tuple[_Decoder, int] | None = None
        """A decoder, and where in the output it stands."""
        if arrays is not None:
            self._spans = _spans_from(arrays)
            self._is_complete = True
        self._next: Entry | None = None
        """Where decoding continues, if it may start just there."""
        if unfinished and "span_next" in unfinished:
            self._spans = _spans_from(unfinished)
            at, out, bits = unfinished["span_next"].tolist()
            if at >= 0:
                self._next = Entry(at=at, out=out, bits=bits, window=unfinished["span_next_window"].tobytes())

    @property
    def size_bytes(self) -> int:
        while not self._is_complete:
            self._extend()
            if self._extended is not None:
                self._extended()
        return self._spans[-1].stop if self._spans else 0

    def read(self, offset: int, length: int) -> bytes:
        while not self._is_complete and (not self._spans or self._spans[-1].stop < offset + length):
            self._extend()
        if not self._spans or offset >= self._spans[-1].stop or length <= 0:
            return b""
        number = self._find(offset)
        pieces = []
        while length > 0 and number < len(self._spans):
            span = self._spans[number]
            piece = self._decoded(number)[offset - span.start : offset - span.start + length]
            pieces.append(piece)
            offset, length, number = offset + len(piece), length - len(piece), number + 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def packed_range(self, offset: int, length: int) -> tuple[int, int]:
        """Where a range comes from in the compressed file: offset and length."""
        first, last = self._find(offset), self._find(offset + max(length, 1) - 1)
        start = self._spans[first].entry.at
        after = next((s.entry.at for s in self._spans[last + 1 :] if s.entry.at > start), None)
        return start, (self._packed.size_bytes if after is None else after) - start

    def prefetch(self, ranges: Sequence[tuple[int, int]], *, in_memory: bool = True) -> None:
        if (ahead := getattr(self._packed, "prefetch", None)) is not None:
            ahead([self.packed_range(offset, length) for offset, length in ranges], in_memory=in_memory)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What was learned, to be kept with the index."""
        learned = self._learned()
        if self._is_zstd and len(learned["span_entries"]) == 1 and self.size_bytes > _SLOW_BYTES:
            log.warning(
                "%s is one zstd frame: reading it in a shuffled order is slow. Compress it in frames (pzstd), or decompress it.",
                self.path,
            )
        return learned

    def unfinished(self) -> dict[str, NDArray[Any]]:
        """What was learned so far, and where decoding continues."""
        stop = self._spans[-1].stop if self._spans else 0
        here = self._live[0].entry(stop) if self._live is not None and self._live[1] == stop else None
        place = (here.at, here.out, here.bits) if here is not None else (-1, stop, -1)
        return {
            **self._learned(),
            "span_next": np.array(place, np.int64),
            "span_next_window": np.frombuffer(here.window if here is not None else b"", np.uint8),
        }

    def _learned(self) -> dict[str, NDArray[Any]]:
        entries = list({id(s.entry): s.entry for s in self._spans}.values())
        numbers = {id(entry): number for number, entry in enumerate(entries)}
        windows = [zlib.compress(entry.window, 1) if entry.window else b"" for entry in entries]
        return {
            "span_bounds": np.array([(s.start, s.stop, numbers[id(s.entry)]) for s in self._spans]).reshape(
                -1, 3
            ),
            "span_entries": np.array([(e.at, e.out, e.bits) for e in entries], np.int64).reshape(-1, 3),
            "span_windows": np.frombuffer(b"".join(windows), np.uint8),
            "span_window_ends": np.cumsum([len(window) for window in windows], dtype=np.int64),
        }

    def close(self) -> None:
        self._kept.clear()
        self._live = None
        self._packed.close()

    # ---------------------------------------------------------------------------------------------------------

    def _find(self, offset: int) -> int:
        low, high = 0, len(self._spans) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._spans[middle].start <= offset:
                low = middle
            else:
                high = middle - 1
        return low

    def _extend(self) -> None:
        """Decode one span more."""
        out = self._spans[-1].stop if self._spans else 0
        decoder = self._decoder_at(out, None)
        entry = decoder.entry(out) or self._spans[-1].entry
        data = self._read(decoder, SPAN_BYTES, 4 * SPAN_BYTES)
        self._live = (decoder, out + len(data))
        if not data:
            self._is_complete = True
            return
        self._spans.append(_Span(start=out, stop=out + len(data), entry=entry))
        self._keep(len(self._spans) - 1, data)

    def _decoded(self, number: int) -> bytes:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        span = self._spans[number]
        decoder = self._decoder_at(span.start, span.entry)
        size = span.stop - span.start
        data = self._read(decoder, size, size)
        if len(data) != size:
            raise DataError.at(
                self.path,
                "it is cut short, or has changed since it was indexed",
                hint="Restore it, or index it again.",
            )
        self._live = (decoder, span.stop)
        self._keep(number, data)
        return data

    def _keep(self, number: int, data: bytes) -> None:
        self._kept[number] = data
        if len(self._kept) > _KEPT_SPANS:
            self._kept.popitem(last=False)

    def _decoder_at(self, out: int, entry: Entry | None) -> _Decoder:
        """A decoder that stands at a place of the output."""
        if entry is None and self._next is not None and self._next.out == out:
            entry = self._next  # A decoder that was stopped just here would not know that it may start here.
        elif self._live is not None and self._live[1] == out:
            decoder, self._live = self._live[0], None
            return decoder
        if entry is None:
            entry = self._spans[-1].entry if self._spans else Entry(at=0, out=0)
        decoder = _Zstd(self._packed, entry) if self._is_zstd else _Gzip(self._packed, entry)
        skip = out - entry.out
        while skip > 0:
            skipped = self._read(decoder, min(skip, SPAN_BYTES), min(skip, SPAN_BYTES))
            if not skipped:
                break
            skip -= len(skipped)
        return decoder

    def _read(self, decoder: _Decoder, least: int, most: int) -> bytes:
        try:
            return decoder.read(least, most)
        except (ValueError, OSError, EOFError) as error:
            raise DataError.at(self.path, f"the compressed data is damaged ({error})") from error


def _spans_from(arrays: Mapping[str, NDArray[Any]]) -> list[_Span]:
    ends = arrays["span_window_ends"].tolist()
    windows = arrays["span_windows"]
    entries = []
    for (at, out, bits), start, stop in zip(
        arrays["span_entries"].tolist(), [0, *ends[:-1]], ends, strict=True
    ):
        packed = windows[start:stop].tobytes()
        entries.append(Entry(at=at, out=out, bits=bits, window=zlib.decompress(packed) if packed else b""))
    return [
        _Span(start=start, stop=stop, entry=entries[number])
        for start, stop, number in arrays["span_bounds"].tolist()
    ]


class _ZStream(ctypes.Structure):
    """zlib's `z_stream`."""

    _fields_ = (
        ("next_in", ctypes.c_void_p),
        ("avail_in", ctypes.c_uint),
        ("total_in", ctypes.c_ulong),
        ("next_out", ctypes.c_void_p),
        ("avail_out", ctypes.c_uint),
        ("total_out", ctypes.c_ulong),
        ("msg", ctypes.c_char_p),
        ("state", ctypes.c_void_p),
        ("zalloc", ctypes.c_void_p),
        ("zfree", ctypes.c_void_p),
        ("opaque", ctypes.c_void_p),
        ("data_type", ctypes.c_int),
        ("adler", ctypes.c_ulong),
        ("reserved", ctypes.c_ulong),
    )


_OK, _END, _BUFFER = 0, 1, -5
_BLOCK = 5  # Stop where a block ends.
_WITH_HEADER, _RAW = 31, -15
_TRAILER_BYTES = 8


def _zlib(path: str) -> Any:
    """The system's zlib: Python's own module cannot start in the middle of a stream."""
    try:
        return ctypes.CDLL("libz.so.1")
    except OSError as error:
        raise DataError.at(
            path,
            "gzip files are read by number through the system's zlib (libz.so.1), which is not installed",
            hint="Install zlib (zlib1g), or decompress the file.",
        ) from error


class _Gzip:
    """Decodes from an entry, across members."""

    def __init__(self, packed: Source, entry: Entry) -> None:
        self._packed = packed
        self._unread: Entry | None = entry  # Until something is read: zlib does not tell of its bits before.
        self._at = entry.at  # Of the input that was handed to zlib, the end.
        self._library = _zlib(packed.path)
        self._stream = _ZStream()
        self._input = ctypes.create_string_buffer(0)
        self._window = bytearray(entry.window)
        self._is_raw = entry.bits >= 0
        self._is_at_member, self._is_at_block = not self._is_raw, self._is_raw
        self._is_over = not self._is_raw and entry.at >= packed.size_bytes
        self._check(
            self._library.inflateInit2_(
                ctypes.byref(self._stream),
                _RAW if self._is_raw else _WITH_HEADER,
                ctypes.c_char_p(self._library_version()),
                ctypes.sizeof(_ZStream),
            )
        )
        if entry.bits > 0:
            byte = packed.read(entry.at - 1, 1)[0]
            self._check(
                self._library.inflatePrime(ctypes.byref(self._stream), entry.bits, byte >> (8 - entry.bits))
            )
        if entry.window:
            self._check(
                self._library.inflateSetDictionary(
                    ctypes.byref(self._stream), bytes(entry.window), len(entry.window)
                )
            )

    def _library_version(self) -> bytes:
        version = self._library.zlibVersion
        version.restype = ctypes.c_char_p
        found: bytes = version()
        return found

    def _check(self, code: int) -> None:
        if code != _OK:
            raise ValueError(f"zlib answered {code}")

    def entry(self, out: int) -> Entry | None:
        if self._unread is not None:
            return self._unread
        at = self._at - self._stream.avail_in
        if self._is_at_member:
            return Entry(at=at, out=out)
        if self._is_at_block:
            return Entry(at=at, out=out, bits=self._stream.data_type & 7, window=bytes(self._window))
        return None

    def read(self, least: int, most: int) -> bytes:
        self._unread = None
        found = bytearray()
        buffer = ctypes.create_string_buffer(min(most, SPAN_BYTES))
        while len(found) < most and not self._is_over:
            if len(found) >= least and (self._is_at_member or self._is_at_block):
                break
            if not self._stream.avail_in and not self._more_input():
                break
            space = min(most - len(found), len(buffer))
            self._stream.next_out = ctypes.addressof(buffer)
            self._stream.avail_out = space
            self._is_at_member = self._is_at_block = False
            code = self._library.inflate(ctypes.byref(self._stream), _BLOCK)
            made = buffer.raw[: space - self._stream.avail_out] if self._stream.avail_out < space else b""
            found += made
            self._window = (self._window + made)[-_WINDOW_BYTES:]
            if code == _END:
                self._next_member()
            elif code not in (_OK, _BUFFER):
                reason = self._stream.msg.decode() if self._stream.msg else f"zlib answered {code}"
                raise ValueError(reason)
            else:
                kind = self._stream.data_type
                self._is_at_block = bool(kind & 128) and not kind & 64 and bool(self._window)
        if not self._is_over and len(found) < least and not self._stream.avail_in:
            raise EOFError("it is cut short")
        return bytes(found)

    def _more_input(self) -> bool:
        data = self._packed.read(self._at, _INPUT_BYTES)
        if not data:
            return False
        self._at += len(data)
        self._input = ctypes.create_string_buffer(data, len(data))
        self._stream.next_in = ctypes.addressof(self._input)
        self._stream.avail_in = len(data)
        return True

    def _next_member(self) -> None:
        """A member is over. What zlib has not seen of its trailer is skipped."""
        at = self._at - self._stream.avail_in + (_TRAILER_BYTES if self._is_raw else 0)
        while at < self._packed.size_bytes and self._packed.read(at, 1) == b"\0":
            at += 1  # Padding, as `tar` and tapes leave it.
        self._is_over = at >= self._packed.size_bytes
        self._at, self._stream.avail_in, self._window = at, 0, bytearray()
        self._is_raw, self._is_at_member = False, True
        if not self._is_over:
            self._check(self._library.inflateReset2(ctypes.byref(self._stream), _WITH_HEADER))

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self._library.inflateEnd(ctypes.byref(self._stream))


class _Zstd:
    """Decodes from the start of a frame, across frames."""

    def __init__(self, packed: Source, entry: Entry) -> None:
        self._packed = packed
        self._at = entry.at
        self._frame: Any = None
        self._frame_stop = entry.at
        self._size = packed.size_bytes

    def entry(self, out: int) -> Entry | None:
        return Entry(at=self._at, out=out) if self._frame is None else None

    def read(self, least: int, most: int) -> bytes:
        found = bytearray()
        while len(found) < most:
            if self._frame is None:
                if len(found) >= least or self._at >= self._size:
                    break
                self._open_frame()
                continue
            piece = self._frame.read(min(most - len(found), max(least - len(found), 128 * 1024)))
            if piece:
                found += piece
            else:
                self._frame, self._at = None, self._frame_stop
        return bytes(found)

    def _open_frame(self) -> None:
        start, stop, is_data = self._at, *_zstd_frame(self._packed, self._at)
        if not is_data:
            self._at = stop
            return
        pa = arrow("zstd files")
        file = pa.PythonFile(
            RangeFile(lambda at, size: self._packed.read(start + at, size), stop - start), mode="r"
        )
        self._frame, self._frame_stop = pa.CompressedInputStream(file, "zstd"), stop


def _zstd_frame(packed: Source, at: int) -> tuple[int, bool]:
    """Where the frame at a place ends, from its headers alone, and whether it holds data."""
    head = packed.read(at, 18)
    magic = int.from_bytes(head[:4], "little")
    if 0x184D2A50 <= magic <= 0x184D2A5F:
        return at + 8 + int.from_bytes(head[4:8], "little"), False
    if magic != 0xFD2FB528 or len(head) < 6:
        raise ValueError("there is no zstd frame where one should start")
    descriptor = head[4]
    is_single = bool(descriptor & 0x20)
    content = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    header = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3] + content
    place = at + header
    while True:
        block = packed.read(place, 3)
        if len(block) < 3:
            raise EOFError("it is cut short")
        value = int.from_bytes(block, "little")
        is_last, kind, size = value & 1, value >> 1 & 3, value >> 3
        place += 3 + (1 if kind == 1 else size)
        if is_last:
            stop = place + (4 if descriptor & 4 else 0)
            if stop > packed.size_bytes:
                raise EOFError("it is cut short")
            return stop, True
