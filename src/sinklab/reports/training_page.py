"""The page of training runs: findings, curves as pictures with their numbers, and what was run. It runs no script."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from string import Template
from typing import Any

import pandas as pd

from sinklab.reports import training_sentences as say
from sinklab.reports.drawing import figure_of, save
from sinklab.reports.explorer import asset
from sinklab.reports.page import Beside, Part, beside, findings, number_table, plain_table, run_facts, status
from sinklab.reports.printed import number, percent
from sinklab.reports.samples import NotRecorded
from sinklab.reports.style import theme_named, themed
from sinklab.reports.training import HeldoutLoss, Training
from sinklab.reports.training_curves import (
    massive_activations,
    mobility_over_training,
    optimization,
    sink_emergence,
    sinks_over_training,
    training_loss,
)
from sinklab.reports.training_layers import emergence_map, main_holders, trained_norms, trained_share

DARK = "screen and (prefers-color-scheme: dark)"


def picture(draw: Callable[..., Any], alternative: str) -> str:
    """What ``draw(theme=…)`` draws as HTML; empty where the runs did not record enough for it."""
    try:
        light, dark = (_address(draw, theme) for theme in ("light", "dark"))
    except NotRecorded:
        return ""
    return (
        f'<figure><picture><source media="{DARK}" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alternative)}"></picture></figure>'
    )


def pictured(
    anchor: str, title: str, how: str, pictures: Sequence[str], sentences: Sequence[str] = (), details: str = ""
) -> str:
    """A card with pictures, sentences and numbers; empty when there is no picture."""
    if not any(pictures):
        return ""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        f'<article class="card" id="{escape(anchor)}"><h2>{escape(title)}</h2><p class="how">{escape(how)}</p>'
        f"{''.join(pictures)}{said}{details}</article>"
    )


def _address(draw: Callable[..., Any], theme: str) -> str:
    import matplotlib

    written = io.BytesIO()
    # Letters stay letters: a tenth of the size of their outlines.
    with themed(theme_named(theme)), matplotlib.rc_context({"svg.fonttype": "none"}):
        save(figure_of(draw(theme=theme)), "svg", written)
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode('ascii')}"


def training_page(trainings: list[Training]) -> Callable[[Beside], str]:
    """The whole document, but for what lies beside it."""
    names = " and ".join(run.label for run in trainings) if len(trainings) < 3 else f"{len(trainings)} runs"
    values = {
        "title": "How sinks come up while the model learns",
        "lead": escape(
            f"Training of {names}: losses, and what a sink monitor saw on fixed held-out text under nested masks."
        ),
        "allowed": "'none'",
        "style": asset("style.css"),
        "status": "\n".join(map(status, trainings)),
        "explorer": "",
        "short": findings(say.in_short(trainings), []),
        "sections": "\n".join(part.html() for part in parts(trainings)),
        "version": escape(str(trainings[0].run.info.versions.get("sinklab", ""))),
        "script": "",
    }
    return lambda lying_beside: Template(asset("template.html")).substitute(values, beside=lying_beside.html())


def parts(trainings: list[Training]) -> list[Part]:
    """Everything below the findings, in reading order; what was run closes the page."""
    table = f'<div class="card">{_outcome(trainings)}</div>'
    found = [Part("outcome", "How the runs came out", "", table)]
    # One part, so that the style packs short and tall cards below each other.
    measured = [card for card in (*_learning(trainings), *_sinks(trainings), *_layers(trainings)) if card]
    each = [card for card in _each(trainings) if card]
    if measured:
        found.append(Part("measured", "What was measured", "", beside(measured)))
    if each:
        found.append(Part("each", "Run by run", "", beside(each)))
    return [*found, Part("runs", "What was run", "", beside([run_facts(run) for run in trainings]))]


def _outcome(trainings: list[Training]) -> str:
    head = ["run", "variant", "seed", "held-out loss", "95 % interval", "against plain"]
    head += ["share of added sinks", "from step", "mobility", "sinks in the text"]
    rows = []
    for run in trainings:
        loss, other = run.loss, say.compared_with(run, trainings)
        gap = None if other is None else run.against(other)
        last = pd.Series(dtype=float) if run.looks.empty else run.looks.iloc[-1]
        held = ["–", ""] if loss is None else [number(loss.mean, 4), _interval(loss)]
        rows.append([
            run.label, run.variant, run.run.info.seed, *held,
            "" if gap is None else say.signed(*gap),
            percent(float(last.get("sink_share", float("nan")))) if run.added else "",
            ("never" if run.takeover is None else run.takeover) if run.added and len(last) else "",
            number(float(last.get("mobility", float("nan")))),
            number(float(last.get("text_sinks", float("nan")))),
        ])  # fmt: skip
    return plain_table(head, rows)


def _interval(loss: HeldoutLoss) -> str:
    return "" if math.isnan(loss.low) else f"{number(loss.low, 4)} to {number(loss.high, 4)}"


def _learning(trainings: list[Training]) -> list[str]:
    return [
        pictured(
            "loss",
            "Loss over training",
            "Lines with markers: loss on held-out text, in nats per token. Faint lines: loss of the training batches.",
            [picture(partial(training_loss, trainings), "Training and held-out loss over steps")],
            [] if say.are_many(trainings) else say.about_losses(trainings),
        ),
        pictured(
            "optimization",
            "How the runs went",
            "Learning rate, norm of the gradient before clipping, and speed, as logged.",
            [picture(partial(optimization, trainings), "Learning rate, gradient norm and speed over steps")],
        ),
    ]


def _sinks(trainings: list[Training]) -> list[str]:
    causal = any(run.causal_steps for run in trainings)
    note = " Up to the dotted line the model is the causal one of the warm start, and is looked at as that." * causal
    return [
        pictured(
            "emergence",
            "How much attention sinks take",
            "Mean over layers, heads, queries, rows of text and levels of masking. The greatest text token is looked "
            f"up anew for every head and level.{note}",
            [picture(partial(sink_emergence, trainings), "Share of attention on sinks over steps")],
            say.of_each(trainings, say.about_takeover),
            _over_steps(trainings, {"sink_share": "added sinks", "top_text_share": "greatest text token"}, percent),
        ),
        pictured(
            "count",
            "How many sinks a head has",
            "Keys above 1 + 3 (S−1)/S times an even share, per head and level of masking.",
            [picture(partial(sinks_over_training, trainings), "Sinks of a head over steps")],
            say.of_each(trainings, say.about_emergence),
        ),
        pictured(
            "mobility",
            "Whether sinks move",
            "The text is read with 90, 70, 50, 30 and 10 % of it hidden, a token once open staying open. Mobility is "
            "the chance that two of these levels have the main sink of a head at different places, weighted by how "
            "strong it is: 0 static, 1 elsewhere every time.",
            [picture(partial(mobility_over_training, trainings), "Mobility of main sinks over steps")],
            say.of_each(trainings, say.about_motion),
        ),
        pictured(
            "massive",
            "Massive activations",
            "Greatest absolute number in the residual stream after any layer.",
            [picture(partial(massive_activations, trainings), "Greatest activation over steps")],
            details=_over_steps(
                trainings, {"activation_ratio": "over median", "activation_added": "added sink"}, number
            ),
        ),
    ]


def _layers(trainings: list[Training]) -> list[str]:
    shares = {"sink_share": "added sinks", "top_text_share": "greatest text token"}
    norms = {"value_added": "added sinks", "value_sink": "text sinks", "value_other": "other text"}
    return [
        pictured(
            "share",
            "Attention by layer",
            "At the last look, mean over heads, queries, rows and levels.",
            [picture(partial(trained_share, trainings), "Share of attention on sinks by layer")],
            details=_over_layers(trainings, shares, percent),
        ),
        pictured(
            "norms",
            "What sinks carry",
            "At the last look: norm of value vectors over that of text that is no sink, mean over heads. Below 1 a "
            "sink carries less than other tokens do.",
            [picture(partial(trained_norms, trainings), "Norm of the values of sinks by layer")],
            details=_over_layers(trainings, norms, number),
        ),
    ]


def _each(trainings: list[Training]) -> list[str]:
    return [
        pictured(
            f"run-{place + 1}",
            run.label,
            "Above: which keys hold the main sinks of all heads. Below: share of attention by step and layer, each "
            "map on a scale of its own.",
            [
                picture(partial(main_holders, run), f"Holders of main sinks over steps, {run.label}"),
                picture(partial(emergence_map, run), f"Attention by step and layer, {run.label}"),
            ],
        )
        for place, run in enumerate(trainings)
    ]


def _over_steps(trainings: list[Training], measures: dict[str, str], shown: Callable[[float], str]) -> str:
    looks = {run.label: run.looks.set_index("step") for run in trainings if not run.looks.empty}
    return _numbers("step", looks, measures, shown)


def _over_layers(trainings: list[Training], measures: dict[str, str], shown: Callable[[float], str]) -> str:
    layers = {run.label: run.last_layers.set_index("layer") for run in trainings if not run.looks.empty}
    return _numbers("layer", layers, measures, shown)


def _numbers(
    first: str, tables: dict[str, pd.DataFrame], measures: dict[str, str], shown: Callable[[float], str]
) -> str:
    """Measures of several runs beside each other; columns without any number are left out."""
    kept = [
        (f"{label}: {words}", table[name])
        for label, table in tables.items()
        for name, words in measures.items()
        if table[name].fillna(0).any()
    ]
    rows = [
        [place, *(shown(float(values[place])) if place in values.index else "" for _, values in kept)]
        for place in sorted({place for table in tables.values() for place in table.index})
    ]
    return number_table([first, *(title for title, _ in kept)], rows)
