"""Plain sentences computed from the numbers, whichever way these fall. The first of each group is its headline."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from .study import ADDED, MASK, Study, mean_of
from .style import printable

# Relative differences below this are called "about the same".
SAME = 0.05


def number(value: float, significant: int = 3) -> str:
    """A few significant digits, without an exponent where that reads well."""
    if math.isnan(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 0 if value == 0 else max(0, significant - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}".replace("-", "−")
    return f"{value:.{significant - 1}e}".replace("-", "−")


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return "–" if math.isnan(share) else f"{100 * share:.1f}\u00a0%"


def about_events(study: Study) -> str:
    """How often the sink rule fires."""
    events = sum(int(facts.events_NTK.sum()) for facts in study.layers)
    rule = "the sink rule (received attention above 1 + 3 (S−1)/S)"
    if not events:
        return f"In {study.label}, no position in any layer, head or step exceeds {rule}."
    added = sum(int(facts.events_NTK[..., : study.sink_count].sum()) for facts in study.layers)
    text = f"In {study.label}, {rule} fires {events:,} times over all layers, heads, steps and samples"
    return text + (f"; {percent(added / events)} of these are the added sink." if study.sink_count else ".")


def about_path(study: Study) -> str:
    """How often the greatest key changes place, and whose it is."""
    pairs = sum(facts.transitions for facts in study.layers)
    if not pairs:
        return f"{study.label} has a single step, so nothing can move."
    moves = sum(facts.moves for facts in study.layers) / pairs
    text = f"In {study.label}, the main sink of a head changes place at {percent(moves)} of steps"
    if not study.sink_count:
        return f"{text}."
    mains = np.concatenate([facts.main_NTH.ravel() for facts in study.layers])
    added = float((mains[mains >= 0] < study.sink_count).mean())
    among_text = sum(facts.text_moves for facts in study.layers) / pairs
    return (
        f"{text}; the added sink is that main sink in {percent(added)} of cases. "
        f"Among text positions alone, the greatest changes place at {percent(among_text)} of steps."
    )


def about_share(studies: list[Study]) -> list[str]:
    """Attention on the added sink, and on the greatest text position with and without it."""
    sentences = []
    for study in studies:
        text = mean_of(np.array([facts.text_share for facts in study.layers]))
        if not study.sink_count:
            sentences.append(
                f"In {study.label}, which has no added sink, the greatest text position of a head receives "
                f"{percent(text)} of the attention on average."
            )
            continue
        shares = np.array([facts.added_share for facts in study.layers])
        low, high = int(shares.argmin()), int(shares.argmax())
        what = "the added sink receives" if study.sink_count == 1 else f"the {study.sink_count} added sinks receive"
        sentences.append(
            f"In {study.label}, {what} {percent(mean_of(shares))} of the attention on average, from "
            f"{percent(shares[low])} in layer {low} to {percent(shares[high])} in layer {high}; "
            f"the greatest text position receives {percent(text)}."
        )
    pair = without_and_with(studies)
    if pair:
        before, after = (mean_of(np.array([facts.text_share for facts in study.layers])) for study in pair)
        sentences.append(
            f"The greatest text position receives {_against(after, before, 'more', 'less')} with the added sink "
            f"than without: {percent(after)} against {percent(before)}."
            if not _same(after, before)
            else f"The greatest text position receives about as much with the added sink ({percent(after)}) "
            f"as without ({percent(before)})."
        )
    return sentences


def about_norms(study: Study) -> list[str]:
    """Length of value vectors of sinks against other text, averaged over layers."""
    layers = study.layers
    sentences = []
    if study.sink_count:
        added, text = (
            mean_of(np.array([getattr(facts, key) for facts in layers])) for key in ("added_norm", "text_norm")
        )
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
    sinks, rest = (mean_of(np.array([getattr(facts, key) for facts in both])) for key in ("sink_norm", "rest_norm"))
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
    names = [_quoted(label) for label in found.label]
    text = (
        f"In {study.label}, {percent(found.frequency[0])} of sink events fall on {names[0]}, which holds "
        f"{percent(found.occupancy[0])} of positions (enrichment {number(found.enrichment[0], 2)}×)"
    )
    masks = found.label.index(MASK) if MASK in found.label else None
    if masks is None or masks == 0:
        return f"{text}."
    relation = _relation(found.enrichment[masks])
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
    short += [about_path(study) for study in recorded]
    short += [text for study in added or recorded for text in about_norms(study)[:1]]
    return short + [text for study in studies for text in about_heldout(study)[-1:]]


def without_and_with(studies: list[Study]) -> tuple[Study, Study] | None:
    """The first run without an added sink and the first with one, if both are there."""
    recorded = [study for study in studies if study.layers]
    plain = next((study for study in recorded if not study.sink_count), None)
    added = next((study for study in recorded if study.sink_count), None)
    return (plain, added) if plain and added else None


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _against(one: float, other: float, more: str, less: str) -> str:
    return more if one > other else less


def _relation(enrichment: float) -> str:
    if _same(enrichment, 1):
        return "about what chance would give"
    return f"{number(enrichment, 2)} times what chance would give"


def _change(row: pd.Series) -> str:
    value = number(row["delta"])
    sign = "+" if row["delta"] > 0 else ""
    return f"{sign}{value} ± {number(row['delta_stderr'], 2)} nats"


def _quoted(label: str) -> str:
    return f"the {ADDED}" if label == ADDED else "[MASK]" if label == MASK else printable(label)
