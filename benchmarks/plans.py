"""How good plans are: what a command says it takes, what it says after its first part, and what it
takes.

    python benchmarks/plans.py [--models tiny FOLDER] [--data BENCHMARKS] [--only curve trace] \\
        [--quick]

Each command runs in a process of its own; its plan, the corrected one and the end are read from
what it prints, each with its time. `real` is what passes from the plan to the end of the process,
so that reading weights and drawing count, and what Python takes to start does not. Busy cores are
part of what is measured: a plan probes what the machine gives at that moment. Good is a plan within
a factor of two. --quick: short ones, written down nowhere.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import write_result

UNITS = {"s": 1, "min": 60, "h": 3600}
TIME = r"about ([\d.,]+) (s|min|h)"


def commands(model: str, data: str | None, *, quick: bool) -> dict[str, list[str]]:
    """Name -> arguments of every command that is measured with this model."""
    rows, steps, limit = ("4", "16", "4") if quick else ("16", "64", "20")
    found = {
        "trace": [
            "trace",
            "It was a dark night",
            "The house",
            "--model",
            model,
            "--new-tokens",
            steps,
        ],
        "curve": [
            "curve",
            "--model",
            model,
            "--rows",
            rows,
            "--length",
            "128",
            "--ks",
            "0",
            "1",
            "5",
        ],
    }
    if data is not None:
        tasks = [
            "--tasks",
            "piqa",
            "--data",
            data,
            "--limit",
            limit,
            "--mc-samples",
            "16",
            "--ks",
            "0",
            "5",
        ]
        found["table1"] = ["table1", "--model", model, *tasks]
    if model == "tiny":
        found["tour"] = ["tour", *["--quick"] * quick]
        found["train"] = ["train", "--steps", "20" if quick else "200", "--monitor-every", "10"]
    else:
        sizes = [
            "--steps",
            "4" if quick else "20",
            "--length",
            "128",
            "--batch",
            "4",
            "--heldout-rows",
            "8",
        ]
        found["train"] = ["train", "laptop-from-causal", "--init-from", model, *sizes]
    return found


def seconds(text: str) -> float | None:
    """The first time that a line names, in seconds."""
    match = re.search(TIME, text)
    return None if match is None else float(match[1].replace(",", "")) * UNITS[match[2]]


def measured(arguments: list[str]) -> dict[str, Any]:
    """Plan, corrected plan and real time of one command, in seconds; None where it says none."""
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m", "sinklab", *arguments, "--out", f"{folder}/out"]
        work = subprocess.Popen(
            own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        plan = corrected = began = None
        lines: list[str] = []
        for line in work.stdout or ():
            lines.append(line)
            if "plan, corrected" in line:
                corrected = seconds(line)
            elif "plan: " in line and plan is None:
                plan, began = seconds(line), time.perf_counter()
        failed = work.wait()
    if failed or began is None:
        raise SystemExit(f"{' '.join(arguments)}: no plan, or it failed\n{''.join(lines[-20:])}")
    real = time.perf_counter() - began
    silent = max_gap(lines)
    return {
        "plan": plan,
        "corrected": corrected,
        "real": real,
        "plan_over_real": (plan or 0) / real,
        "silent": silent,
    }


def max_gap(lines: list[str]) -> float:
    """The longest time between two lines that say when they were printed."""
    times = [
        float(match[1]) for match in (re.match(r" *([\d.]+) s  ", line) for line in lines) if match
    ]
    return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["tiny"], help="names or folders")
    parser.add_argument(
        "--data", help="folder of benchmark files, with piqa; table1 is left out without"
    )
    parser.add_argument("--only", nargs="+", help="names of commands")
    parser.add_argument("--quick", action="store_true", help="short ones, written down nowhere")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    data = None if options.data is None else str(Path(options.data).resolve())
    rows = []
    for model in options.models:
        for name, arguments in commands(model, data, quick=options.quick).items():
            if options.only is None or name in options.only:
                rows.append({"command": name, "model": Path(model).name, **measured(arguments)})
                shown = {
                    key: f"{value:.3g}" if isinstance(value, float) else value
                    for key, value in rows[-1].items()
                }
                print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
    if not options.quick:
        write_result("plans", {"rows": rows})


if __name__ == "__main__":
    main()
