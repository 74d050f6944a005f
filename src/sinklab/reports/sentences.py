"""Plain sentences computed from the numbers, whichever way these fall. The first of each group is its headline."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sinklab.analysis.tokens import Enrichment
from sinklab.analysis.trends import MotionSummary
from sinklab.reports.printed import number, percent, quoted, same, times_chance
from sinklab.reports.study import ADDED, MASK, Study

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


__all__ = [
    "about_blocks", "about_classes", "about_depth", "about_events", "about_explained", "about_heldout", "about_motion",
    "about_norms", "about_path", "about_removals", "about_share", "about_split", "about_tokens", "in_short",
    "mean_over_layers", "number", "percent", "without_and_with",
]  # fmt: skip


def about_events(study: Study) -> str:
    """How often the sink rule fires."""
    events = sum(facts.events for facts in study.facts)
    rule = "the sink rule (received attention above 1 + 3 (S−1)/S)"
    if not events:
        return f"In {study.label}, no position in any layer, head or step exceeds {rule}."
    added = sum(facts.added_events for facts in study.facts)
    text = f"In {study.label}, {rule} fires {events:,} times over all layers, heads, steps and samples"
    return text + (f"; {percent(added / events)} of these are the added sink." if study.sink_count else ".")


def about_share(studies: list[Study]) -> list[str]:
    """Attention on the added sink, and on the greatest text position with and without it."""
    sentences = []
    for study in studies:
        text = mean_over_layers(study, "text_share")
        if not study.sink_count:
            sentences.append(
                f"In {study.label}, which has no added sink, the greatest text position of a head receives "
                f"{percent(text)} of the attention on average."
            )
            continue
        shares = np.array([facts.added_share for facts in study.facts])
        low, high = (study.layers[int(place)] for place in (shares.argmin(), shares.argmax()))
        what = "the added sink receives" if study.sink_count == 1 else f"the {study.sink_count} added sinks receive"
        sentences.append(
            f"In {study.label}, {what} {percent(mean_over_layers(study, 'added_share'))} of the attention on average, "
            f"from {percent(shares.min())} in layer {low} to {percent(shares.max())} in layer {high}; "
            f"the greatest text position receives {percent(text)}."
        )
    pair = without_and_with(studies)
    if pair:
        before, after = (mean_over_layers(study, "text_share") for study in pair)
        sentences.append(
            f"The greatest text position receives {_against(after, before, 'more', 'less')} with the added sink "
            f"than without: {percent(after)} against {percent(before)}."
            if not same(after, before)
            else f"The greatest text position receives about as much with the added sink ({percent(after)}) "
            f"as without ({percent(before)})."
        )
    return sentences


def about_norms(study: Study) -> list[str]:
    """Length of value vectors of sinks against other text, averaged over layers."""
    layers = [facts for facts in study.facts if not math.isnan(facts.text_norm)]
    if not layers:
        return []
    sentences = []
    if study.sink_count:
        added, text = (mean_over_layers(study, key) for key in ("added_norm", "text_norm"))
        lower = sum(facts.added_norm < facts.text_norm for facts in layers)
        sentences.append(
            f"In {study.label}, value vectors of the added sink are {number(added)} long on average, those of text "
            f"{number(text)}; the added sink's are shorter in {lower} of {len(layers)} layers."
        )
    both = [facts for facts in layers if not math.isnan(facts.sink_norm) and not math.isnan(facts.rest_norm)]
    if not both:
        return [
            *sentences,
            f"No text position of {study.label} is a sink, so there is nothing to compare with other text.",
        ]
    sinks, rest = (float(np.mean([getattr(facts, key) for facts in both])) for key in ("sink_norm", "rest_norm"))
    lower = sum(facts.sink_norm < facts.rest_norm for facts in both)
    where = f"In {study.label}, text" if not sentences else "Text"
    sentences.append(
        f"{where} positions that are sinks have value vectors {number(sinks)} long, other text {number(rest)}; "
        f"shorter in {lower} of the {len(both)} layers that have such sinks."
    )
    return sentences


def about_tokens(study: Study) -> str:
    """Which token is most often a sink, and whether it is so more than its occupancy explains."""
    found = study.sink_tokens
    if found is None or not found.events.any():
        return f"{study.label} has no sink events to count tokens of."
    names = [quoted(label) for label in found.label]
    text = (
        f"In {study.label}, {percent(found.frequency[0])} of sink events fall on {names[0]}, which holds "
        f"{percent(found.occupancy[0])} of positions (enrichment {number(found.enrichment[0], 2)}×)"
    )
    masks = found.label.index(MASK) if MASK in found.label else None
    if masks is None or masks == 0:
        return f"{text}."
    relation = times_chance(found.enrichment[masks])
    return (
        f"{text}. Masks take {percent(found.frequency[masks])} of sink events and hold "
        f"{percent(found.occupancy[masks])} of positions: {relation}."
    )


def about_heldout(study: Study) -> list[str]:
    """Loss with nothing hidden, and what hiding the most sinks changes against as many random columns."""
    frame = study.heldout
    if frame is None:
        return []
    base = frame[frame["k"] == 0]
    sentences = []
    if len(base):
        row = base.iloc[0]
        bits = row.get("bits_per_byte", math.nan)
        tail = "" if pd.isna(bits) else f", {number(float(bits))} bits per byte"
        sentences.append(f"{study.label} scores {number(row['loss'])} nats per token on held-out text{tail}.")
    hidden = frame[frame["control"] == "sinks"].sort_values("k")
    if hidden.empty:
        return sentences
    row = hidden.iloc[-1]
    text = f"Hiding the {int(row['k'])} greatest sinks per layer and head"
    text = f"{text} changes the loss of {study.label} by {_change(row)}"
    control = frame[(frame["control"] == "random") & (frame["k"] == row["k"])]
    if control.empty:
        return [*sentences, f"{text}."]
    other = control.iloc[0]
    gap = row["loss"] - other["loss"]
    error = math.hypot(row["delta_stderr"], other["delta_stderr"])
    if math.isnan(gap) or math.isnan(error):
        verdict = "no standard error is at hand to compare them"
    elif abs(gap) <= 2 * error:
        verdict = "the two do not differ by more than two standard errors"
    else:
        verdict = f"sinks matter {'more' if gap > 0 else 'less'} than random columns here"
    return [*sentences, f"{text}; hiding as many random columns, by {_change(other)}: {verdict}."]


def in_short(studies: list[Study]) -> list[str]:
    """The findings that open the page: those of runs with an added sink, where there are any, and the comparison."""
    recorded = [study for study in studies if study.layers]
    added = [study for study in recorded if study.sink_count]
    # What a run without a sink says of its share is repeated by the comparison.
    short = [text for text in about_share(recorded) if not (added and "which has no added sink" in text)]
    short += [about_motion(study) for study in recorded]
    short += [text for study in recorded for text in (about_classes(study), about_explained(study)) if text]
    short += [text for study in added or recorded for text in about_norms(study)[:1]]
    short += [text for study in studies for text in about_removals(study)]
    return short + [text for study in studies for text in about_heldout(study)[-1:]]


def without_and_with(studies: list[Study]) -> tuple[Study, Study] | None:
    """The first run without an added sink and the first with one, if both are there."""
    recorded = [study for study in studies if study.layers]
    plain = next((study for study in recorded if not study.sink_count), None)
    added = next((study for study in recorded if study.sink_count), None)
    return (plain, added) if plain and added else None


def mean_over_layers(study: Study, name: str) -> float:
    """Mean of a field of the LayerFacts over the recorded layers that have it; NaN when none has."""
    values = np.array([getattr(facts, name) for facts in study.facts], dtype=float)
    return float(values[~np.isnan(values)].mean()) if (~np.isnan(values)).any() else math.nan


def _against(one: float, other: float, more: str, less: str) -> str:
    return more if one > other else less


def _change(row: pd.Series) -> str:
    value = number(row["delta"])
    sign = "+" if row["delta"] > 0 else ""
    return f"{sign}{value} ± {number(row['delta_stderr'], 2)} nats"
