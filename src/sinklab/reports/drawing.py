"""All figures of some runs as files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sinklab.records.storage import write_beside
from sinklab.reports.figures import block_moves, heldout_loss, sink_share, sinks_per_layer, split_sinks, value_norms
from sinklab.reports.maps import attention_map, layer_head_map, received_map, received_maps
from sinklab.reports.paths import Runs, overlap_by_step, sink_path, sink_path_of_head
from sinklab.reports.samples import NotRecorded
from sinklab.reports.scores import (
    epsilon_curve,
    output_norm_against_bound,
    score_histogram,
    sink_tokens,
    value_norm_scatter,
)
from sinklab.reports.study import Study
from sinklab.reports.style import DPI, theme_named, themed
from sinklab.reports.training import Training, as_shown
from sinklab.reports.training_curves import (
    Trainings,
    massive_activations,
    mobility_over_training,
    optimization,
    sink_emergence,
    sinks_over_training,
    training_loss,
)
from sinklab.reports.training_layers import emergence_map, main_holders, trained_norms, trained_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FORMATS = ("png", "svg", "pdf")

TOGETHER: dict[str, Callable[..., Any]] = {
    "sink_share": sink_share,
    "sinks_per_layer": sinks_per_layer,
    "epsilon_curve": epsilon_curve,
    "score_histogram": score_histogram,
    "sink_path_of_head": sink_path_of_head,
    "overlap_by_step": overlap_by_step,
    "block_moves": block_moves,
    "split_sinks": split_sinks,
    "heldout_loss": heldout_loss,
}
"""figures that show several studies at once"""

ALONE: dict[str, Callable[..., Any]] = {
    "received_map": received_map,
    "received_maps": received_maps,
    "attention_map": attention_map,
    "layer_head_map": layer_head_map,
    "sink_path": sink_path,
    "sink_tokens": sink_tokens,
    "value_norms": value_norms,
    "value_norm_scatter": value_norm_scatter,
    "output_norm_against_bound": output_norm_against_bound,
}
"""figures of one study"""

FIGURES = ALONE | TOGETHER
"""every figure of studies by its name"""

CURVES_TOGETHER: dict[str, Callable[..., Any]] = {
    "training_loss": training_loss,
    "sink_emergence": sink_emergence,
    "sinks_over_training": sinks_over_training,
    "mobility_over_training": mobility_over_training,
    "massive_activations": massive_activations,
    "trained_share": trained_share,
    "trained_norms": trained_norms,
    "optimization": optimization,
}
"""figures that show several training runs at once"""

CURVES_ALONE: dict[str, Callable[..., Any]] = {"emergence_map": emergence_map, "main_holders": main_holders}
"""figures of one training run"""

CURVES = CURVES_ALONE | CURVES_TOGETHER
"""every figure of training runs by its name"""


@dataclass
class Drawn:
    """What ``draw_all`` did."""

    written: list[Path] = field(default_factory=list)
    """files, in the order drawn"""
    skipped: dict[str, str] = field(default_factory=dict)
    """name of a figure, and of the run where there are several -> why it was not drawn"""


def draw_all(
    runs: Runs | Trainings,
    folder: str | Path,
    formats: Iterable[str] = ("png", "svg"),
    *,
    themes: Iterable[str] = ("light",),
    names: Iterable[str] | None = None,
) -> Drawn:
    """Draw every figure that the runs recorded enough for, into ``folder``: ``FIGURES`` of studies, ``CURVES`` of
    training runs.

    Files are called after the figure, and after the run where it shows one of several: ``sink_path-tiny.png``; those of
    the dark theme end in ``-dark``. Several runs share the figures that can show them together. The same run gives the
    same files byte for byte. What cannot be drawn is skipped and told why. Raises ValueError for unknown formats,
    themes or names.
    """
    (studies, trainings), target = as_shown(runs), Path(folder)
    shown: list[Study] | list[Training] = trainings or studies
    figures, alone = (CURVES, CURVES_ALONE) if trainings else (FIGURES, ALONE)
    formats, names = tuple(formats), tuple(figures if names is None else names)
    looks = [theme_named(theme) for theme in themes]
    for known, asked, what in ((FORMATS, formats, "formats"), (tuple(figures), names, "names")):
        for name in asked:
            _known(name, known, what)
    target.mkdir(parents=True, exist_ok=True)
    drawn = Drawn()
    for name in names:
        jobs: list[tuple[str, Any]] = [(name, shown)]
        if name in alone:
            jobs = [(name + tail, run) for run, tail in zip(shown, file_names(shown), strict=True)]
        for stem, subject in jobs:
            for look in looks:
                try:
                    with themed(look):
                        figure = figure_of(figures[name](subject, theme=look.name))
                except NotRecorded as error:
                    drawn.skipped[stem] = str(error)
                    break
                dark = "" if look.name == "light" else f"-{look.name}"
                with themed(look):
                    for form in formats:
                        path = target / f"{stem}{dark}.{form}"
                        write_beside(path, partial(save, figure, form))
                        drawn.written.append(path)
    return drawn


def file_names(shown: list[Study] | list[Training]) -> list[str]:
    """What the names of the files of each run end in: nothing when there is one run."""
    if len(shown) == 1:
        return [""]
    plain = [re.sub(r"[^A-Za-z0-9._]+", "-", run.label).strip("-.") or "run" for run in shown]
    return [f"-{name}" if plain.count(name) == 1 else f"-{name}-{index + 1}" for index, name in enumerate(plain)]


def figure_of(drawn: Any) -> Figure:
    """The figure of axes, or the figure itself."""
    from matplotlib.figure import Figure

    return drawn if isinstance(drawn, Figure) else drawn.figure


def save(figure: Figure, form: str, target: Path | BinaryIO) -> None:
    """Write a figure; the same figure gives the same bytes."""
    import matplotlib

    # No dates and no random ids.
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}[form]
    with matplotlib.rc_context({"svg.hashsalt": "sinklab"}):
        figure.savefig(target, format=form, dpi=DPI, metadata=metadata)


def _known(name: str, known: tuple[str, ...], what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"The {what} of figures are {', '.join(known)}: got {name!r}.{hint}")
