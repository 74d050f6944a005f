"""Pieces of the page: everything that comes from a run is escaped here or in text.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from string import Template
from typing import Any

from sinklab.reports.explorer import asset, data_block, script, script_hash
from sinklab.reports.study import Study
from sinklab.reports.training import Training

MOST = 12


def generations(study: Study) -> str:
    """What was written for every prompt, under each number of hidden sinks; after a dozen samples behind a line."""
    frame = study.generations
    if frame is None:
        return '<p class="none">No generated text was kept.</p>'
    parts = ["".join(map(_text, rows.to_dict("records"))) for _, rows in frame.groupby("sample", sort=True)]
    rest = "".join(parts[MOST:])
    more = f"<details><summary>{len(parts) - MOST} more samples</summary>{rest}</details>" if rest else ""
    return "".join(parts[:MOST]) + more


def _text(row: dict[str, Any]) -> str:
    hidden = row.get("masked_sinks", 0)
    note = f'<span class="chip">{int(hidden)} sinks hidden per head</span> ' if hidden and hidden == hidden else ""
    if isinstance(idle := row.get("idle"), str) and idle:
        note += f'<span class="chip">no opportunity to act: {escape(idle)}</span> '
    prompt, completion = ("" if row[key] is None else str(row[key]) for key in ("prompt", "completion"))
    return f'<p class="sample">{note}<span class="prompt">{escape(prompt)}</span>{escape(completion)}</p>'


@dataclass(frozen=True)
class Card:
    """One finding: a chart that the script draws, its sentences, and its numbers."""

    chart: str
    title: str
    how: str
    sentences: Sequence[str] = ()
    details: str = ""

    def html(self) -> str:
        """The card; without the script it has its sentences and numbers."""
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return (
            f'<article class="card" id="{escape(self.chart)}"><h2>{escape(self.title)}</h2>'
            f'<p class="how">{escape(self.how)}</p><figure data-chart="{escape(self.chart)}"></figure>'
            f"{said}{self.details}</article>"
        )


@dataclass(frozen=True)
class Part:
    """A part of the page below the explorer; ``body`` is HTML, the rest is plain text."""

    anchor: str
    title: str
    how: str
    body: str
    sentences: Sequence[str] = ()

    def html(self) -> str:
        """The part with its sentences above its body."""
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        how = f'<p class="how">{escape(self.how)}</p>' if self.how else ""
        top = f'<section class="part" id="{escape(self.anchor)}"><h2>{escape(self.title)}</h2>'
        return f"{top}{how}{said}{self.body}</section>"


@dataclass
class Beside:
    """What lies beside the page."""

    figures: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    tables: int = 0

    def html(self) -> str:
        """A sentence, and the figures that could not be drawn with the reason."""
        kinds = (("static figures in figures/", self.figures), ("tables in tables/", self.tables))
        there = " and ".join(f"{count} files of {what}" for what, count in kinds if count)
        said = f"<p>Beside this page lie {escape(there)}.</p>" if there else ""
        rows = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in self.skipped.items())
        return said + (f"<details><summary>figures not drawn</summary><ul>{rows}</ul></details>" if rows else "")


def page(studies: list[Study], content: dict[str, Any], short: str, parts: Sequence[Part], beside: Beside) -> str:
    """The whole document; ``content`` is what the explorer's script draws, ``short`` is HTML."""
    names = " and ".join(study.label for study in studies) if len(studies) < 3 else f"{len(studies)} runs"
    explored = any(run["samples"] for run in content["runs"])
    shown = " ".join(
        (f"{run['label']}: " if len(studies) > 1 else "") + run["shown"] for run in content["runs"] if run["samples"]
    )
    return Template(asset("template.html")).substitute(
        title="Where attention goes while the model writes",
        lead=escape(
            f"A study of {names}: which tokens receive attention at each recorded step, and which of them are sinks."
        ),
        allowed=f"'sha256-{script_hash()}'",
        style=asset("style.css"),
        status="\n".join(status(study) + _edited(study) for study in studies),
        explorer=asset("explorer.html") + f'<p class="shown">{escape(shown)}</p>' if explored else "",
        short=short,
        sections="\n".join(part.html() for part in parts),
        beside=beside.html(),
        version=escape(str(studies[0].run.info.versions.get("sinklab", ""))),
        script=f"{data_block(content)}\n<script>{script()}</script>",
    )


def beside(parts: Sequence[str]) -> str:
    """Parts next to each other where there is room."""
    return f'<div class="cards">{"".join(parts)}</div>'


def findings(sentences: Sequence[str], verdicts: Sequence[tuple[str, bool | None, str]]) -> str:
    """What a reader should know first, and statements with their answers: (name and answer, holds, sentence)."""
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    marks = {True: "yes", False: "no", None: "open"}
    judged = "".join(
        f'<li data-holds="{marks[holds]}">{escape(sentence)}<small>{escape(name)}</small></li>'
        for name, holds, sentence in verdicts
    )
    parts = [f"<div><h2>In short</h2><ul>{said}</ul></div>"] if said else []
    how = (
        "A failure signature is a sign that a model leans on fixed anchors, as autoregressive ones do (Rulli et al.): "
        "● seen, ○ not seen, ? cannot tell."
    )
    parts += [f'<div><h2>Held against the papers</h2><p class="how">{how}</p><ul>{judged}</ul></div>'] if judged else []
    return f'<div class="short">{"".join(parts)}</div>' if parts else ""


def number_table(head: Sequence[str], rows: Sequence[Sequence[Any]], summary: str = "numbers") -> str:
    """A table behind a summary line; cells are escaped."""
    return f"<details><summary>{escape(summary)}</summary>{plain_table(head, rows)}</details>"


def plain_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; cells are escaped, and a cell (text, share) shows the share as a bar behind the text."""
    top = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Any) -> str:
    if isinstance(cell, tuple):
        text, share = cell
        return f'<td class="share" style="--part:{100 * min(max(share, 0), 1):.1f}%">{escape(str(text))}</td>'
    return f"<td>{escape(str(cell))}</td>"


def run_facts(study: Study | Training) -> str:
    """What was run: model, settings, seed, versions."""
    info = study.run.info
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    run = {
        "folder": study.run.path.name,
        "created": info.created,
        "status": info.status,
        "seed": info.seed,
        "versions": versions,
    }
    return (
        f'<div class="card"><h3>{escape(study.label)}</h3>{_facts(info.model)}'
        f"<details><summary>settings</summary>{_facts(info.settings)}</details>"
        f"<details><summary>run</summary>{_facts(run)}</details></div>"
    )


def _facts(values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(_shown(value))}</td></tr>"
        for key, value in values.items()
        if value is not None
    )
    return f'<table class="facts">{rows}</table>'


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) if not any(isinstance(item, str) for item in value) else " · ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


def _edited(study: Study) -> str:
    """Numbers of a run under an intervention must not be read as those of the model alone."""
    edits = [str(edit) for edit in study.run.info.settings.get("edits") or ()]
    said = f"{study.label} was written under {' and '.join(edits)}: its numbers are those of the edited model."
    return f'<p class="status">{escape(said)}</p>' if edits else ""


def status(study: Study | Training) -> str:
    """A line above the page when the run did not end."""
    info = study.run.info
    if info.status == "complete":
        return ""
    why = f": {info.error}" if info.error else ""
    said = "was interrupted" if info.status == "interrupted" else "did not finish, or is still running"
    return (
        f'<p class="status">{escape(f"The run of {study.label} {said}{why}. What it wrote until then is shown.")}</p>'
    )
