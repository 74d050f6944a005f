"""Choice of the runs to show, of one kind, and the names that tell them apart."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd

from sinklab.core.registry import rules
from sinklab.core.sinks import Rule
from sinklab.lab.records.reading import Run
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.reports.study import Reader, Study, beside_of
from sinklab.lab.reports.training import FREE, Training, variant

Runs = Iterable[Run | Reader] | Run | Reader

READERS: dict[str, type[Reader]] = {"study": Study, "training": Training}
"""kinds of run that have a page"""
MAKE = {
    "study": "make one with sinklab.lab.studies.trace.study.study or `sinklab trace`",
    "training": "make one with sinklab.lab.training.train or `sinklab train`",
    "curve": "make one with `sinklab curve`",
}
"""kind of run -> what makes one"""
BESIDE = ("curve", "texts")
"""kinds of run that add to what studies of the same model say: the cost of blocking keys, that of
single heads, and the paths of sinks over more texts
"""
LOOK = {
    "curve": "its table and figure lie in the folder above it",
    "benchmark": "`sinklab table1 --render` and `sinklab onetoken` read it",
}
"""kind of run without a page -> where to look"""


def as_shown(
    sources: Runs,
    kind: str | None = None,
    *,
    rule: Rule | str | None = None,
    any_kind: bool = False,
) -> list[Any]:
    """Several runs of one kind with labels that tell them apart: the model's name, and the folder
    if names repeat.

    Runs of the kinds `BESIDE` may stand beside studies: each says more about its model.

    Args:
        sources: runs, or readers of runs, which stay as they are.
        kind: the kind that they must be; None for studies or training runs, whichever they are.
        rule: the definition of a sink in studies, or its text such as "excess:epsilon=5"; None for
            the default.
        any_kind: runs of a kind that has no page are let through too.

    Raises:
        ValueError: without a run, for another kind, for runs of several kinds.
    """
    given: list[Any] = [sources]
    if not isinstance(sources, Run) and not hasattr(sources, "run"):
        given = list(cast("Iterable[Any]", sources))
    extra: list[Run] = []
    if kind not in BESIDE and any(run_of(one).info.kind == "study" for one in given):
        extra = [run_of(one) for one in given if run_of(one).info.kind in BESIDE]
        given = [one for one in given if run_of(one).info.kind not in BESIDE]
    runs = [run_of(source) for source in given]
    if not runs:
        raise ValueError("A report needs at least one run: got none. Pass open_run(folder).")
    first = runs[0].info.kind
    expected = kind or (first if any_kind or first in READERS else "study")
    for run in runs:
        found = run.info.kind
        if found != expected:
            remedy = LOOK.get(found) or MAKE.get(expected, "show runs of each kind apart")
            raise ValueError(
                f"This shows runs of kind {expected!r}: {run.path} is of kind {found!r}; {remedy}."
            )
    names = labels(runs)
    alike = repeats(runs, names) if expected == "training" else names
    reader: Any = READERS.get(expected, Reader)
    how: dict[str, Any] = {}
    if rule and reader is not Study:
        raise ValueError(
            f"a rule is for runs of kind 'study': what {runs[0].path} calls a sink was decided as "
            "it ran"
        )
    if rule:
        how["rule"] = rules.parse(rule, object)
    shown = []
    for source, run, name, same in zip(given, runs, names, alike, strict=True):
        one = reader(run, name, same, **how) if isinstance(source, Run) else source
        more = beside_of(run, extra)
        shown.append(replace(one, beside={**one.beside, **more}) if more else one)
    return shown


def left_out(sources: Runs, shown: Iterable[Reader]) -> list[Run]:
    """Runs of the kinds `BESIDE` that were given and add nothing to those shown."""
    given: Any = [sources] if isinstance(sources, Run | Reader) else sources
    used = [one.run for one in shown]
    for one in shown:
        if isinstance(one, Study):
            used += one.beside.values()
    return [run for run in map(run_of, given) if not any(run is one for one in used)]


def finished(run: Run, name: str) -> pd.DataFrame:
    """A table that every finished run of its kind has. Raises NotRecorded for a run that did not
    come to its end.
    """
    if name not in run.tables:
        raise NotRecorded(f"This needs a finished {run.info.kind}: {run.path} is not. Resume it.")
    return run.table(name)


def run_of(source: Run | Reader) -> Run:
    """The run itself, if it comes with a reader."""
    return source if isinstance(source, Run) else source.run


def as_studies(sources: Runs, *, rule: Rule | str | None = None) -> list[Study]:
    """Runs of kind "study" as their reader; see `as_shown`."""
    return as_shown(sources, "study", rule=rule)


def labels(runs: list[Run]) -> list[str]:
    """Names that tell runs apart: the model's, and the folder if these repeat."""
    names = [_short(str(run.info.model.get("name", run.path.name))) for run in runs]
    names = _apart(names, [f" ({run.path.name})" for run in runs])
    return _apart(names, [f" [{place}]" for place in range(1, len(runs) + 1)])


def _apart(names: list[str], tails: list[str]) -> list[str]:
    """Names, those that repeat with their tails."""
    pairs = zip(names, tails, strict=True)
    return [name + tail * (names.count(name) > 1) for name, tail in pairs]


def _short(name: str) -> str:
    """A name on the Hub as it is, a path as its last part."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    return Path(name.replace("\\", "/")).name or name if is_path else name


def repeats(runs: list[Run], names: list[str]) -> list[str]:
    """Common name of each run and its repeats, which differ in their seed alone.

    It is the variant, if that tells which runs are repeats, and else the name of each run.
    """
    settings = [
        json.dumps({key: value for key, value in run.info.settings.items() if key not in FREE})
        for run in runs
    ]
    words = [variant(run.info.model) for run in runs]
    kinds = {*zip(words, settings, strict=True)}
    return words if len({*words}) == len(kinds) < len(runs) else names
