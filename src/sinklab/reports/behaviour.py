"""Sentences on how sinks move, what splits them, what explains them, and what was taken away."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sinklab.sinks import Enrichment, MotionSummary

from .study import ADDED, Study
from .wording import number, percent, same, times_chance

# A class with fewer places or events than this share is too rare to speak of.
RARE = 0.01
# Shares of variance closer than this are called alike.
ALIKE = 0.05


def about_path(study: Study) -> str:
    """How often the greatest key changes place, and whose it is."""
    pairs = sum(facts.transitions for facts in study.facts)
    if not pairs:
        return f"{study.label} has a single step, so nothing can move."
    moves = sum(facts.moves for facts in study.facts) / pairs
    text = (
        f"In {study.label}, the main sink of a head (whatever receives most) changes place at {percent(moves)} of steps"
    )
    if not study.sink_count:
        return f"{text}."
    added = sum(facts.added_mains for facts in study.facts) / sum(facts.mains for facts in study.facts)
    among_text = sum(facts.text_moves for facts in study.facts) / pairs
    return (
        f"{text}; the added sink is that main sink in {percent(added)} of cases. "
        f"Among text positions alone, the greatest changes place at {percent(among_text)} of steps."
    )


def about_motion(study: Study) -> str:
    """Static or moving, how long a sink lasts, and where the main sinks drift."""
    motion = study.motion
    if motion is None or math.isnan(motion.mobility):
        return f"No head of {study.label} has a sink at two steps, so there is no motion to speak of."
    word = "partly moving" if motion.word == "mixed" else motion.word
    text = (
        f"The sinks of {study.label} are {word}: at two steps taken at random, a head has its main sink at different "
        f"places with a chance of {percent(motion.mobility)} (0 is static)"
    )
    lasts = motion.expected_lifetime
    if math.isinf(lasts):
        text += "; no sink ended while it was watched"
    elif not math.isnan(lasts):
        text += f"; a key stays a sink for {number(lasts)} steps"
    text += f"{_drift(motion, in_text=bool(study.sink_count))}."
    if study.text_motion is None or math.isnan(study.text_motion.mobility):
        return text
    return f"{text} Among text positions alone that chance is {percent(study.text_motion.mobility)}."


def _drift(motion: MotionSummary, *, in_text: bool) -> str:
    # An added sink has no place on the canvas: the drift is that of the others.
    which = "main sinks in the text" if in_text else "main sinks"
    if math.isnan(motion.drift):
        return ""
    if motion.drift_word == "neither":
        return "; no drift to the left or right that stands out of the error"
    return (
        f"; the {which} drift to the {motion.drift_word}, by {percent(abs(motion.drift_relative))} of the text from "
        "the first step to the last"
    )


def about_depth(study: Study) -> str:
    """Whether the number of sinks rises or falls from the first layer to the last."""
    counted = study.measured.layer_sinks
    if counted is None or not counted.sinks.any() or len(study.layers) < 2:
        return ""
    first, last = float(counted.number[0]), float(counted.number[-1])
    span = f"from {number(first)} in layer {study.layers[0]} to {number(last)} in layer {study.layers[-1]}"
    if abs(counted.trend) <= 0.1 * float(np.nanmean(counted.number)):
        return f"In {study.label}, a head has about as many sinks in all layers ({span})."
    way = "rises" if counted.trend > 0 else "falls"
    return f"In {study.label}, the number of sinks of a head {way} over depth, {span}."


def about_blocks(study: Study) -> str:
    """Moves at block borders against those inside blocks; empty without a border."""
    blocks = study.measured.blocks
    border = sum(effect.border_pairs for effect in blocks)
    inside = sum(effect.inside_pairs for effect in blocks)
    if not border or not inside:
        return ""
    moved = [sum(getattr(effect, name) for effect in blocks) for name in ("border_moves", "inside_moves")]
    return (
        f"In {study.label}, main sinks move at {percent(moved[0] / border)} of steps into a new block ({border:,} "
        f"cases, a head at a border each) and at {percent(moved[1] / inside)} of steps inside a block."
    )


def about_split(study: Study) -> str:
    """How often masked and other queries look at different sinks; empty where that was not recorded."""
    split = study.measured.split
    if split is None or math.isnan(split.share):
        return ""
    return (
        f"In {study.label}, masked and unmasked queries of a head have different main sinks in {percent(split.share)} "
        "of the cases in which both have one."
    )


def about_explained(study: Study) -> str:
    """Semantic or positional; empty without tokens."""
    explained = study.explained
    if explained is None or math.isnan(explained.by_class) or math.isnan(explained.by_position):
        return ""
    semantic, positional = max(explained.by_class, 0.0), max(explained.by_position, 0.0)
    if abs(semantic - positional) <= ALIKE:
        verdict = "about alike"
    else:
        verdict = "sinks are rather semantic" if semantic > positional else "sinks are rather positional"
    masks = " (masks are one)" if "mask" in explained.labels else ""
    return (
        f"In {study.label}, the class of a token{masks} explains {percent(semantic)} of the variance of "
        f"received attention, its position {percent(positional)}: {verdict}."
    )


def about_classes(study: Study) -> str:
    """Which class of tokens and which age is a sink more often than its share of the canvas; empty without tokens."""
    parts = [_richest(found, what) for found, what in ((study.classes, "of class"), (study.ages, "that are"))]
    parts = [part for part in parts if part]
    return f"In {study.label}, sinks favour {' and '.join(parts)}." if parts else ""


def _richest(found: Enrichment | None, what: str) -> str:
    if found is None or not found.events.any():
        return ""
    text = [
        row
        for row, label in enumerate(found.label)
        if label not in (ADDED, "sink") and min(found.frequency[row], found.occupancy[row]) >= RARE
    ]
    if not text:
        return ""
    row = max(text, key=lambda row: float(found.enrichment[row]))
    if same(float(found.enrichment[row]), 1) or found.enrichment[row] < 1:
        return ""
    return (
        f"tokens {what} {found.label[row]} ({percent(found.frequency[row])} of sinks, "
        f"{percent(found.occupancy[row])} of positions: {times_chance(float(found.enrichment[row]))})"
    )


def about_removals(study: Study) -> list[str]:
    """What the edits of the run took away, a sentence each; empty for a run without edits."""
    frame = study.removals
    if frame is None:
        return []
    sentences = []
    for edit, rows in frame.groupby("edit", sort=False):
        text = (
            f"In {study.label}, {edit} took {number(float(rows['removed'].mean()))} keys from a head in every forward"
        )
        held, taken = _mean(rows, "mass"), _mean(rows, "realised")
        if not math.isnan(held):
            text += f"; they had held {percent(held)} of its attention when they were chosen"
        if not math.isnan(taken):
            text += f"; {percent(taken)} was really taken away"
        overlap = _mean(rows, "overlap")
        if not math.isnan(overlap):
            text += f"; from one step to the next the choice overlaps by {percent(overlap)}"
        sentences.append(f"{text}.")
    return sentences


def _mean(rows: pd.DataFrame, name: str) -> float:
    return float(rows[name].mean()) if name in rows and rows[name].notna().any() else math.nan
