"""A synthetic study: the numbers of every figure are chosen here, so a report must print them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinklab.records import Run, RunWriter, open_run
from sinklab.reports import report

SAMPLES, STEPS, LAYERS, HEADS, TEXT, PROMPT = 2, 12, 2, 3, 24, 6
WORDS = ["It", " was", " a", " dark", ",", "\n", " night", ".", " old", " <b>man</b>", " $x$", " the"]


def attention(added: int, share: float, text_share: float, norm: float) -> dict[str, np.ndarray]:
    """Every head gives ``share`` to the added sinks, ``text_share`` to one moving text position, the rest evenly."""
    keys = added + TEXT
    received = np.empty((SAMPLES, STEPS, LAYERS, HEADS, keys))
    weight = np.full(keys, (1 - share * bool(added) - text_share) / (TEXT - 1))
    for step in range(STEPS):
        row = weight.copy()
        row[added + PROMPT + step] = text_share
        row[:added] = share / max(added, 1)
        received[:, step] = row * TEXT
    value_norm = np.full((SAMPLES, STEPS, LAYERS, keys), 2.0)
    value_norm[..., :added] = norm
    visible = np.full((SAMPLES, STEPS, keys), float(TEXT))
    # The second sample is two steps shorter.
    for array in (received, value_norm, visible):
        array[1, -2:] = np.nan
    return {"received": received, "visible": visible, "value_norm": value_norm}


def tokens() -> dict[str, list[Any]]:
    rows = []
    for sample in range(SAMPLES):
        for step in range(STEPS - 2 * sample):
            for position in range(TEXT):
                masked = position >= PROMPT + step
                state = "prompt" if position < PROMPT else "masked" if masked else "committed"
                text = "<m>" if masked else WORDS[position % len(WORDS)]
                rows.append((sample, step, position, position, text, state))
    columns = ("sample", "step", "position", "token_id", "text", "state")
    return dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))


def heldout(loss: float, sinks: float) -> dict[str, list[Any]]:
    return {
        "k": [0, 1, 1, 5, 5],
        "control": ["none", "sinks", "random", "sinks", "random"],
        "loss": [loss, loss + sinks / 5, loss + 0.01, loss + sinks, loss + 0.02],
        "stderr": [0.01] * 5,
        "delta": [0.0, sinks / 5, 0.01, sinks, 0.02],
        "delta_stderr": [0.0, 0.004, 0.004, 0.004, 0.004],
        "tokens": [1000] * 5,
        "bits_per_byte": [1.5] + [float("nan")] * 4,
    }


DIMS = {
    "received": ("sample", "step", "layer", "head", "key"),
    "visible": ("sample", "step", "key"),
    "value_norm": ("sample", "step", "layer", "key"),
}


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[..., Run]:
    return maker(tmp_path)


def maker(root: Path) -> Callable[..., Run]:
    def make(
        name: str = "tiny",
        *,
        added: int = 0,
        share: float = 0.5,
        text_share: float = 0.3,
        norm: float = 0.25,
        sinks: float = 0.5,
        leave_out: tuple[str, ...] = (),
        folder: str | None = None,
        ran: float = 1.0,
        **changes: Any,
    ) -> Run:
        model = {"name": name, "family": "diffusion", "layers": LAYERS, "heads": HEADS, "sink_count": added}
        settings = {"steps": STEPS, "prompts": ["It was <i>a</i> dark"], "rule": "low_confidence"}
        path = root / (folder or name)
        parts = {
            "tokens": tokens(),
            "steps": {"sample": [0], "step": [0], "block": [0], "masked": [18], "committed": [1]},
            "generations": {
                "sample": [0, 1, 0],
                "prompt": ["It was", "A <script>alert(1)</script>", "It was"],
                "completion": [" a dark, stormy night.", " & more\n语", " a dark dark dark"],
                "rule": ["low_confidence"] * 3,
                "masked_sinks": [0, 0, 5],
            },
            "heldout": heldout(4.0, sinks),
        }
        with RunWriter(path, kind="study", model=model | changes, settings=settings, seed=3) as run:
            if "attention" not in leave_out:
                arrays = attention(added, share, text_share, norm)
                # At odd steps only this fraction of the queries ran, as under a cache.
                for array in (arrays["received"], arrays["visible"]):
                    array[:, 1::2] *= ran
                run.arrays("attention", arrays, DIMS)
            for table in parts.keys() - set(leave_out):
                run.table(table, parts[table])
        return open_run(path)

    return make


@pytest.fixture(scope="session")
def drawn_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of a run without and one with an added sink, with its figures."""
    make = maker(tmp_path_factory.mktemp("runs"))
    runs = [make("plain"), make("sink", added=1, text_share=0.1)]
    return report(runs, tmp_path_factory.mktemp("report"))
