"""Which of a diffusion model's habits makes it robust to blocked sinks? The reasoning battery,
asked in several ways.

    sinklab train battery-start && sinklab train battery && sinklab train battery-causal
    sinklab train battery --window 8 --out runs/battery-window
    python studies/reasoning_battery.py score DLM CAUSAL [WINDOWED RADIUS]   folders of models, e.g.
                                                                             runs/battery/model
    python studies/reasoning_battery.py tables                               tables and figures from
                                                                             what `score` left

`score` goes on where it was stopped. With --only NAME … it runs some of the parts (several
processes, one part each); --problems and --levels make a smaller trial, which needs a place of its
own.

Runs are kept under runs/battery-study (or $SINKLAB_STUDY); reasoning_battery/ beside this file
holds the results.
"""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sinklab.lab.checkpoints import load
from sinklab.lab.records import Run, open_run
from sinklab.lab.reports.drawing import write_figure
from sinklab.lab.reports.style import theme_named
from sinklab.lab.studies.battery.figures import (
    battery_by_removed,
    battery_by_skill,
    battery_contrasts,
    battery_gate,
    battery_scores,
    battery_sentences,
)
from sinklab.lab.studies.battery.study import BatterySettings, score_battery
from sinklab.lab.training import recipe

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/battery-study"))
RESULTS = Path(__file__).with_suffix("")
PROBLEMS = 50
KS, FEW_KS = (0, 1, 2, 5, 10), (0, 1, 2, 5)
EASY = (1, 2)
CONTROLS = ("sinks", "clean_pass", "random")
FOUR = (*CONTROLS, "random_clean_pass")


def plan(radius: int | None) -> dict[str, tuple[str, BatterySettings]]:
    """Part -> (which model, what to do). The decoders are compared where there is room for a drop,
    on easy levels.
    """
    easy = BatterySettings(problems=PROBLEMS, levels=EASY, ks=FEW_KS, controls=CONTROLS)
    parts = {
        "denoising": (
            "dlm",
            BatterySettings(problems=PROBLEMS, ks=KS, controls=CONTROLS, conditions=("pure",)),
        ),
        "autoregressive": ("causal", BatterySettings(problems=PROBLEMS, ks=KS, controls=FOUR)),
        "blocks of 6": ("dlm", dataclasses.replace(easy, conditions=("blocks-6",))),
        "left to right": ("dlm", dataclasses.replace(easy, conditions=("left_to_right",))),
        "random order": ("dlm", dataclasses.replace(easy, conditions=("random",))),
    }
    if radius is not None:
        window = (f"window-{radius}",)
        parts["window, untrained"] = ("dlm", dataclasses.replace(easy, conditions=window))
        parts["window, trained"] = ("windowed", dataclasses.replace(easy, ks=KS, conditions=window))
    return parts


def score(given: argparse.Namespace) -> None:
    """Every part that is not finished, in turn."""
    torch.set_num_threads(1)
    parts = plan(given.radius)
    if unknown := set(given.only) - set(parts):
        raise SystemExit(f"parts are {', '.join(parts)}, but not {', '.join(sorted(unknown))}")
    folders = {"dlm": given.dlm, "causal": given.causal, "windowed": given.windowed}
    for name, (which, settings) in parts.items():
        if given.only and name not in given.only:
            continue
        changes: dict[str, Any] = {"problems": given.problems} if given.problems else {}
        changes |= {"levels": tuple(given.levels)} if given.levels else {}
        print(f"{name}: {folders[which]}", flush=True)
        started = time.process_time()
        score_battery(
            load(folders[which]),
            RUNS / name,
            dataclasses.replace(settings, **changes),
            progress=lambda text: print(f"    {text}", flush=True),
            resume=True,
        )
        print(f"    {time.process_time() - started:.0f} s of one core", flush=True)


def tables() -> None:
    """results as CSV and Markdown, figures as PNG."""
    runs = {name: open_run(RUNS / name) for name in plan(1) if (RUNS / name / "run.json").is_file()}
    RESULTS.mkdir(exist_ok=True)
    every = list(runs.values())
    scores = battery_scores(every).round(4)
    _write("gate", battery_gate(every).round(4))
    _write("scores", scores)
    _write("summary", _summary(scores))
    _write("contrasts", _contrasts(runs).round(4))
    _write("by_level", _by_level(every))
    _write("taken", _taken(every).round(4))
    _figures(runs)
    settings = {name: run.info.settings for name, run in runs.items()}
    models = {
        name: {key: run.info.model[key] for key in ("family", "parameters", "weights_sha256")}
        for name, run in runs.items()
    }
    training = {
        name: dataclasses.asdict(recipe(name))
        for name in ("battery-start", "battery", "battery-causal")
    }
    config = {"training": training, "scoring": settings, "models": models}
    (RESULTS / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print("\n".join(battery_sentences(every)))


def _summary(scores: pd.DataFrame) -> pd.DataFrame:
    """All skills and levels of a part, differences in points with their intervals."""
    table = scores[scores["skill"] == "all"]
    found = {name: table[name] for name in ("series", "control", "k", "n", "clean", "share")}
    for name in ("delta", "beyond"):
        found[name] = [
            "–"
            if pd.isna(row[0])
            else "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * value for value in row))
            for row in table[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
        ]
    return pd.DataFrame(
        found | {name: table[name] for name in ("removed", "of_keys", "empty", "endless")}
    )


def _contrasts(runs: dict[str, Run]) -> pd.DataFrame:
    """Every part against pure diffusion, and the autoregressive model against the order that is its
    own.
    """
    pairs = [("denoising", name) for name in runs if name != "denoising"]
    pairs += [("left to right", "autoregressive"), ("window, untrained", "window, trained")]
    found = [
        battery_contrasts([runs[one], runs[other]])
        for one, other in pairs
        if one in runs and other in runs
    ]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def _by_level(runs: list[Run]) -> pd.DataFrame:
    table = battery_scores(runs, by_level=True)
    return table[
        ["series", "control", "k", "skill", "level", "n", "share", "delta", "beyond", "removed"]
    ].round(4)


def _taken(runs: list[Run]) -> pd.DataFrame:
    """What hiding took away, mean over skills, levels and layers."""
    rows = [run.table("removed").assign(series=run.path.name) for run in runs]
    whole = pd.concat(rows, ignore_index=True)
    names = ["share", "mass", "overlap", "of_keys"]
    return whole.groupby(["series", "control", "k"], as_index=False, sort=False)[names].mean(
        numeric_only=True
    )


def _write(name: str, table: pd.DataFrame) -> None:
    if not table.empty:
        table.to_csv(RESULTS / f"{name}.csv", index=False)


def _figures(runs: dict[str, Run]) -> None:
    pictures = {
        "models": [
            name for name in ("denoising", "autoregressive", "window, trained") if name in runs
        ],
        "decoders": [
            name
            for name in ("denoising", "blocks of 6", "left to right", "random order")
            if name in runs
        ],
        "windows": [
            name for name in ("denoising", "window, untrained", "window, trained") if name in runs
        ],
    }
    for name, shown in pictures.items():
        if len(shown) < 2:
            continue
        some = [runs[part] for part in shown]
        # models were asked four levels, decoders two: easy levels are what all have
        for level in EASY:
            figure = battery_by_skill(some, controls=CONTROLS, labels=shown, levels=(level,))
            write_figure(figure, RESULTS / f"{name}_level_{level}", ("png",), theme_named("light"))
    both = [name for name in ("denoising", "autoregressive") if name in runs]
    if len(both) == 2:
        figure = battery_by_removed([runs[name] for name in both], labels=both)
        write_figure(figure, RESULTS / "removed", ("png",), theme_named("light"))


def main() -> None:
    """Read the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    scoring = commands.add_parser("score")
    scoring.add_argument("dlm")
    scoring.add_argument("causal")
    scoring.add_argument("windowed", nargs="?")
    scoring.add_argument("radius", nargs="?", type=int)
    scoring.add_argument("--only", nargs="+", default=[])
    scoring.add_argument("--problems", type=int)
    scoring.add_argument("--levels", nargs="+", type=int)
    commands.add_parser("tables")
    given = parser.parse_args()
    if given.command == "tables":
        return tables()
    if (given.windowed is None) != (given.radius is None):
        parser.error("a window-trained model comes with the radius it was trained with")
    return score(given)


if __name__ == "__main__":
    main()
