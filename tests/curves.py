"""Runs of kind "curve" with planted costs."""

import numpy as np
import pandas as pd
import torch

from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.scoring.arms import HeldoutRows
from sinklab.lab.studies.curve.arms import cost_table
from sinklab.lab.studies.curve.study import CurveSettings

SIZES = {"top": 1, "sinks": 1, "matched": 1, "equal_mass": 0.5, "random": 0.1}
"""Arm -> its cost in multiples of that of the strongest keys."""


def curve_rows(losses, **columns):
    """The table ``curve_rows`` of losses by (k, control), or (k, control, layer, head)."""
    frames = []
    for (k, control, *place), loss_R in losses.items():
        layer, head = place or (-1, -1)
        known = {"row": np.arange(len(loss_R)), "k": k, "control": control, "layer": layer}
        known |= {"head": head, "loss": loss_R, "keys": k, "sinks": 0.25, "regrown": 0.0}
        known |= {"held": 0.02 * k, "removed": 0.02 * k, "matched": 0.75, "grown_at": np.nan}
        frames.append(pd.DataFrame(known | {"strongest": 0.1, "strong": 0.5} | columns))
    return pd.concat(frames, ignore_index=True)


def write_curve(folder, rows, family="diffusion", twins=None, **settings):
    """A run of these rows; `twins`: those of controls, by name."""
    settings = {"by": "model", "sink_rule": None, "ks": [1], **settings}
    asked = CurveSettings(by=settings["by"])
    text = HeldoutRows(torch.zeros(rows["row"].nunique(), 10), 100)
    about = {"kind": "curve", "model": {"name": folder.name, "family": family}}
    with RunWriter(folder, **about, settings=settings, seed=0) as run:
        for suffix, some in {"": rows, **(twins or {})}.items():
            run.table(f"curve_rows{suffix}", some)
            run.table(f"curve{suffix}", cost_table(some, asked, text))
        if twins:
            names = [suffix.strip("-") for suffix in twins]
            run.table(
                "twins", {"twin": names, "made": [True] * len(names), "why": [""] * len(names)}
            )
    return open_run(folder)


def curve(folder, family="diffusion", rise=0.1, *, controls=("top", "random"), mass=0.02, **how):
    """A run of 10 rows: `rise` nats a key, and `mass` of the attention removed by one."""
    rows = planted(rise, controls, mass, **how)
    return write_curve(folder, rows, family, sink_rule=how.get("sink_rule"))


def planted(rise, controls, mass=0.02, **how):
    """The rows of `curve`."""
    spread_R = 0.02 * np.linspace(-1, 1, 10)
    losses = {(0, "none"): 4 + spread_R}
    for k in (1, 5):
        for name in controls:
            losses[k, name] = 4 + k * rise * SIZES[name] + spread_R * (1 + k)
    rows = curve_rows(losses, strong=how.get("strong", 0.5), matched=how.get("matched", 0.75))
    return rows.assign(held=mass * rows["k"], removed=mass * rows["k"])


def costed(run, rise=0.5, **twins):
    """The run, and a masking curve of its model: blocking one key costs a fifth of `rise`, five
    keys cost it; random ones cost 0.01 and 0.02. `twins`: the rise of controls.
    """
    folder = run.path.parent / f"{run.path.name}-curve" / run.info.model["name"]
    rows = {f"-{kind}": known_costs(one) for kind, one in twins.items()}
    return [run, write_curve(folder, known_costs(rise), twins=rows)]


def known_costs(rise):
    """The rows of the curve of `costed`."""
    wobble_R = np.array([-0.05, 0.03, 0.02, -0.01, 0.04, -0.03, 0.01, -0.01])
    changes = {(0, "none"): 0.0, (1, "top"): rise / 5, (1, "random"): 0.01}
    changes |= {(5, "top"): rise, (5, "random"): 0.02}
    return curve_rows({arm: 4 + one + wobble_R * (0.2 + one) for arm, one in changes.items()})
