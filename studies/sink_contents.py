"""What a future sink carries: the embedded pair, sinks by the published rule and the strongest keys
of each place.

    python studies/sink_contents.py run NAME CHOOSE [OUT]   one run folder: tiny or tiny-sink;
                                                            excess or strongest
    python studies/sink_contents.py tables [OUT]            results.json and figures from the
                                                            folders

Run folders are kept under runs/contents (or OUT); sink_contents/ beside this file holds the
results. A run that was stopped goes on where it stopped.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from sinklab.lab.checkpoints import load
from sinklab.lab.records import Run, open_run
from sinklab.lab.records.info import of_twin
from sinklab.lab.studies.contents.figures import (
    contents_places,
    contents_sentences,
    save_contents_figures,
)
from sinklab.lab.studies.contents.study import ContentsSettings, sink_contents
from sinklab.lab.studies.scored import twins_of

RESULTS = Path(__file__).with_suffix("")
MODELS, CHOICES = ("tiny", "tiny-sink"), ("excess", "strongest")
TEXTS, EVERY = 24, 6


def run(name: str, choose: str, out: Path) -> None:
    """24 texts of 32 tokens and 96 new ones at temperature 1, in three blocks; states at every
    sixth step.
    """
    torch.set_num_threads(1)
    settings = ContentsSettings(rows=TEXTS, every=EVERY, choose=choose, twin=True)
    sink_contents(load(name), out / f"{name}-{choose}", settings, progress=print, resume=True)


def tables(out: Path) -> None:
    """Every number of the page, and the figures, of the run folders there are, finished or not."""
    RESULTS.mkdir(exist_ok=True)
    results = {}
    for name in MODELS:
        for choose in CHOICES:
            folder = out / f"{name}-{choose}"
            if not folder.is_dir():
                continue
            found = open_run(folder)
            looks = found.table("looks").groupby(["place", "layer"])[
                ["positions", "sinks", "pairs"]
            ]
            kept = {"looks": looks.mean().join(looks.size().rename("looks")).reset_index()}
            kept |= {
                table: found.table(table) for table in ("lens", "probes") if table in found.tables
            }
            for kind in twins_of(found):
                theirs = found.table(of_twin("probes", kind))
                kept[of_twin("probes", kind)] = theirs[theirs["place"] == "future"]
            if "added" in found.tables:
                kept["added"] = _added(found)
            results[folder.name] = {
                "settings": found.info.settings,
                "texts": len(found.table("texts")),
                "texts_with_future_sinks": _texts_with_future_sinks(found),
                "sides": _sides(found),
                "sentences": contents_sentences([found]),
                **{table: _rounded(frame.to_dict("list")) for table, frame in kept.items()},
            }
            shown = [place for place in ("future", "committed") if place in contents_places(found)]
            save_contents_figures(found, RESULTS, shown, prefix=f"{folder.name}-")
    (RESULTS / "results.json").write_text(json.dumps(results, allow_nan=False) + "\n")


def _texts_with_future_sinks(run: Run) -> int:
    looks = run.table("looks")
    return int(looks[(looks["place"] == "future") & (looks["sinks"] > 0)]["text"].nunique())


def _sides(run: Run) -> dict[str, dict[str, float]]:
    """Future positions, after the last layer: how far sinks are from their matches, and both sides'
    share of top-1.
    """
    rows = run.table("samples")
    rows = rows[(rows["place"] == "future") & (rows["layer"] == rows["layer"].max())]
    if rows.empty:
        return {}
    wide = rows.pivot(
        index=["text", "pair"], columns="population", values=["position", "log10_rank"]
    )
    apart, first = wide["position"]["sink"] - wide["position"]["matched"], wide["log10_rank"] == 0
    found = {
        "apart": {
            "mean": float(apart.mean()),
            "mean_distance": float(apart.abs().mean()),
            "pairs": len(apart),
        }
    }
    for name, there in (("match_on_the_left", apart > 0), ("match_on_the_right", apart < 0)):
        found[name] = {"pairs": int(there.sum())}
        if there.any():
            found[name] |= {str(key): float(share) for key, share in first[there].mean().items()}
    return found


def _added(run: Run) -> pd.DataFrame:
    """Per layer: the share of attention on the added sink, and by how much its state differs
    between texts.
    """
    states = np.stack([run.array("states", "added", part) for part in run.parts("states")])
    share = run.table("added").groupby("layer")["share"].mean()
    spread = np.abs(states - states[0]).max(axis=(0, 2, 3))[: len(share)]
    return pd.DataFrame(
        {"layer": share.index, "share": share.to_numpy(), "spread": spread.astype(float)}
    )


def _rounded(columns: dict[str, list]) -> dict[str, list]:
    return {
        name: [
            None
            if isinstance(value, float) and math.isnan(value)
            else float(f"{value:.4g}")
            if isinstance(value, float)
            else value
            for value in values
        ]
        for name, values in columns.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("name", choices=MODELS)
    one.add_argument("choose", choices=CHOICES)
    for command in (one, commands.add_parser("tables")):
        command.add_argument("out", type=Path, nargs="?", default=Path("runs/contents"))
    given = parser.parse_args()
    if given.command == "run":
        run(given.name, given.choose, given.out)
    else:
        tables(given.out)
