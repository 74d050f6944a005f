"""Data of each run for the explorer of the page, within a budget of bytes, and the script that
reads it.
"""

# T shown steps, L layers, H heads, K keys (added sinks first, then canvas positions), S positions
from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis.tokens import AGES
from sinklab.lab.reports.samples import Sample
from sinklab.lab.reports.study import Study
from sinklab.lab.reports.style import THEMES, asset

ABSENT, BELOW = 0, 1
LEVELS = 254
LEVEL = 7
"""of deflate: 9 takes up to five times as long for a page that is 0.4 % smaller"""


@dataclass(frozen=True)
class LogScale:
    """Codes of amounts: 0 absent, 1 below 2**low, then `LEVELS` even steps of the logarithm up to
    2**high.
    """

    low: float
    high: float

    @classmethod
    def covering(cls, values: np.ndarray, low: float) -> LogScale:
        """The scale from 2**low to the next power of two above the greatest number."""
        greatest = float(np.fmax.reduce(values, axis=None, initial=0.0))
        high = math.ceil(math.log2(greatest)) if greatest > 2**low else low + 1
        return cls(low, max(high, low + 1))

    @property
    def error(self) -> float:
        """Greatest relative error of a number between 2**low and 2**high."""
        return 2 ** ((self.high - self.low) / (LEVELS - 1) / 2) - 1

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Codes as uint8; NaN is absent."""
        step = np.float32((LEVELS - 1) / (self.high - self.low))
        with np.errstate(divide="ignore", invalid="ignore"):
            place = (np.log2(values, dtype=np.float32) - np.float32(self.low)) * step
        level = np.clip(np.nan_to_num(place, nan=0, neginf=0), 0, LEVELS - 1)
        codes = np.where(place < 0, np.uint8(BELOW), np.rint(level).astype(np.uint8) + np.uint8(2))
        return np.where(np.isnan(values), np.uint8(ABSENT), codes)

    def as_json(self) -> dict[str, float]:
        """The numbers that the page needs to decode."""
        return asdict(self) | {"levels": LEVELS, "error": round(self.error, 5)}


def pack(array: np.ndarray, row: int = 0) -> dict[str, Any]:
    """An array of uint8 or uint16 as JSON, deflated.

    ``row`` is the distance, in elements, to the element that is likely to be alike (the same cell
    one step before): differences to that are stored; 0 when there is none.
    """
    flat = np.ascontiguousarray(array).ravel()
    flat = flat.astype(flat.dtype.newbyteorder("<"))
    if row:
        flat[row:] -= flat[:-row]
    data = base64.b64encode(zlib.compress(flat.tobytes(), LEVEL)).decode("ascii")
    return {"bytes": flat.itemsize, "delta": row, "data": data}


def size(packed: dict[str, Any]) -> int:
    """Characters that a packed array takes on the page."""
    return len(packed["data"]) + 60


BUDGET = 2_800_000
"""characters that the arrays of one run may take"""
LOW = -6.0
"""the scale of received attention begins at 2**-6 = 0.016 of an even share"""
MOST_CELLS = 2_400_000
"""cells of maps and norms of one sample; longer samples are thinned to every n-th step"""
MOST_SAMPLES = 40
Token = tuple[int, str, str, str]


def arrays_of(study: Study, budget: int = BUDGET) -> dict[str, Any]:
    """``samples`` (as many as fit, the first always), ``vocabulary`` and ``shown`` (a sentence) of
    one run.
    """
    vocabulary: dict[Token, int] = {}
    samples: list[dict[str, Any]] = []
    used = 0
    # As many samples as can have their maps; each gets an equal part of the rest for its heads.
    fits = 1
    written = study.table("generations")
    finals = {} if written is None else written.set_index("sample")["completion"].to_dict()
    for place in study.recorded[:MOST_SAMPLES]:
        sample = study.sample(place)
        if len(samples) >= fits:
            break
        if not sample.has_attention or not sample.step_numbers_T.size:
            continue
        content = _base(sample, vocabulary) | {"final": str(finals.get(sample.index) or "")}
        _add_hidden(content, study, sample, 0.85 * (budget - used) - _used(content))
        if samples and used + _used(content) > budget:
            break
        if not samples:
            fits = max(1, min(len(study.recorded), int(0.6 * budget / _used(content))))
        _add_heads(content, sample, (budget - used) // max(fits - len(samples), 1) - _used(content))
        samples.append(content)
        used += _used(content)
    shown = _extent(samples, len(study.recorded)) if samples else "No attention was recorded."
    return {"samples": samples, "vocabulary": [*vocabulary], "shown": shown}


def _extent(samples: list[dict[str, Any]], recorded: int) -> str:
    """How much of a run the explorer holds, in words: of several samples the coarsest."""
    stride = max(one["stride"] for one in samples)
    floor = max(one["floor"] for one in samples)
    parts = [
        f"{len(samples)} of {recorded} samples" if recorded > 1 else "One sample",
        "every recorded step" if stride == 1 else f"one recorded step in {stride}",
        "every key of every recorded head",
    ]
    if floor:
        parts[2] = f"every key of the mean over heads, and those above {floor:.2g}× of each head"
    if any("left_out" in one for one in samples):
        parts.append("no marks of blocked keys")
    scale = max((one["scale"] for one in samples), key=itemgetter("high"))
    norms = [one["norm_scale"]["error"] for one in samples if "norm_scale" in one]
    within = f"; norms within {100 * max(norms):.1f} %" if norms else ""
    return (
        f"{', '.join(parts)}. Received attention is stored in {LEVELS} logarithmic levels from "
        f"{2 ** scale['low']:.2g}× to {2 ** scale['high']:g}× an even share, each within "
        f"{100 * scale['error']:.1f} %{within}. The run folder holds the numbers as recorded."
    )


def _used(content: dict[str, Any]) -> int:
    """Characters that the arrays of a sample take."""
    return sum(map(size, content["arrays"].values()))


def _base(sample: Sample, vocabulary: dict[Token, int]) -> dict[str, Any]:
    """One sample as JSON: mean maps, main sinks, value norms and tokens."""
    steps, layers, _, keys = sample.shape
    stride = max(1, math.ceil(2 * steps * layers * keys / MOST_CELLS))
    keep = slice(None, None, stride)
    exists_TK = sample.exists_TK[keep]
    scale = LogScale.covering(np.array([sample.greatest]), LOW)
    received_LTK = sample.received_TLK[keep].transpose(1, 0, 2)
    # the mean over all layers stands in front
    mean_LTK = np.where(exists_TK, [received_LTK.mean(0), *received_LTK], np.nan)
    main_LHT = (sample.facts["main"][keep].transpose(1, 2, 0) + 1).astype(np.uint16)
    # scores are mean weights in multiples of an even share, whatever the number of queries that see
    # the key
    visible_T = np.rint(np.where(exists_TK, sample.visible_TK[keep], 0).max(1)).astype(np.uint16)
    arrays = {
        "mean": pack(scale.encode(mean_LTK), keys),
        "main": pack(main_LHT),
        "visible": pack(visible_T),
        **_tokens(sample, vocabulary, keep, exists_TK),
    }
    content: dict[str, Any] = {
        "index": sample.index,
        "keys": keys,
        "stride": stride,
        "steps": sample.step_numbers_T[keep].tolist(),
        "blocks": sample.blocks_T[keep].tolist(),
        "scale": scale.as_json(),
        "arrays": arrays,
    }
    if "value_norm" in sample.dims:
        norms_TLK = sample.stored("value_norm")[keep].astype(np.float32)
        norms_LTK = np.where(exists_TK, norms_TLK.transpose(1, 0, 2), np.nan)
        least = norms_LTK[norms_LTK > 0].min(initial=1.0)
        scale = LogScale.covering(norms_LTK, max(math.floor(math.log2(least)), -10))
        arrays["norms"] = pack(scale.encode(norms_LTK), keys)
        content["norm_scale"] = scale.as_json()
    return content


def _tokens(
    sample: Sample, vocabulary: dict[Token, int], keep: slice, exists_TK: np.ndarray
) -> dict[str, Any]:
    """Number in the vocabulary and age (1 + index into AGES) of every position, 0 if none is there;
    without recorded states: committed.
    """
    there_TS = exists_TK[:, sample.added :]
    numbers_TS = np.zeros(there_TS.shape, np.uint16)
    ages_TS = np.where(there_TS, 1 + AGES.index("committed"), 0)
    if sample.has_tokens:
        there_TS = sample.states_TS[keep] >= 0
        ids_TS, special_TS = sample.grid["token_id"], sample.grid["special"]
        columns = (ids_TS, sample.read_TS, sample.classes_TS, special_TS)
        tokens = zip(*(values_TS[keep][there_TS].tolist() for values_TS in columns), strict=True)
        numbers = [
            vocabulary.setdefault(
                (number, str(text), str(kind), str(special or "")), len(vocabulary) + 1
            )
            for number, text, kind, special in tokens
        ]
        numbers_TS[there_TS] = numbers
        ages_TS = np.sum(
            [code * (sample.ages_TS[keep] == age) for code, age in enumerate(AGES, 1)], axis=0
        )
    positions = there_TS.shape[1]
    return {
        "tokens": pack(numbers_TS, positions),
        "ages": pack(ages_TS.astype(np.uint8), positions),
    }


def _blocked_keys(study: Study, sample: Sample, steps: Any) -> np.ndarray:
    """Keys that edits blocked in a sample, (4, N): places of their layers, heads and steps
    among the recorded layers and heads and these steps, and their numbers. None if they were
    not written down.
    """
    rows = study.table("removals")
    if rows is None or "key_list" not in rows:
        return np.zeros((4, 0), int)
    rows = rows[rows["sample"] == sample.index].explode("key_list").dropna(subset="key_list")
    # under guidance the first of two forwards a step was watched
    step = rows["forward"] / (2 if study.run.info.settings.get("cfg_scale") else 1)
    axes = ((study.layers, rows["layer"]), (study.heads, rows["head"]), (steps, step))
    places = [pd.Index(there).get_indexer(numbers) for there, numbers in axes]
    found_4N = np.array([*places, rows["key_list"].astype(int)])
    return found_4N[:, (found_4N >= 0).all(0)]


def _add_hidden(content: dict[str, Any], study: Study, sample: Sample, room: float) -> None:
    """Keys that the run's edits blocked in each head, if they fit: 1 + their numbers, rising,
    padded with 0.
    """
    *place_3N, key_N = _blocked_keys(study, sample, content["steps"])
    if not len(key_N):
        return
    shape = (len(study.layers), len(study.heads), len(content["steps"]))
    cells = np.ravel_multi_index(place_3N, shape)
    # edits may take the same key
    cells, keys = np.divmod(np.unique(cells * content["keys"] + key_N), content["keys"])
    number = np.arange(len(cells)) - np.searchsorted(cells, cells)
    most = int(number.max()) + 1
    blocked = np.zeros((math.prod(shape), most), np.uint16)
    blocked[cells, number] = keys + 1
    packed = pack(blocked)
    if size(packed) <= room:
        content["arrays"]["blocked"], content["blocked"] = packed, most
    else:
        content["left_out"] = True


def _add_heads(content: dict[str, Any], sample: Sample, room: int) -> None:
    """Every head's map; if it does not fit, what is above a floor, which rises until it does."""
    keep = slice(None, None, content["stride"])
    scale = LogScale(content["scale"]["low"], content["scale"]["high"])
    scores_LHTK = np.ascontiguousarray(sample.score_TLHK[keep].transpose(1, 2, 0, 3))
    none_LHTK = np.where(np.isnan(scores_LHTK), np.uint8(ABSENT), np.uint8(BELOW))
    packed, floor = {}, 0.0
    # deflate has never made a tenth of whole maps, and takes two characters for a key apart
    floors = 2 ** np.arange(0, scale.high + 0.5, 0.5)
    for floor, most in [(0.0, 4.0), *((one, 0.5) for one in floors)]:
        is_above = scores_LHTK > floor
        if np.count_nonzero(is_above) > most * max(room, 1):
            continue
        codes = none_LHTK.copy()
        codes[is_above] = scale.encode(scores_LHTK[is_above])
        packed = pack(codes, codes.shape[-1])
        if size(packed) <= room:
            break
    content["arrays"]["heads"] = packed
    content["floor"] = float(floor)


def facts_of(study: Study) -> dict[str, Any]:
    """Facts of one run for the explorer, beside the arrays of its samples."""
    about: dict[str, Any] = {
        "label": study.label,
        "family": study.run.info.model.get("family", "diffusion"),
        "added": study.sink_count,
    }
    edits = study.run.info.settings.get("edits", ())
    ways = ("zeroed in" if "zero_value" in edit else "blocked in" for edit in edits)
    about["removal"] = " or ".join(sorted(set(ways))) or "blocked in"
    if not study.layers:
        return about | {"layers": [], "heads": [], "head_maps": [], "first_layer": 0}
    weight_LH = study.measured.main_share_LH
    # A head without sinks has no motion; its mean over samples is that of the samples in which it
    # has some.
    means = study.measured.motions.groupby(["layer", "head"])["mobility"].mean().unstack()
    mobility_LH = means.reindex(index=study.layers, columns=study.heads).to_numpy()
    return about | {
        "layers": study.layers,
        "heads": study.heads,
        # The page opens on the layer in which heads attend most to one key.
        "first_layer": int(np.nan_to_num(weight_LH).mean(1).argmax()),
        "head_maps": head_maps(100 * weight_LH, mobility_LH),
    }


def head_maps(weight_LH: np.ndarray, mobility_LH: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Numbers per layer and head, as the analysis paper's Fig. 5: weight on the main sink (%), and
    how mobile it is.
    """
    known = weight_LH[np.isfinite(weight_LH) & (weight_LH > 0)].tolist() or [0.5, 1.0]
    low, high = min(known), max(known)
    if low == high:
        low, high = low / 2, low * 2
    about = "Mean weight on the main sink of the head"
    maps: list[dict[str, Any]] = [{"name": "weight", "about": about, "unit": " %", "log": True}]
    maps[0] |= {"low": low, "high": high, "values": listed(weight_LH)}
    if mobility_LH is not None and np.isfinite(mobility_LH).any():
        about = "Chance that two steps have their main sink at different places: 0 static, 1 moving"
        maps.append({"name": "motion", "about": about, "unit": "", "log": False})
        maps[1] |= {"low": 0, "high": 1, "values": listed(mobility_LH)}
    return maps


def listed(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON has them: a few digits, null in place of NaN."""
    numbers = values.ravel().tolist()
    return [float(f"{one:.5g}") if math.isfinite(one) else None for one in numbers]


# In the order they are put together: a later file may use an earlier one.
SCRIPTS = (
    "data",
    "colours",
    "text",
    "app",
    "player",
    "readout",
    "heatmap",
    "heads",
    "pane",
    "controls",
    "main",
)


@lru_cache(maxsize=2)
def script(beginning: str = "") -> str:
    """All scripts as one, in a scope of its own. `beginning`: code in the place of the last, which
    begins.
    """
    parts = [asset(f"assets/{name}.js").strip() for name in SCRIPTS]
    parts[-1] = beginning.strip() or parts[-1]
    return '(() => {\n"use strict";\n' + "\n\n".join(parts) + "\n})();\n"


def script_hash() -> str:
    """Hash of the only script that the page's Content-Security-Policy allows to run."""
    return base64.b64encode(hashlib.sha256(script().encode("utf-8")).digest()).decode("ascii")


def payload(studies: Sequence[Study], budget: int = BUDGET) -> dict[str, Any]:
    """Everything the script draws, as JSON values. ``budget``: characters for the arrays of each
    run.
    """
    palette = {name: theme.scale for name, theme in THEMES.items()}
    return {
        "palette": palette,
        "runs": [facts_of(study) | arrays_of(study, budget) for study in studies],
    }


def data_block(content: dict[str, Any]) -> str:
    """A block that no browser runs or reads as markup: "<" is written as an escape."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    return f'<script type="application/json" id="payload">{text}</script>'
