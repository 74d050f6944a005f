"""Time of masking curves and of maps by layer over that of the code before, by turns.

    python benchmarks/curves.py --before CHECKOUT [--models tiny FOLDER …]
        [--rows 48] [--batch 16] [--repeats 7] [--only curve map]

`--before` is a checkout of an older commit. Two processes, one with each code, load a model once
and take turns; wall and processor time of a study's call count, with its run folder, without import
and load. A curve has k = 0, 1, 5, 10 and the controls sinks and random, a map one key by layer, on
rows of 128 tokens. Losses that both wrote are compared. A result file of the same day is added to.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()


def work(model: str) -> None:
    """Answer each line of the input, settings of a study, with its times and losses."""
    import torch

    from sinklab.lab.checkpoints.loading import load
    from sinklab.lab.records import open_run
    from sinklab.lab.studies.curve.study import CurveSettings, masking_curve

    torch.set_num_threads(1)
    loaded = load(model)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            settings = CurveSettings(**json.loads(line))
            wall, cpu = time.perf_counter(), time.process_time()
            path = masking_curve(loaded, f"{folder}/run", settings)
            times = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            run = open_run(path)
            losses = run.table("curve_rows")["loss"].tolist()
            print(json.dumps(times | {"losses": losses}), flush=True)


class Turn:
    """A process with one of the codes."""

    def __init__(self, checkout: Path, model: str) -> None:
        command = [sys.executable, str(HERE), "--work", model]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        )

    def ask(self, settings: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(settings), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def compared(options: argparse.Namespace, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of both codes by turns, the ratios of the turns, and how far losses are apart."""
    turns = {"before": Turn(options.before, model), "after": Turn(HERE.parent.parent, model)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    for number in range(options.repeats + 1):
        for name, turn in turns.items():
            found[name] += [turn.ask(settings)] if number else []
            if not number:
                # imports and first allocations
                turn.ask(settings | {"rows": 1, "batch": 1})
    for turn in turns.values():
        turn.process.stdin.close()
        turn.process.wait()
    result: dict[str, Any] = {"settings": settings}
    for kind in ("wall_s", "cpu_s"):
        before, after = ([one[kind] for one in found[name]] for name in ("before", "after"))
        each = [new / old for new, old in zip(after, before, strict=True)]
        result[kind] = {"before": before, "after": after}
        result[kind]["ratio"] = {"median": median(each), "min": min(each), "max": max(each)}
    pairs = zip(found["before"][0]["losses"], found["after"][0]["losses"], strict=True)
    result["losses_apart_by_at_most"] = max(abs(old - new) for old, new in pairs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path)
    parser.add_argument("--models", nargs="+", default=["tiny"])
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=("curve", "map"), default=["curve", "map"])
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    from measure import RESULTS, write_result

    sizes = {"rows": options.rows, "batch": options.batch, "length": 128}
    kinds = {
        "curve": sizes | {"ks": [0, 1, 5, 10], "controls": ["sinks", "random"], "twin": False},
        "map": sizes | {"by": "layer", "twin": False},
    }
    results: dict[str, Any] = {}
    known = RESULTS / f"curves_cpu_{datetime.date.today().isoformat()}.json"
    if known.exists():
        results = json.loads(known.read_text())["studies"]
    for model in options.models:
        for kind in options.only:
            one = compared(options, model, kinds[kind])
            results[f"{kind}, {Path(model).name}"] = one
            print(f"{kind}, {model}:", one["wall_s"]["ratio"], one["cpu_s"]["ratio"], flush=True)
            print(f"    losses apart by {one['losses_apart_by_at_most']:.2g}", flush=True)
            about = {"what": "seconds of a study after over before, by turns, one thread"}
            path = write_result("curves", about | {"studies": results})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
