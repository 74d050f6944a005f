"""Pieces of the page: everything that comes from a run is escaped here or in text.py."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from .study import Study


@dataclass(frozen=True)
class Picture:
    """One figure in both appearances, as PNG bytes."""

    name: str
    alt: str
    light: bytes
    dark: bytes

    def html(self, title: str = "") -> str:
        """A card that shows the image of the reader's appearance."""
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        return (
            f'<figure class="card">{heading}<picture>'
            f'<source media="(prefers-color-scheme: dark)" srcset="{_data_uri(self.dark)}">'
            f'<img alt="{escape(self.alt)}" src="{_data_uri(self.light)}"></picture></figure>'
        )


@dataclass(frozen=True)
class Section:
    """One part of the report; ``body`` is HTML, the rest is plain text."""

    anchor: str
    title: str
    how: str
    body: str
    sentences: Sequence[str] = ()
    details: str = ""
    single: bool = False

    def html(self) -> str:
        """The section with its sentences under the figures."""
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        how = f'<p class="how">{escape(self.how)}</p>' if self.how else ""
        under = f'<div class="said">{said}{self.details}</div>'
        # A single figure leaves room at its side.
        content = f'<div class="single">{self.body}{under}</div>' if self.single else f"{self.body}\n{under}"
        return f'<section id="{escape(self.anchor)}"><h2>{escape(self.title)}</h2>{how}\n{content}</section>'


def page(studies: list[Study], short: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole document."""
    files = resources.files("sinklab.reports")
    names = " and ".join(study.label for study in studies) if len(studies) < 3 else f"{len(studies)} runs"
    return Template(files.joinpath("template.html").read_text("utf-8")).substitute(
        title="Where attention goes while the model writes",
        lead=escape(
            f"A study of {names}: received attention at every denoising step, its sinks, and what hiding them changes."
        ),
        style=files.joinpath("style.css").read_text("utf-8"),
        status="\n".join(_status(study) for study in studies),
        short='<div class="short"><ul>' + "".join(f"<li>{escape(item)}</li>" for item in short) + "</ul></div>"
        if short
        else "",
        sections="\n".join(section.html() for section in sections),
        version=escape(str(studies[0].run.info.versions.get("sinklab", ""))),
    )


def beside(parts: Sequence[str]) -> str:
    """Parts next to each other where there is room."""
    return f'<div class="pair">{"".join(parts)}</div>'


def number_table(head: Sequence[str], rows: Sequence[Sequence[Any]], summary: str = "numbers") -> str:
    """A table behind a summary line; cells are escaped."""
    top = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<details><summary>{escape(summary)}</summary><div class=scroll><table><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></details>"
    )


def run_facts(study: Study) -> str:
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


def _status(study: Study) -> str:
    info = study.run.info
    if info.status == "complete":
        return ""
    why = f": {info.error}" if info.error else ""
    said = "was interrupted" if info.status == "interrupted" else "did not finish, or is still running"
    return (
        f'<p class="status">{escape(f"The run of {study.label} {said}{why}. What it wrote until then is shown.")}</p>'
    )


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
