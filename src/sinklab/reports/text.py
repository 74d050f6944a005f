"""The generated text as HTML: what was written, and the canvas as the model saw it on the way."""

from __future__ import annotations

from html import escape

import numpy as np
import pandas as pd

from .maps import main_sink_shares
from .study import Study

FRAMES = 4


def generations(study: Study) -> str:
    """Every sample of a run: prompt, completion, and for recorded samples the canvas at a few steps."""
    frame = study.generations
    if frame is None:
        return "<p class=none>No generated text was kept.</p>"
    parts = []
    for sample, rows in frame.groupby("sample", sort=True):
        for row in rows.to_dict("records"):
            hidden = row.get("masked_sinks", 0)
            note = f"<span class=chip>{int(hidden)} sinks hidden per head</span> " if hidden else ""
            parts.append(
                f"<p class=sample>{note}<span class=prompt>{escape(str(row['prompt']))}</span>"
                f"{escape(str(row['completion']))}</p>"
            )
        parts.append(_frames(study, int(sample), opened=len(parts) <= 2))
    return "\n".join(parts)


def _frames(study: Study, sample: int, *, opened: bool) -> str:
    tokens = study.tokens
    if tokens is None or not (tokens["sample"] == sample).any():
        return ""
    rows = tokens[tokens["sample"] == sample]
    steps = sorted(rows["step"].unique())
    chosen = [int(steps[index]) for index in np.unique(np.linspace(0, len(steps) - 1, FRAMES).round().astype(int))]
    share = main_sink_shares(study, sample)[0] if study.layers else None
    canvases = [_canvas(study, rows[rows["step"] == step], share, step) for step in chosen]
    frames = [
        f"<figure class=frame><figcaption>step {step}</figcaption><p>{canvas}</p></figure>"
        for step, canvas in zip(chosen, canvases, strict=True)
    ]
    return f"<details{' open' if opened else ''}><summary>while it was written</summary>{''.join(frames)}</details>"


def _canvas(study: Study, rows: pd.DataFrame, share: np.ndarray | None, step: int) -> str:
    added = study.sink_count
    on = share[step] if share is not None and step < len(share) else np.zeros(0)
    main = int(on.argmax()) - added if on.size else None
    spans = []
    if added:
        weight = f" {100 * on[:added].sum():.0f} %" if on.size else ""
        spans.append(f'<span class="chip sink{" main" if main is not None and main < 0 else ""}">sink{weight}</span> ')
    for row in rows.sort_values("position").itertuples():
        masked = row.state == "masked"
        text = "░" if masked else escape(str(row.text))
        kind = f"{row.state} main" if row.position == main else row.state
        # White space that is the main sink would be an empty outline.
        text = "↵" if row.position == main and text.strip() == "" else text
        spans.append(f'<span class="{escape(kind)}">{text}</span>')
    return "".join(spans)
