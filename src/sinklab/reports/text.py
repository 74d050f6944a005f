"""The generated text of a run as HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from .study import Study

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
