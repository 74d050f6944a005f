"""From run folders to report.html: every figure, its sentence and its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from sinklab.records import Run, write_beside

from . import sentences as say
from .figures import greatest_norm, heldout_loss, sink_share, sink_tokens, value_norms
from .gallery import Gallery
from .maps import greatest_received, received_maps, shown_layers, sink_path
from .page import Section, beside, number_table, page, run_facts
from .sentences import number, percent
from .study import Study, as_studies
from .style import printable
from .text import generations


def report(runs: Iterable[Run] | Run, out: str | Path) -> Path:
    """Write ``report.html`` (one file that loads nothing) and its figures as PNG files into the folder ``out``.

    Several runs are shown side by side in the order given. What a run did not get to write is left out and said so.
    Returns the path of report.html. Raises ValueError when there is no run, or one is not a study.
    """
    studies = as_studies(runs)
    gallery = Gallery()
    recorded = [study for study in studies if study.layers]
    sections = [_what(studies)]
    if recorded:
        sections += [_share(recorded, gallery), _maps(recorded, gallery), _paths(recorded, gallery)]
        sections += [_norms(recorded, gallery)]
        if any(study.sink_tokens is not None for study in recorded):
            sections.append(_tokens([study for study in recorded if study.sink_tokens is not None], gallery))
    if any(study.heldout is not None for study in studies):
        sections.append(_heldout([study for study in studies if study.heldout is not None], gallery))
    sections.append(_text(studies))
    # What was run closes the page: the findings are what a reader comes for.
    sections = [*sections[1:], sections[0]]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    gallery.save(folder)
    target = folder / "report.html"
    text = page(studies, say.in_short(studies), sections)
    write_beside(target, lambda part: part.write_bytes(text.encode("utf-8")))
    return target


def summary(runs: Iterable[Run] | Run) -> list[str]:
    """The findings that open the page, a sentence each. Raises ValueError without a run, or one that is no study."""
    return list(say.in_short(as_studies(runs)))


def _what(studies: list[Study]) -> Section:
    return Section("runs", "What was run", "", beside([run_facts(study) for study in studies]))


def _share(studies: list[Study], gallery: Gallery) -> Section:
    picture = gallery.draw("sink-share", "Share of attention per layer", lambda theme: sink_share(studies, theme=theme))
    head = ["layer", *(f"{study.label}: {what}" for study in studies for what in ("added sink", "greatest text"))]
    rows = [
        [layer, *(percent(share) for study in studies for share in _shares(study, layer))]
        for layer in range(max(len(study.layers) for study in studies))
    ]
    return Section(
        "share",
        "How much attention sinks take",
        "Mean attention weight over all queries, heads, steps and samples. The greatest text position is looked up "
        "anew for every head and step.",
        picture.html(),
        say.about_share(studies),
        number_table(head, rows),
        single=True,
    )


def _shares(study: Study, layer: int) -> tuple[float, float]:
    if layer >= len(study.layers):
        return float("nan"), float("nan")
    return study.layers[layer].added_share, study.layers[layer].text_share


def _maps(studies: list[Study], gallery: Gallery) -> Section:
    top = max(greatest_received(study) for study in studies)
    body = gallery.each(studies, "received", "Heat map of received attention, position by step",
        lambda study, theme: received_maps(study, top=top, theme=theme),
    )  # fmt: skip
    left_out = [study for study in studies if len(shown_layers(study)) < len(study.layers)]
    note = "".join(f" {study.label}: {len(shown_layers(study))} of {len(study.layers)} layers." for study in left_out)
    return Section(
        "received",
        "Received attention, position by step",
        "Sum over all queries of the attention a position receives, mean over heads, first sample; 1× is an even "
        f"share. Steps run downwards. The scale is logarithmic and the same for all maps.{note}",
        body,
        [say.about_events(study) for study in studies],
    )


def _paths(studies: list[Study], gallery: Gallery) -> Section:
    body = gallery.each(studies, "sink-path", "Position of the main sink over steps",
        lambda study, theme: sink_path(study, theme=theme),
    )  # fmt: skip
    return Section(
        "path",
        "Where the main sink is",
        "The position that receives most, for every layer and head of the first sample. The larger the dot, the more "
        "heads; the colour says what the position held at that step.",
        body,
        [say.about_path(study) for study in studies],
    )


def _norms(studies: list[Study], gallery: Gallery) -> Section:
    top = 1.08 * max(greatest_norm(study) for study in studies) or 1.0
    body = gallery.each(studies, "value-norms", "Length of value vectors per layer",
        lambda study, theme: value_norms(study, top=top, theme=theme),
    )  # fmt: skip
    kinds = {"added_norm": "added sink", "sink_norm": "text sinks", "rest_norm": "other text"}
    head = ["layer", *(f"{study.label}: {kind}" for study in studies for kind in kinds.values())]
    rows = [
        [layer, *(number(getattr(study.layers[layer], key)) for study in studies for key in kinds)]
        for layer in range(min(len(study.layers) for study in studies))
    ]
    return Section(
        "norms",
        "What sinks carry",
        "L2 norm of value vectors, mean over heads. Text sinks are positions above the sink rule, counted once for "
        "each head that has a sink there.",
        body,
        [sentence for study in studies for sentence in say.about_norms(study)],
        number_table(head, rows),
    )


def _tokens(studies: list[Study], gallery: Gallery) -> Section:
    body = gallery.each(studies, "sink-tokens", "Tokens that are sinks most often",
        lambda study, theme: sink_tokens(study, theme=theme),
    )  # fmt: skip
    tables = []
    for study in studies:
        found = study.sink_tokens
        if found is None:
            continue
        columns = (found.label, found.events, found.frequency, found.occupancy, found.enrichment)
        rows = [
            (printable(label, 40), f"{events:,.0f}", percent(often), percent(there), f"{number(ratio)}×")
            for label, events, often, there, ratio in list(zip(*columns, strict=True))[:20]
        ]
        tables.append(
            number_table(["token", "events", "frequency", "occupancy", "enrichment"], rows, f"{study.label}: numbers")
        )
    return Section(
        "tokens",
        "Which tokens are sinks",
        "Frequency counts sink events; occupancy counts how often the token stands anywhere on the canvas. Enrichment "
        "is their ratio: 1× is what chance would give.",
        body,
        [say.about_tokens(study) for study in studies],
        beside(tables),
    )


def _heldout(studies: list[Study], gallery: Gallery) -> Section:
    picture = gallery.draw(
        "heldout", "Change of held-out loss over hidden sinks", lambda theme: heldout_loss(studies, theme=theme)
    )
    rows = [
        (
            study.label,
            int(row["k"]),
            row["control"],
            *(number(row[key]) for key in ("loss", "stderr", "delta", "delta_stderr")),
        )
        for study in studies
        if study.heldout is not None
        for row in study.heldout.to_dict("records")
    ]
    return Section(
        "heldout",
        "What hiding sinks costs",
        "Change of the loss on held-out text when the K columns that receive most are hidden from every query of a "
        "head, and when as many random others are. Same text and noise throughout; bars are one standard error.",
        picture.html(),
        [sentence for study in studies for sentence in say.about_heldout(study)],
        number_table(["run", "hidden", "which", "loss", "s.e.", "change", "s.e."], rows),
        single=True,
    )


def _text(studies: list[Study]) -> Section:
    return Section(
        "text",
        "What was written",
        "Prompts are grey. On the canvas ░ is a mask, and an outline marks the position that is the main sink "
        "of most heads.",
        beside([f'<div class="card"><h3>{escape(study.label)}</h3>{generations(study)}</div>' for study in studies]),
    )
