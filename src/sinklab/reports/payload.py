"""What the explorer page holds of each run, within a budget of bytes."""

# T shown steps, L layers, H heads, K keys (added sinks first, then canvas positions), S positions
from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinklab.reports.samples import Sample
from sinklab.reports.sentences import told
from sinklab.reports.study import Study

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


def size(packed: dict[str, Any]) -> int:
    """Characters that a packed array takes on the page."""
    return len(packed["data"]) + 60


BUDGET = 2_800_000
"""characters that the arrays of one run may take"""
LOW = -6.0
"""the scale of received attention begins at 2**-6 = 0.016 of an even share"""
MOST_CELLS = 2_400_000
"""cells of maps and norms of one sample; longer samples are thinned to every n-th step"""
MOST_RANKS = 16
MOST_SAMPLES = 40
AGES = ("masked", "just committed", "committed", "prompt")
"""codes 1 to 4 of the page; 0 is a position that is not there"""
NORM_LEVELS = (254, 62, 30)


class Vocabulary:
    """The distinct tokens of a run, numbered in order of appearance."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str, str]] = []
        self._index: dict[tuple[int, str, str, str], int] = {}

    def numbered(self, sample: Sample, keep: slice) -> np.ndarray:
        """(step, position) 1 + row of each token, 0 where a position is not there."""
        ids_TS, texts_TS = sample.ids_TS[keep], sample.texts_TS[keep]
        classes_TS, specials_TS = sample.classes_TS[keep], sample.specials_TS[keep]
        numbers_TS = np.zeros(ids_TS.shape, dtype=np.uint16)
        for place in np.argwhere(sample.states_TS[keep] >= 0):
            at = tuple(place)
            token = (int(ids_TS[at]), str(texts_TS[at]), str(classes_TS[at]), str(specials_TS[at] or ""))
            if token not in self._index:
                # More distinct tokens than 16 bits can number are not told apart; no page holds so many.
                if len(self.rows) >= 65_534:
                    continue
                self._index[token] = len(self.rows)
                self.rows.append(token)
            numbers_TS[at] = self._index[token] + 1
        return numbers_TS


@dataclass
class Shown:
    """One sample on the page: its JSON, and the characters it takes."""

    content: dict[str, Any]
    used: int


def arrays_of(study: Study, budget: int = BUDGET) -> dict[str, Any]:
    """``samples`` (as many as fit, the first always), ``vocabulary`` and ``shown`` (a sentence) of one run."""
    vocabulary = Vocabulary()
    places, samples, used = list(study.recorded), list[Shown](), 0
    # As many samples as can have their maps and some keys of every head; each gets an equal part of what is left.
    fits = 1
    for place in places[:MOST_SAMPLES]:
        if len(samples) >= fits:
            break
        sample = study.samples[place]
        if not sample.step_numbers_T.size:
            continue
        shown = _base(sample, vocabulary, budget if not samples else budget - used)
        if samples and used + shown.used > budget:
            break
        if not samples:
            fits = max(1, min(len(places), int(0.6 * budget / max(shown.used, 1))))
        _add_heads(shown, sample, (budget - used) // max(fits - len(samples), 1))
        samples.append(shown)
        used += shown.used
    contents = [shown.content for shown in samples]
    return {"samples": contents, "vocabulary": vocabulary.rows, "shown": _said(contents, study)}


def _base(sample: Sample, vocabulary: Vocabulary, budget: int) -> Shown:
    """Mean maps, main sinks, value norms and tokens of one sample."""
    received_TLHK = sample.received_TLHK
    steps, layers, _, keys = received_TLHK.shape
    stride = max(1, math.ceil(2 * steps * layers * keys / MOST_CELLS))
    keep = slice(None, None, stride)
    exists_TK = sample.exists_TK[keep]
    scale = LogScale.covering(received_TLHK, LOW)
    mean_LTK = np.stack([received_TLHK[keep, layer].mean(1) for layer in range(layers)])
    mean_LTK[:, ~exists_TK] = np.nan
    main_LHT = (sample.main_TLH[keep].transpose(1, 2, 0) + 1).astype(np.uint16)
    visible_TK = np.rint(np.where(exists_TK, sample.visible_TK[keep], 0)).astype(np.uint16)
    same = bool((visible_TK == visible_TK.max(1, keepdims=True))[exists_TK].all())
    arrays = {
        "mean": pack(scale.encode(mean_LTK), keys),
        "main": pack(main_LHT),
        "visible": pack(visible_TK.max(1) if same else visible_TK, 1 if same else keys),
        **_tokens(sample, vocabulary, keep, exists_TK),
    }
    content: dict[str, Any] = {
        "index": sample.index,
        "keys": keys,
        "stride": stride,
        "steps": sample.step_numbers_T[keep].tolist(),
        "blocks": sample.blocks_T[keep].tolist(),
        "scale": scale.as_json(),
        "visible_per_key": not same,
        "arrays": arrays,
    }
    used = sum(map(size, arrays.values()))
    for name, norms_TLK in (("norms", sample.value_norm_TLK), ("key_norms", sample.key_norm_TLK)):
        if norms_TLK is None:
            continue
        packed, norm_scale = _norms(norms_TLK[keep], exists_TK, 0.3 * budget)
        if name == "key_norms" and used + size(packed) > 0.7 * budget:
            content["left_out"] = "key norms"
            continue
        arrays[name] = packed
        content["norm_scale" if name == "norms" else "key_norm_scale"] = norm_scale.as_json()
        used += size(packed)
    return Shown(content, used)


def _tokens(sample: Sample, vocabulary: Vocabulary, keep: slice, exists_TK: np.ndarray) -> dict[str, Any]:
    """Row of the vocabulary and age (1 + index into AGES, 0 not there) of every position; without tokens: committed."""
    positions = exists_TK.shape[1] - sample.added
    numbers_TS = np.zeros((len(exists_TK), positions), dtype=np.uint16)
    ages_TS = np.where(exists_TK[:, sample.added :], 3, 0).astype(np.uint8)
    if sample.has_tokens:
        found = vocabulary.numbered(sample, keep)[:, :positions]
        numbers_TS[:, : found.shape[1]] = found
        for code, age in enumerate((None, *AGES)):
            ages_TS[:, : found.shape[1]][sample.ages_TS[keep][:, :positions] == age] = code
    return {"tokens": pack(numbers_TS, positions), "ages": pack(ages_TS, positions)}


def _norms(norms_TLK: np.ndarray, exists_TK: np.ndarray, room: float) -> tuple[dict[str, Any], LogScale]:
    """Norms on the finest scale that fits into ``room``; the coarsest when none does."""
    norms_LTK = np.where(exists_TK, norms_TLK.transpose(1, 0, 2), np.nan)
    positive = norms_LTK[norms_LTK > 0]
    low = math.floor(math.log2(float(positive.min()))) if positive.size else 0.0
    for levels in NORM_LEVELS:
        scale = LogScale.covering(norms_LTK, max(low, -10.0), levels)
        packed = pack(scale.encode(norms_LTK), norms_LTK.shape[-1])
        if size(packed) <= room:
            break
    return packed, scale


def _add_heads(shown: Shown, sample: Sample, budget: int) -> None:
    """Every head's map where it fits, else the greatest keys of every head, as many as fit (one at least)."""
    keep = slice(None, None, shown.content["stride"])
    received_TLHK, exists_TK = sample.received_TLHK[keep], sample.exists_TK[keep]
    scale = LogScale(*(shown.content["scale"][key] for key in ("low", "high", "levels")))
    room = budget - shown.used
    # Deflate has never made a tenth of such maps, so much larger ones need not be tried.
    if received_TLHK.size < 4 * max(room, 0):
        codes_LHTK = scale.encode(np.where(exists_TK[:, None, None], received_TLHK, np.nan)).transpose(1, 2, 0, 3)
        packed = pack(codes_LHTK, received_TLHK.shape[-1])
        if size(packed) <= room:
            shown.content["arrays"]["heads"] = packed
            shown.used += size(packed)
            return
    ranks: list[dict[str, Any]] = []
    for keys_LHT, received_LHT in _greatest(received_TLHK, min(MOST_RANKS, received_TLHK.shape[-1])):
        there = np.isfinite(received_LHT)
        rank = {
            "keys": pack(np.where(there, keys_LHT + 1, 0).astype(np.uint16)),
            "codes": pack(scale.encode(np.where(there, received_LHT, np.nan))),
        }
        cost = size(rank["keys"]) + size(rank["codes"])
        if ranks and cost > room:
            break
        ranks.append(rank)
        room -= cost
        shown.used += cost
    shown.content["ranks"] = ranks


def _greatest(received_TLHK: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ``count`` greatest keys of every head and step, greatest first: (key, received), each (layer, head, step)."""
    keys, values = [], []
    # Layer by layer: a sorted copy of everything would take several times the memory of the sample.
    for layer in range(received_TLHK.shape[1]):
        received_THK = np.nan_to_num(received_TLHK[:, layer], nan=-np.inf, neginf=-np.inf)
        top_THR = np.argpartition(received_THK, -count, axis=-1)[..., -count:]
        value_THR = np.take_along_axis(received_THK, top_THR, axis=-1)
        order = np.argsort(-value_THR, axis=-1, kind="stable")
        keys.append(np.take_along_axis(top_THR, order, axis=-1).transpose(2, 1, 0))
        values.append(np.take_along_axis(value_THR, order, axis=-1).transpose(2, 1, 0))
    keys_RLHT, values_RLHT = np.stack(keys, axis=1), np.stack(values, axis=1)
    return list(zip(keys_RLHT, values_RLHT, strict=True))


def _said(samples: Sequence[dict[str, Any]], study: Study) -> str:
    """What of the run is on the page, and how exact: of several samples the coarsest."""
    ranks = [len(sample["ranks"]) for sample in samples if "ranks" in sample]
    norms = [sample[name]["error"] for sample in samples for name in ("norm_scale", "key_norm_scale") if name in sample]
    return told(
        "shown",
        samples=len(samples),
        recorded=len(study.recorded),
        stride=max((sample["stride"] for sample in samples), default=1),
        ranks=ranks,
        left_out=sorted({sample["left_out"] for sample in samples if "left_out" in sample}),
        scale=max((sample["scale"] for sample in samples), key=lambda scale: scale["high"], default={}),
        norms=max(norms, default=0),
    )[0]
