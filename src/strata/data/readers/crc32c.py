"""CRC-32C (Castagnoli) with NumPy, as TFRecord frames need it.

The checksum is linear: the effect of a byte depends only on its value and how far it is from the end. One table
lookup per byte and one XOR over all of them give the checksum of a block, many times faster than a loop.
"""

from __future__ import annotations

import functools
import struct

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = np.uint32(0x82F63B78)
_BLOCK = 1024
_ONES = 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The checksum as TFRecord stores it: rotated and shifted, so that a checksum of checksums works."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES


def crc32c(data: bytes) -> int:
    tables = _tables()
    crc = _ONES
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data[start : start + _BLOCK], np.uint8)
        if len(block) < 4:
            for byte in block.tolist():
                crc = int(tables[-1, (crc ^ byte) & 0xFF]) ^ (crc >> 8)
            continue
        # Going on from a checksum is the same as starting from zero with it XORed onto the next four bytes.
        head = np.frombuffer(struct.pack("<I", crc), np.uint8)
        block = np.concatenate([block[:4] ^ head, block[4:]])
        crc = int(np.bitwise_xor.reduce(tables[np.arange(_BLOCK - len(block), _BLOCK), block]))
    return crc ^ _ONES


@functools.cache
def _tables() -> NDArray[np.uint32]:
    """Row r: the effect of a byte that is `_BLOCK - 1 - r` bytes before the end of a block."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ _POLYNOMIAL, table >> np.uint32(1)).astype(
            np.uint32
        )
    rows = [table]
    for _ in range(_BLOCK - 1):
        rows.append(table[rows[-1] & 0xFF] ^ (rows[-1] >> np.uint32(8)))
    return np.stack(rows[::-1])
