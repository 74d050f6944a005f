"""What hidden sinks cost in loss, over their number: the embedded pair against an autoregressive model.

    python studies/masking_curve.py train CORPUS HELDOUT   the autoregressive model: laptop-causal at the size below
    python studies/masking_curve.py score [MODEL…]         tiny, tiny-sink and these; with none, the one `train` makes
    python studies/masking_curve.py tables                 results.json and the figure from what `score` left

`train` goes on where it was stopped; `score` leaves alone what is there, and trains the recipe laptop-causal on
Python's own documentation where no autoregressive model is given or there. Run folders are kept under
runs/masking-curve (or $SINKLAB_STUDY); masking_curve/ beside this file holds the results.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from sinklab.checkpoints import load
from sinklab.records import Run, open_run
from sinklab.studies.curve.figures import masking_curve_sentences, write_masking_curves
from sinklab.studies.curve.study import CurveSettings, masking_curve
from sinklab.training import TrainSettings, recipe, train

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/masking-curve"))
RESULTS = Path(__file__).with_suffix("")
TOKENIZER = Path(__file__).parents[1] / "src" / "sinklab" / "checkpoints" / "packaged" / "tiny"
PAIR = ("tiny", "tiny-sink")
SETTINGS = CurveSettings(ks=(0, 1, 2, 5, 10, 20, 50, 100), rows=64, draws=4)


def causal(corpus: str | None = None, heldout: str | None = None) -> TrainSettings:
    """The autoregressive model: 1.7M parameters on the books, or the recipe as it is on Python's documentation."""
    if corpus is None:
        return recipe("laptop-causal", out=str(RUNS / "causal"), threads=torch.get_num_threads())
    return recipe(
        "laptop-causal",
        backbone="llama",
        kv_heads=None,
        corpus=corpus,
        heldout=heldout,
        tokenizer=str(TOKENIZER),
        hidden_size=128,
        layers=6,
        heads=4,
        mlp_size=352,
        length=256,
        batch=16,
        steps=1500,
        lr=2e-3,
        threads=1,
        out=str(RUNS / "causal"),
    )


def trained(settings: TrainSettings) -> Path:
    """The folder of the model; trained, or trained to its end, unless it is there."""
    folder = Path(settings.out) / "model"
    if not (folder / "config.json").is_file():
        begun = (Path(settings.out) / "run.json").is_file()
        train(dataclasses.replace(settings, resume=begun), progress=print)
    return folder


def score(models: list[str]) -> None:
    """A run folder of kind "curve" for each model."""
    for name in [*PAIR, *(models or [str(trained(causal()))])]:
        label = Path(name).parent.name if Path(name).name == "model" else Path(name).name
        folder = RUNS / "curves" / label
        if (folder / "run.json").is_file() and open_run(folder).info.status == "complete":
            continue
        masking_curve(load(name), folder, SETTINGS, progress=print, overwrite=(folder / "run.json").is_file())


def scored() -> list[Run]:
    """The finished run folders, the pair first."""
    runs = {folder.parent.name: open_run(folder.parent) for folder in sorted((RUNS / "curves").glob("*/run.json"))}
    return [runs.pop(name) for name in PAIR if name in runs] + list(runs.values())


def tables() -> None:
    """results.json, masking_curve.md and .csv, and the figure."""
    runs = scored()
    written = write_masking_curves(runs, RESULTS, change="log")
    found: dict[str, Any] = {"settings": dataclasses.asdict(SETTINGS), "sentences": masking_curve_sentences(runs)}
    for run in runs:
        model = {key: value for key, value in run.info.model.items() if key not in ("name", "revision")}
        found[run.path.name] = {
            "model": model,
            "versions": run.info.versions,
            "curve": json.loads(run.table("curve").to_json(orient="records", double_precision=6)),
        }
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / "results.json").write_text(text, encoding="utf-8")
    print("\n".join([*found["sentences"], *map(str, written[:1])]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "score", "tables"))
    parser.add_argument("names", nargs="*", help="CORPUS and HELDOUT, or models")
    given = parser.parse_args()
    if given.command == "train":
        if len(given.names) != 2:
            parser.error("train takes CORPUS and HELDOUT")
        print(trained(causal(*given.names)))
    elif given.command == "score":
        score(given.names)
    else:
        tables()


if __name__ == "__main__":
    main()
