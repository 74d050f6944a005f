"""Two runs side by side in numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from sinklab.records.reading import Run
from sinklab.reports.runs import as_studies
from sinklab.reports.samples import MASK
from sinklab.reports.study import Study

TEXT_SINK = "greatest text sink"


def compare(a: Run | Study, b: Run | Study) -> pd.DataFrame:
    """Measures of two runs: columns measure, the labels of the runs, difference (second less first).

    Shares are in percent. A measure that neither run has is left out; one that a run lacks is NaN. The last rows say
    how far the texts agree for prompts that both runs have: the share of tokens (of runs of the same weights) or of
    words that stand at the same place.
    """
    one, other = as_studies([a, b])
    frame = pd.concat([pd.Series(measures(study), name=study.label) for study in (one, other)], axis=1)
    frame = frame.dropna(how="all")
    if not (one.sink_count or other.sink_count):
        frame = frame[[TEXT_SINK not in name for name in frame.index]]
    common, agreement = text_agreement(one, other)
    if common:
        named = "tokens" if _same_weights(one, other) else "words"
        frame.loc["prompts that both runs have"] = common
        frame.loc[f"{named} that stand at the same place in both, %"] = [math.nan, 100 * agreement]
    return frame.assign(difference=frame.iloc[:, 1] - frame.iloc[:, 0]).rename_axis("measure").reset_index()


def measures(study: Study) -> dict[str, float]:
    """The numbers that runs are compared by, name -> value; NaN for what the run did not record."""
    found: dict[str, float] = {"samples": float(len(study.samples))}
    if study.layers:
        found |= _sinks(study) | _motion(study) | _tokens(study)
    return found | _losses(study)


def _sinks(study: Study) -> dict[str, float]:
    measured: Any = study.measured
    means = study.over("layer").mean(numeric_only=True)
    split = measured.split.share if measured.split is not None else math.nan
    return {
        "tokens that are no sinks at ε = 3, %": 100 * study.curve.at(3.0),
        "sinks per head and step": means["sinks"],
        "heads with a sink, %": 100 * measured.rules[0].rate,
        "attention on sinks, %": 100 * means["absorbed"],
        "attention on the added sink, %": 100 * means["added_share"],
        "attention on the greatest text position, %": 100 * means["text_share"],
        "value norm, added sink over other text": means["added_norm"] / means["rest_norm"],
        "value norm, text sinks over other text": means["sink_norm"] / means["rest_norm"],
        "heads with split sinks, %": 100 * split,
        "change of sinks per head from first to last layer": measured.layer_sinks.trend,
    }


def _motion(study: Study) -> dict[str, float]:
    found: dict[str, float] = {}
    # without an added sink every sink is one on text
    for motion, what in ((study.motion, "main sink"), (study.text_motion or study.motion, TEXT_SINK)):
        found |= {
            f"mobility of the {what} (0 static, 1 moving)": motion.mobility,
            f"moves of the {what}, % of steps at which it is a sink": 100 * motion.moves_per_step,
            f"drift of the {what}, % of the text from first to last step": 100 * motion.drift_relative,
        }
    found["overlap of sinks with those of the next step, %"] = 100 * study.over("step")["overlap"].mean()
    blocks = study.measured.blocks
    for name, what in (("border", "at block borders"), ("inside", "inside blocks")):
        moves, pairs = (sum(getattr(effect, f"{name}_{key}") for effect in blocks) for key in ("moves", "pairs"))
        found[f"moves of the main sink {what}, % of steps"] = 100 * moves / pairs if pairs else math.nan
    return found


def _tokens(study: Study) -> dict[str, float]:
    found: dict[str, float] = {}
    tokens, explained = study.sink_tokens, study.explained
    if tokens is not None and tokens.events.any() and MASK in tokens.label:
        row = tokens.label.index(MASK)
        found["sinks that are masks, %"] = 100 * tokens.frequency[row]
        found["enrichment of masks among sinks"] = float(tokens.enrichment[row])
    if explained is not None:
        found["attention explained by class of token, %"] = 100 * explained.by_class.value
        found["attention explained by position, %"] = 100 * explained.by_position.value
    return found


def _losses(study: Study) -> dict[str, float]:
    frame = study.heldout
    if frame is None:
        return {}
    base = frame[frame["k"] == 0]
    found = {"held-out loss, nothing hidden": float(base["loss"].iloc[0])} if len(base) else {}
    for _, row in frame[frame["k"] > 0].iterrows():
        what = "greatest sinks" if row["control"] == "sinks" else f"{row['control']} columns"
        found[f"change of held-out loss, {int(row['k'])} {what} hidden"] = float(row["delta"])
    return found


def text_agreement(one: Study, other: Study) -> tuple[int, float]:
    """Number of prompts that both runs have, and the share of tokens or words at the same place in their texts."""
    if one.generations is None or other.generations is None:
        return 0, math.nan
    column = "token_ids" if _same_weights(one, other) else "completion"
    texts = pd.concat([_texts(study.generations, column) for study in (one, other)], axis=1, join="inner")
    shares = []
    for left, right in texts.itertuples(index=False):
        same = sum(x == y for x, y in zip(left, right, strict=False))
        shares.append(same / max(len(left), len(right), 1) if len(left) or len(right) else 1.0)
    return len(shares), float(np.mean(shares)) if shares else math.nan


def _texts(frame: pd.DataFrame, column: str) -> pd.Series:
    """Texts as lists by prompt and by how many times it came before, runs with extra hidden sinks left out."""
    if "masked_sinks" in frame:
        frame = frame[frame["masked_sinks"] == 0]
    frame = frame.sort_values("sample", kind="stable").assign(prompt=lambda table: table["prompt"].fillna("").map(str))
    words = frame[column] if column == "token_ids" else frame[column].map(lambda text: str(text).split())
    return words.set_axis([frame["prompt"], frame.groupby("prompt").cumcount()])


def _same_weights(one: Study, other: Study) -> bool:
    """Whether ids mean the same tokens: the weights are the same, and both runs kept ids."""
    hashes = [study.run.info.model.get("weights_sha256") for study in (one, other)]
    kept = all(study.generations is not None and "token_ids" in study.generations for study in (one, other))
    return kept and hashes[0] is not None and hashes[0] == hashes[1]
