"""A run that answers by itself: its sinks, their mobility, figures, the page; and its view in a
notebook.
"""

# T recorded steps, L layers, H heads, K keys (added sinks first, then canvas positions)
from __future__ import annotations

import base64
import io
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any
from weakref import finalize

import numpy as np
import pandas as pd

from sinklab.core.errors import near
from sinklab.core.sinks import Rule
from sinklab.lab.analysis.answers import Answers
from sinklab.lab.analysis.counts import main_sink
from sinklab.lab.records import reading
from sinklab.lab.records.info import reading_of
from sinklab.lab.records.writing import names_in
from sinklab.lab.reports import build
from sinklab.lab.reports.drawing import figures_of
from sinklab.lab.reports.runs import as_shown, as_studies

MOST_SHOWN = 300_000
"""bytes that a run may add to a notebook; without the page if it is larger"""
FRAME = (
    '<iframe sandbox="allow-scripts" srcdoc="{}" style="width: 100%; height: {}px; border: '
    '0"></iframe>'
)
"""Never of the same origin: a notebook's holds the token of its kernel."""


@dataclass(frozen=True)
class Page:
    """A page that was written; a notebook shows it."""

    path: Path

    def __repr__(self) -> str:
        return f"page to open in a browser: {self.path.absolute().as_uri()}"

    def _repr_html_(self) -> str:
        return FRAME.format(
            self.path.read_text("utf-8").replace("&", "&amp;").replace('"', "&quot;"), 900
        )


class Plot:
    """Figures of a run by their names: ``run.plot.received_map(layer=2)``, …

    Each draws as its function in `sinklab.lab.reports.figures` does, which lists its options. The
    axes come back, and a notebook shows them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __dir__(self) -> list[str]:
        return sorted(figures_of(self._run.info.kind))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        known = figures_of(self._run.info.kind)
        if name not in known:
            hint = near(name, known) or f"known are {', '.join(known)}"
            raise AttributeError(f"a {self._run.info.kind} has no figure {name!r}; {hint}")
        return wraps(known[name])(partial(_shown_in_notebooks, known[name], self._run))


def _shown_in_notebooks(draw: Callable[..., Any], run: Run, *options: Any, **named: Any) -> Any:
    drawn = draw(run.read, *options, **named)
    setattr(drawn, "_repr_png_", partial(_png, drawn))  # noqa: B010 (matplotlib's own is for a display that is running)
    return drawn


def _png(drawn: Any) -> bytes:
    written = io.BytesIO()
    drawn.figure.savefig(written, format="png", dpi=120)
    return written.getvalue()


@dataclass(frozen=True, repr=False)
class Run(reading.Run):
    """A run folder, open for reading: returned by `sinklab.open_run` and ``lm.watch``.

    Positions are those of the canvas, from 0; added sinks have the negative ones in front of it.
    """

    is_saved: bool = field(default=True, compare=False)
    """False for a run in a temporary folder, deleted with this object; see `save`."""
    rule: Any = field(default=None, compare=False)
    """the definition of a sink that it is read by; None for that of the published figures"""
    _source: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        about, kept = (
            self.info,
            str(self.path)[-80:] if self.is_saved else "in memory until .save(folder)",
        )
        names = ", ".join((*self.tables, *self.array_files))
        reading = "" if about.kind != "study" else f"; attention of {reading_of(about)}"
        if "forward" in about.model:
            reading += f" in {about.model['forward']}"
        named = f"{about.kind} of {about.model.get('name')}, {about.status}{reading}"
        shown = f"Run ({named}; {kept}; {names}"
        return shorten(shown, 298, placeholder=" …", break_on_hyphens=False) + ")"

    def save(self, folder: str | Path) -> Run:
        """Keep it in a folder; return the run in that folder. Raises ValueError for a folder that
        is not empty.
        """
        if names_in(Path(folder)):
            raise ValueError(f"a run is saved into an empty folder, but {folder} is none")
        return open_run(shutil.copytree(self.path, folder, dirs_exist_ok=True))

    def with_rule(self, rule: Rule | str) -> Run:
        """This run, read by another definition of a sink: its facts are derived anew from the
        arrays.

            run.with_rule("excess:epsilon=5").sinks()

        Raises:
            ValueError: for an unknown rule, a run that traced no texts, and one without arrays.
        """
        # a run in memory lasts as long as whoever reads it
        found = replace(self, rule=rule, _source=self)
        _ = found._study.measured
        return found

    @cached_property
    def texts(self) -> list[str]:
        """Text of each sample, the prompt in front; empty for a run of another kind."""
        if "generations" not in self.tables:
            return []
        table = self.table("generations").drop_duplicates("sample")
        return (table["prompt"] + table["completion"]).tolist()

    @cached_property
    def read(self) -> Any:
        """The run as reports read it, such as a `sinklab.lab.reports.Study`; it keeps its
        measurements.
        """
        return as_shown(self, rule=self.rule, any_kind=True)[0]

    @property
    def _study(self) -> Any:
        """Itself, read; ValueError for a run that traced no texts."""
        return as_studies(self.read)[0]

    def sinks(self) -> pd.DataFrame:
        """Every sink at every recorded step of every head, a row each, with the columns of
        `to_pandas`.
        """
        return self._table(only_sinks=True).drop(columns="sink")

    def to_pandas(self) -> pd.DataFrame:
        """Received attention of every key, a row per sample, step, layer, head and position:
        millions for a large model.

        Columns: ``token`` (its text, [MASK] or "added sink") and ``state`` before the step,
        ``received`` (the mean weight of the queries that see it, in multiples of an even share),
        ``weight`` (that mean weight itself, 0 to 1), ``sink`` (under the rule), ``main`` (the
        head's strongest). Without keys of an autoregressive text that too few queries see to be
        judged.
        """
        return self._table(only_sinks=False)

    def _table(self, *, only_sinks: bool) -> pd.DataFrame:
        study, frames = self._study, []
        for sample in map(study.sample, study.recorded):
            label_TK, state_TK = sample.labels_TK, sample.ages_TK
            for number, one in zip(study.layers, sample.scored(), strict=True):
                sinks_T1HK, main_T1H = one.flags(study.rule), main_sink(one.score)
                at = step, _, head, key = np.nonzero(sinks_T1HK if only_sinks else one.exists)
                rows = {"sample": sample.index, "step": sample.step_numbers_T[step]}
                rows |= {"layer": number, "head": np.array(study.heads)[head]}
                rows |= {"position": key - sample.added, "token": label_TK[step, key]}
                seen = np.broadcast_to(one.seen_by, one.received.shape)[at]
                rows |= {
                    "state": state_TK[step, key],
                    "received": one.score[at],
                    "weight": one.received[at] / seen,
                    "sink": sinks_T1HK[at],
                    "main": main_T1H[at[:3]] == key,
                }
                frames.append(pd.DataFrame(rows))
        if not frames:
            raise ValueError(f"{self!r} recorded no attention; choose other steps to record")
        found = pd.concat(frames).sort_values(["sample", "step", "layer"], kind="stable")
        labels = {"token": "category", "state": "category"}
        return found.reset_index(drop=True).astype(labels)

    def mobility(self) -> pd.DataFrame:
        """How mobile the main sink of each head is, layer × head, a mean over samples.

        The chance that it stands at different places at two of the steps at which it is a sink
        under the rule: 0 static to 1 everywhere else; NaN with fewer than two such steps
        (`sinklab.lab.analysis.Motion`). Of an autoregressive model, in two disjoint windows of its
        queries (`sinklab.lab.analysis.movement.of_windows`).
        """
        motions = self._study.measured.motions
        return motions.groupby(["layer", "head"])["mobility"].mean().unstack()

    def to_xarray(self, name: str = "attention", sample: int | None = None) -> Any:
        """The arrays of a file as an ``xarray.Dataset``; those of ``attention`` with the numbers of
        steps, layers and heads, and of keys ``position``, ``token`` and ``state_of_key`` (before
        the step) as coordinates.

        Args:
            name: one of `array_files`.
            sample: number of the sample; needed if there are several, which may differ in shape.

        Raises:
            ValueError: for an unknown name or sample, and several samples without ``sample``.
        """
        if sample is None:
            if len(self.samples) != 1:
                raise ValueError(f"{self.path} has the samples {[*self.samples]}; choose one")
            sample = self.samples[0]
        data = super().to_xarray(name, sample)
        if name != "attention" or self.info.kind != "study":
            return data
        (read,) = (one for one in self.read.samples if one.index == sample)
        axes: dict[str, Any] = {"layer": self.read.layers, "head": self.read.heads}
        axes |= {
            "step": read.step_numbers_T,
            "position": ("key", np.arange(read.shape[-1]) - read.added),
        }
        over = ("step", "key")
        return data.assign_coords(
            axes | {"token": (over, read.labels_TK), "state_of_key": (over, read.ages_TK)}
        )

    def summary(self) -> Answers:
        """Three questions and their answers: whether sinks exist, which they are and whether they
        stay, and the cost of blocking them. Printed, it is three sentences; ``.table`` has the
        numbers, a row a question.

        Raises:
            ValueError: for a run that traced no texts.
        """
        return self._study.answers

    @property
    def plot(self) -> Plot:
        """The figures of the run by name: ``run.plot.sink_paths()``."""
        return Plot(self)

    def explore(self, out: str | Path | None = None, **how: Any) -> Page:
        """The page that explores the run, as `sinklab.report` writes it.

        Args:
            out: folder to write it into; a temporary one when left out, deleted with this object.
            how: of `sinklab.report`; when left out, no tables are written beside the page.
        """
        folder = Path(tempfile.mkdtemp(prefix="sinklab-page-")) if out is None else out
        page = Page(build.report(self.read, folder, **{"tables": False} | how))
        if out is None:
            finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return page

    def _repr_html_(self) -> str:
        parts = [f"<p><code>{escape(repr(self))}</code></p>"]
        if not getattr(self.read, "layers", None):
            return parts[0]
        drawn = base64.b64encode(_png(self.plot.sink_paths())).decode("ascii")
        parts += [
            f"<p>{escape(text)}</p>" for text in (*self.texts[:1], *self.read.answers.sentences)
        ]
        parts += [
            f'<img alt="paths of main sinks" width="480" src="data:image/png;base64,{drawn}">'
        ]
        shown = "\n".join([*parts, self.explore(megabytes=0.05)._repr_html_()])
        return (
            shown
            if len(shown.encode()) <= MOST_SHOWN
            else "\n".join([*parts, "<p>Too large: run.explore()</p>"])
        )


@wraps(reading.open_run)
def open_run(path: str | Path) -> Run:  # noqa: D103 (the docstring is the wrapped one)
    run = reading.open_run(path)
    return Run(run.path, run.info)


def in_memory(write: Callable[[Path], object]) -> Run:
    """The run that `write` writes into a folder, which is deleted when nothing holds the run any
    more.
    """
    folder = Path(tempfile.mkdtemp(prefix="sinklab-run-"))
    try:
        write(folder / "run")
        run = Run(folder / "run", open_run(folder / "run").info, is_saved=False)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finalize(run, shutil.rmtree, folder, ignore_errors=True)
    return run
