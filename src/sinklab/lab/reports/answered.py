"""Answers to the three questions of a study (`sinklab.lab.analysis.answers`), from its samples and
losses: its own, or those of a masking curve beside it.
"""

# N samples, R rows of held-out text, C cells of a
# curve
from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis import MotionSummary, mean_over
from sinklab.lab.analysis.answers import (
    Answer,
    Answers,
    Cost,
    Existence,
    Staying,
    costs,
    exists,
    stays,
)
from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.sentences import contrast
from sinklab.lab.records.info import SO_FAR, of_twin
from sinklab.lab.records.reading import Run
from sinklab.lab.reports.samples import FIRST, OTHER
from sinklab.lab.reports.words import quoted

MOST_HOLDERS = 4
TRACE = ("trace", 'lm.watch("The house stood", new_tokens=32)')
CURVE = (
    "curve",
    'from sinklab.lab.studies.curve.study import masking_curve; masking_curve(lm, "runs/curve")',
)
"""what measures an answer: a command, and Python"""
ARMS = {"none": "none", "top": "sinks", "random": "random", "equal_mass": "equal_mass"}
"""arm of a curve -> its name in the table ``heldout`` of a trace"""


def answers_of(study: Any) -> Answers:
    """The three answers about the model of a study, a `Study`, with the controls of its run."""
    if study.layers:
        found = [_exists(study), _stays(study)]
    else:
        said = f"Not measured; this measures it: `{command_of(study, *TRACE)}`."
        found = [Answer(question, "not measured", said) for question in ("exist", "stay")]
    return Answers(study.label, (*found, _costs(study)))


def _exists(study: Any) -> Answer:
    """The first question; its control is that of a few canvases, if no others were run."""
    controls = {kind: _existence(twin) for kind, twin in study.twins.items()}
    few = study.table("control")
    lack = ""
    if not controls and few is not None and study.received == "received":
        why = few["why"][few["why"] != ""].unique()
        lack = "; ".join(why) or "too few queries see any key"
        if few["control"].notna().any():
            unknown_S = np.full(len(few), np.nan)
            shares = few["control"].to_numpy(), few["strongest"].to_numpy()
            controls["permuted"] = Existence(shares[0], unknown_S, unknown_S, own_S=shares[1])
    return exists(_existence(study), controls, lack)


def _stays(study: Any) -> Answer:
    return stays(_staying(study), {kind: _staying(twin) for kind, twin in study.twins.items()})


def _existence(study: Any) -> Existence:
    seen = pd.DataFrame(study.measured.strongest_keys)
    strongest_S, strong_S, ruled_S = seen[["strongest", "strong", "ruled"]].to_numpy(float).T
    even, heads = 1 / float(seen["positions"].mean()), len(study.layers) * len(study.heads)
    added_S = seen["added"].dropna().to_numpy()
    return Existence(strongest_S, strong_S, ruled_S, even, heads=heads, added_S=added_S)


def _staying(study: Any) -> Staying:
    """The paths of the sinks: of more texts, if a run of these stands beside the study."""
    compared = "windows" if study.reading == SO_FAR else "steps"
    more, name, texts = study.beside.get("texts"), of_twin("staying", study.twin), ""
    if more is not None and name in more.tables:
        table, texts = more.table(name), "measured beforehand"
    else:
        table = staying_table(study)
    held: Counter[str] = Counter()
    for holders in table["holders"]:
        held.update(json.loads(holders))
    total = max(held.total(), 1)
    named = [(_named(label), count / total) for label, count in held.most_common(MOST_HOLDERS)]
    return Staying(table["mobility"].to_numpy(float), named, compared, texts)


def staying_table(study: Any) -> pd.DataFrame:
    """A row a sample: its mobility, and how often each token is strongest in a head (JSON)."""
    held = [json.dumps(one["holders"]) for one in study.measured.strongest_keys]
    return pd.DataFrame({"mobility": mobility_of(study.motion), "holders": held})


def _named(label: str) -> str:
    named = {FIRST: f"the {FIRST}", OTHER: "other tokens"}
    return named.get(label) or quoted(label)


def mobility_of(motion: MotionSummary) -> np.ndarray:
    """Mobility of each sample, (N,); NaN for one without sinks at two steps."""
    return np.asarray(ratio(motion.sums["mobility"], motion.sums["mobility_weight"]), dtype=float)


def _costs(study: Any) -> Answer:
    own = _cost(study)
    controls = {}
    if own is not None:
        changes = {kind: _cost(twin) for kind, twin in study.twins.items()}
        controls = {
            kind: one.masked - one.clean for kind, one in changes.items() if one is not None
        }
    return costs(own, controls, command_of(study, *CURVE))


def _cost(study: Any) -> Cost | None:
    """The losses with the fewest keys blocked (one, if that was scored)."""
    if study.heldout is None:
        return None
    clean, arms = blocked_at(study.heldout)
    if arms.empty:
        return None
    sinks, found = arms.loc["sinks"], [mean_over([])] * 3
    if "losses" in arms:
        by_arm = dict(arms["losses"]) | {"": clean["losses"]}
        nothing = sinks["losses"][:0]
        for place, name in enumerate(("", "random", "equal_mass")):
            mine = sinks["losses"] if name in by_arm else nothing
            found[place] = mean_over(np.subtract(mine, by_arm.get(name, nothing)))
    delta, beyond, beyond_equal = found
    others: dict[str, Any] = {
        name: float(arms["delta"].get(name, np.nan)) for name in ("random", "equal_mass")
    }
    if "grown" in arms:
        others |= {"grown_R": np.asarray(sinks["grown"]), "grown_at": sinks["grown_at"]}
    losses = float(clean["loss"]), float(sinks["loss"])
    others["beyond_equal"] = beyond_equal
    cost = Cost(int(sinks["k"]), *losses, delta, beyond, **others)
    return replace(cost, alone=_alone(study, cost))


def _alone(study: Any, cost: Cost) -> tuple[str, float] | None:
    """The head whose own strongest key costs more than half of that of all heads, by the whole
    interval, and its cost; from a map by head beside the study.
    """
    run = study.beside.get("map")
    if run is None or study.twin or run.info.settings["by"] != "head" or cost.keys != 1:
        return None
    cells = run.table("curve")
    most = cells.loc[cells["mean"].idxmax()]
    if not most["low"] > (cost.masked - cost.clean) / 2:
        return None
    return f"head {most['head']:.0f} of layer {most['layer']:.0f}", float(most["mean"])


def command_of(study: Any, command: str, python: str) -> str:
    """The command that measures something of the model of a run, or Python if none can load it."""
    model = study.run.info.model
    if model.get("wrapped"):
        return python
    return f"sinklab {command} --model {shlex.quote(str(model.get('name', 'MODEL')))}"


def contrast_of(studies: Iterable[Any]) -> str:
    """How the models of a page differ, in one sentence; empty for one."""
    recorded = [study for study in studies if study.layers]
    return contrast([(study.answers, mobility_of(study.motion)) for study in recorded])


def heldout_of(curve: Run, twin: str = "") -> pd.DataFrame | None:
    """The table ``heldout`` of a trace, made of a run of kind "curve"; None if it, or its control,
    is not finished.

    Columns: k, control, loss, stderr, delta, delta_stderr, tokens, losses (R,), bits_per_byte;
    grown (R,), the share of heads in which a sink grew, by row, and grown_at, the place of
    most of these in a row.
    """
    names = of_twin("curve", twin), of_twin("curve_rows", twin)
    if not {*names} <= {*curve.tables}:
        return None
    table, by_row = (curve.table(name) for name in names)
    rows = by_row.set_index(["k", "control"]).sort_index()
    clean_R = rows.loc[[(0, "none")], "loss"].to_numpy()
    lines = []
    for cell in table[table["control"].isin(ARMS)].to_dict("records"):
        some = rows.loc[[(cell["k"], cell["control"])]]
        loss_R = some["loss"].to_numpy()
        line = {name: cell[name] for name in ("k", "loss", "tokens")}
        line |= {"control": ARMS[cell["control"]], "delta": cell["mean"], "losses": loss_R.tolist()}
        line |= {"stderr": _error(loss_R), "delta_stderr": _error(loss_R - clean_R)}
        line |= {"bits_per_byte": np.nan if cell["k"] else cell["bits_per_byte"]}
        if line["control"] == "sinks":
            places = some["grown_at"].dropna().astype(int)
            line |= {"grown": some["regrown"].tolist(), "grown_at": places.tolist()}
        lines.append(line)
    return pd.DataFrame(lines)


def blocked_at(table: pd.DataFrame, place: int = 0) -> tuple[pd.Series, pd.DataFrame]:
    """Of a table ``heldout`` the row with nothing blocked, and those with the fewest sinks blocked
    (``place`` -1: with the most) and as many other keys, by control; no rows if there are none.
    """
    by_k = {k: rows.set_index("control") for k, rows in table.groupby("k")}
    clean = by_k.pop(0).iloc[0]
    arms = [rows for rows in by_k.values() if "sinks" in rows.index]
    return clean, arms[place] if arms else table[:0]


def _error(values_R: np.ndarray) -> float:
    """Standard error over rows; NaN with one."""
    return float(pd.Series(values_R).sem())


def beside_of(study: Run, runs: Sequence[Run]) -> dict[str, Run]:
    """The first run of each kind about the same model: of its name, and of its weights if both
    runs noted them; a curve by layer or head is of kind "map".
    """
    found: dict[str, Run] = {}
    for run in runs:
        one, other = study.info.model, run.info.model
        weights = one.get("weights_sha256"), other.get("weights_sha256")
        if one.get("name") == other.get("name") and (None in weights or weights[0] == weights[1]):
            kind = run.info.kind
            if kind == "curve" and run.info.settings.get("by", "model") != "model":
                kind = "map"
            found.setdefault(kind, run)
    return found
