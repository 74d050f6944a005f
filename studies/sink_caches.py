"""Does protecting sinks help a block cache at equal budget? Every cache on the packaged pair.

    python studies/sink_caches.py run MODEL      fidelity and written texts; goes on where it was
                                                 stopped
    python studies/sink_caches.py tables         results.json and figures from what `run` left

Runs are kept under runs/sink_caches (or $SINKLAB_STUDY); sink_caches/ beside this file holds the
results. Time and memory are measured by benchmarks/cache_policies.py.
"""

import argparse
import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sinklab.lab.checkpoints import load
from sinklab.lab.records import open_run
from sinklab.lab.reports.printed import save_figure
from sinklab.lab.studies.caches.figures import caches_figure
from sinklab.lab.studies.caches.study import CacheSettings, cache_fidelity

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/sink_caches"))
RESULTS = Path(__file__).with_suffix("")
SETTINGS = CacheSettings(
    cache_keep=(0.5, 0.25, 0.125),
    protect=("now", "first"),
    rows=12,
    batch=12,
    prompt_tokens=192,
    new_tokens=32,
    texts=0,
    repeats=0,
)
"""Fidelity on the same half-revealed text."""
WRITTEN = dataclasses.replace(
    SETTINGS, cache_keep=(0.125,), protect=("now",), sparse=True, rows=8, batch=8, texts=8
)
"""Texts written under the smallest budget, and sparse attention."""


def run(model: str) -> None:
    torch.set_num_threads(1)
    loaded = load(model)
    for name, settings in (("", SETTINGS), ("-written", WRITTEN)):
        folder = RUNS / f"{Path(model).name}{name}"
        cache_fidelity(loaded, folder, settings, progress=print, resume=True)


def tables() -> None:
    RESULTS.mkdir(exist_ok=True)
    results: dict[str, Any] = {}
    for folder in sorted(path.parent for path in RUNS.glob("*/run.json")):
        done = open_run(folder)
        results[folder.name] = {
            "model": done.info.model,
            "settings": done.info.settings,
            "versions": done.info.versions,
            "policies": _records(done.table("policies")),
            "protection": _records(done.table("protection")),
        }
        if not folder.name.endswith("-written"):
            save_figure(partial(caches_figure, done), RESULTS / folder.name)
    (RESULTS / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Lines of a table, five decimals; null where nothing was measured."""
    return json.loads(table.round(5).to_json(orient="records"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "tables"))
    parser.add_argument("model", nargs="?", default="tiny")
    options = parser.parse_args()
    run(options.model) if options.what == "run" else tables()


if __name__ == "__main__":
    main()
