"""Plain sentences computed from the numbers, whichever way these fall. The first of each group is its headline."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from .behaviour import (
    about_blocks,
    about_classes,
    about_depth,
    about_explained,
    about_motion,
    about_path,
    about_removals,
    about_split,
)
from .study import MASK, Study
from .wording import number, percent, quoted, same, times_chance

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
