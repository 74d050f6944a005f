"""Numbers small enough for a page: 8-bit codes on a logarithmic scale, differences along rows, deflate, base64."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

ABSENT, BELOW = 0, 1
LEVELS = 254
# Where differences do not deflate better than this, the cheaper reader wins.
WORTH = 0.97


@dataclass(frozen=True)
class LogScale:
    """Codes of amounts: 0 absent, 1 below 2**low, then ``levels`` even steps of the logarithm up to 2**high."""

    low: float
    high: float
    levels: int = LEVELS

    @classmethod
    def covering(cls, values: np.ndarray, low: float, levels: int = LEVELS) -> LogScale:
        """The scale from 2**low to the next power of two above the greatest number."""
        greatest = float(np.fmax.reduce(values, axis=None, initial=0.0))
        high = math.ceil(math.log2(greatest)) if greatest > 2**low else low + 1
        return cls(low, max(high, low + 1), levels)

    @property
    def error(self) -> float:
        """Greatest relative error of a number between 2**low and 2**high."""
        return 2 ** ((self.high - self.low) / (self.levels - 1) / 2) - 1

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Codes as uint8; NaN is absent."""
        step = (self.levels - 1) / (self.high - self.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.log2(values, dtype=np.float32)
        place -= np.float32(self.low)
        place *= np.float32(step)
        below = place < 0
        absent = np.isnan(values)
        np.nan_to_num(place, copy=False, nan=0, neginf=0)
        np.clip(place, 0, self.levels - 1, out=place)
        codes = np.rint(place).astype(np.uint8) + np.uint8(2)
        codes[below] = BELOW
        codes[absent] = ABSENT
        return codes

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The numbers again: NaN where absent, 0 below the scale."""
        table = np.full(256, 2.0**self.high)
        table[ABSENT], table[BELOW] = np.nan, 0
        table[2 : 2 + self.levels] = 2 ** np.linspace(self.low, self.high, self.levels)
        return table[codes]

    def as_json(self) -> dict[str, float]:
        """What the page needs to decode."""
        return {"low": self.low, "high": self.high, "levels": self.levels, "error": round(self.error, 5)}


def pack(array: np.ndarray, row: int = 0) -> dict[str, Any]:
    """An array of unsigned integers as JSON: the smallest of plain, deflated, and deflated differences.

    ``row`` is the distance, in elements, to the element that is likely to be alike (the same cell one step before);
    0 when there is none.
    """
    flat = np.ascontiguousarray(array).ravel()
    if flat.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"pack takes uint8 or uint16 arrays: got {flat.dtype}. Encode them on a LogScale first.")
    flat = flat.astype(flat.dtype.newbyteorder("<"))
    plain = zlib.compress(flat.tobytes(), 9)
    best, delta, deflate = plain, 0, True
    if 0 < row < flat.size:
        differences = flat.copy()
        differences[row:] -= flat[:-row]
        smaller = zlib.compress(differences.tobytes(), 9)
        if len(smaller) < WORTH * len(plain):
            best, delta = smaller, row
    if len(best) >= WORTH * flat.nbytes:
        best, delta, deflate = flat.tobytes(), 0, False
    return {
        "bytes": flat.itemsize,
        "delta": delta,
        "deflate": deflate,
        "data": base64.b64encode(best).decode("ascii"),
    }


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """What ``pack`` was given, flat."""
    content = base64.b64decode(packed["data"])
    if packed["deflate"]:
        content = zlib.decompress(content)
    kind = np.dtype(f"<u{packed['bytes']}")
    values = np.frombuffer(content, dtype=kind).copy()
    if row := packed["delta"]:
        padded = np.zeros(-(-values.size // row) * row, dtype=kind)
        padded[: values.size] = values
        values = np.add.accumulate(padded.reshape(-1, row), axis=0, dtype=kind).ravel()[: values.size]
    return values


def size(packed: dict[str, Any]) -> int:
    """Characters that a packed array takes on the page."""
    return len(packed["data"]) + 60
