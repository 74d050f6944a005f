"""The explorer of the page: its markup, its one script, and the data block the script reads."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from .payload import BUDGET, arrays_of
from .payload_facts import facts_of
from .study import Study
from .style import THEMES

# In the order they are put together: a later file may use an earlier one.
SCRIPTS = (
    "data", "colours", "text", "drawing", "app", "player", "readout", "heatmap", "heads", "paths", "scatter", "pane",
    "charts", "findings", "controls", "main",
)  # fmt: skip


def asset(name: str) -> str:
    """The text of a file that is packaged with the reports."""
    return resources.files("sinklab.reports").joinpath(name).read_text("utf-8")


@lru_cache(maxsize=1)
def script() -> str:
    """All scripts as one, in a scope of its own."""
    parts = (asset(f"assets/{name}.js").strip() for name in SCRIPTS)
    return '(() => {\n"use strict";\n' + "\n\n".join(parts) + "\n})();\n"


def script_hash() -> str:
    """What the page's Content-Security-Policy allows to run: this script and no other."""
    return base64.b64encode(hashlib.sha256(script().encode("utf-8")).digest()).decode("ascii")


def payload(studies: Sequence[Study], budget: int = BUDGET) -> dict[str, Any]:
    """Everything the script draws, as JSON values. ``budget``: characters for the arrays of each run."""
    palette = {name: {"scale": theme.scale, "runs": theme.runs} for name, theme in THEMES.items()}
    runs = [
        {
            "label": study.label,
            "family": study.family,
            "added": study.sink_count,
            **facts_of(study),
            **arrays_of(study, budget),
        }
        for study in studies
    ]
    return {"palette": palette, "runs": runs}


def data_block(content: dict[str, Any]) -> str:
    """A block that no browser runs or reads as markup: "<" is written as an escape."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="payload">{text}</script>'
