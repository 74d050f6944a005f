"""What blocked keys cost in loss, over their number and over their attention, for the packaged
models.

    python studies/masking_curve.py score [MODEL]    one model, or all that are missing
    python studies/masking_curve.py tables           results.json and the figures from what `score`
                                                     left

Run folders are kept under runs/masking-curve (or $SINKLAB_STUDY); masking_curve/ beside this file
holds the results.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from sinklab.lab.checkpoints import load
from sinklab.lab.records import open_run
from sinklab.lab.reports import write_figure
from sinklab.lab.studies.curve import figures
from sinklab.lab.studies.curve.study import CurveSettings, masking_curve
from sinklab.lab.studies.curve.verdicts import cost_sentences

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/masking-curve"))
RESULTS = Path(__file__).with_suffix("")
MODELS = ("tiny", "tiny-sink", "tiny-causal")
SETTINGS = CurveSettings(ks=(0, 1, 2, 5, 10, 20, 50, 100), rows=64, twin=True)  # the excerpt has 53


def score(name: str) -> None:
    """A run folder of kind "curve"."""
    masking_curve(load(name), RUNS / name, SETTINGS, progress=print)


def tables() -> None:
    """results.json, masking_curve.csv and the figures."""
    runs = [open_run(RUNS / name) for name in MODELS]
    written = figures.write_costs(runs, RESULTS, ())
    for over, stem in {"count": "masking_curve", "mass": "masking_curve_mass"}.items():
        axes = figures.masking_curve(runs, over=over)
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.yaxis.set_major_formatter("{x:g}")
        write_figure(axes, RESULTS / stem, ("png",))
    (RESULTS / "masking_curve.md").unlink()  # masking_curve.csv has all of it
    found: dict[str, Any] = {
        "settings": dataclasses.asdict(SETTINGS),
        "sentences": cost_sentences(runs),
    }
    for run in runs:
        model = {
            key: value for key, value in run.info.model.items() if key not in ("name", "revision")
        }
        found[run.path.name] = {
            "model": model,
            "versions": run.info.versions,
            "curve": json.loads(run.table("curve").to_json(orient="records", double_precision=6)),
        }
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / "results.json").write_text(text, encoding="utf-8")
    print("\n".join([*found["sentences"], *map(str, written[1:2])]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("score", "tables"))
    parser.add_argument("model", nargs="?", choices=MODELS)
    given = parser.parse_args()
    if given.command == "tables":
        tables()
        return
    for name in [given.model] if given.model else MODELS:
        score(name)


if __name__ == "__main__":
    main()
