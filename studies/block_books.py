"""Part 2 of block_sinks.md: do sinks stand still in blocks, in models of 1.7M parameters on books?

    python studies/block_books.py train --data FOLDER [--jobs 4]    what is missing of twelve
                                                                    models, so many at once
    python studies/block_books.py measure --data FOLDER [--jobs 4]  what they and their untrained \\
        twins attend to
    python studies/block_books.py report                            block_sinks/books.json, and the
                                                                    table of the page

FOLDER has train.jsonl.gz, heldout.jsonl.gz and tokenizer/, as `studies/scale/runbook.py pack`
writes them. A kind is causal, full, block4 or block16; of a seed all have the same rows, order and
initial weights. Three seeds are points.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import sinklab
from sinklab.lab.checkpoints.controls import untrained_twins
from sinklab.lab.data.rows import row_start
from sinklab.lab.records.reading import open_run
from sinklab.lab.records.storage import write_beside

sys.path.append(str(Path(__file__).parent))
from block_sinks import TWINNED, arms_of, moves, order_of, watched

KINDS = {"causal": None, "full": None, "block4": 4, "block16": 16}
SEEDS = (0, 1, 2)
TRAINING = {
    "hidden_size": 128,
    "layers": 6,
    "heads": 4,
    "mlp_size": 352,
    "length": 128,
    "batch": 16,
    "steps": 1465,
}
TRAINING |= {
    "lr": 2e-3,
    "optimizer": "muon",
    "muon_lr": 0.02,
    "row_start": True,
    "heldout_rows": 256,
    "warmup": 0.05,
}
"""16 × 128 tokens × 1,465 steps are 3.0M tokens; a row begins with a token that is never masked."""
ROWS, LENGTH, GIVEN = 24, 64, 32
"""Held-out rows that are revealed, and their first columns that are given."""
FIGURES = ("excess", "gu", "share", "mobility", "within", "across", "committed", "even", "first")


def settings_of(given: argparse.Namespace, kind: str, seed: int) -> Any:
    from sinklab.lab.training import TrainSettings

    size = KINDS[kind]
    objective = (
        "autoregressive" if kind == "causal" else "diffusion" if size is None else "block_diffusion"
    )
    data = {"corpus": given.data / "train.jsonl.gz", "heldout": given.data / "heldout.jsonl.gz"}
    data |= {"tokenizer": given.data / "tokenizer", "out": given.work / f"{kind}-{seed}"}
    files = {key: str(path) for key, path in data.items()}
    said = {"log_to": "none", "log_every": 100, "eval_every": 10**6, "save_every": 10**6}
    return TrainSettings(
        **TRAINING, **files, **said, objective=objective, block_length=size, seed=seed
    )


def train(given: argparse.Namespace, kind: str, seed: int) -> None:
    """One training run, where there is none."""
    from sinklab.lab.training import train as trained

    if not (given.work / f"{kind}-{seed}" / "model").exists():
        trained(settings_of(given, kind, seed))


def each(given: argparse.Namespace) -> None:
    """The command for every model, each in a process of its own."""

    def run(name: str) -> None:
        began, same = time.monotonic(), ["--data", str(given.data), "--work", str(given.work)]
        command = [sys.executable, __file__, given.command, *same, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True)
        said = "" if done.returncode == 0 else done.stderr[-600:]
        print(f"{name}: {time.monotonic() - began:.0f} s {said}", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run, [f"{kind}-{seed}" for seed in SEEDS for kind in KINDS]))


def rows_of(given: argparse.Namespace, tokenizer: Any) -> Tensor:
    """The beginnings of held-out documents, behind the start token, (R, S)."""
    import gzip

    rows = []
    with gzip.open(given.data / "heldout.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
            # several passages of a book: a document is long
            rows += [
                ids[start : start + LENGTH - 1]
                for start in range(2000, len(ids) - LENGTH, max(1, len(ids) // 8))
            ]
    step = max(1, len(rows) // ROWS)
    return torch.tensor([[*row_start(tokenizer), *row] for row in rows[::step][:ROWS]])


def measure(given: argparse.Namespace, kind: str, seed: int) -> None:
    """The measures of a model and of its untrained twins."""
    folder, found = given.work / f"{kind}-{seed}", []
    lm = sinklab.load(
        folder / "model", **({"as_diffusion": True, "mask_token_id": 2} if kind == "causal" else {})
    )
    ids_BS, loss = rows_of(given, lm.tokenizer), open_run(folder).table("heldout")["loss"].iloc[-1]
    for state, one in ({"trained": lm} | untrained_twins(lm, seed)).items():
        for arm in arms_of(kind):
            if state != "trained" and kind == "full" and arm not in TWINNED:
                continue
            order_BT = order_of(len(ids_BS), LENGTH, GIVEN, arm.size, seed)
            received, keys_T = watched(one.model, ids_BS, order_BT, arm, lm.special.mask)
            label = {
                "kind": kind,
                "seed": seed,
                "state": state,
                "arm": arm.name,
                "reading": arm.reading,
            }
            found.append(label | {"loss": float(loss)} | moves(received, keys_T, arm, GIVEN, 0))
    (folder / "measures.json").write_text(json.dumps(found), encoding="utf-8")


def report(given: argparse.Namespace) -> None:
    """books.json, and the table of the page."""
    files = sorted(given.work.glob("*/measures.json"))
    found = [line for file in files for line in json.loads(file.read_text("utf-8"))]
    path = Path(__file__).with_name("block_sinks") / "books.json"
    write_beside(path, lambda part: part.write_text(json.dumps(found), encoding="utf-8"))
    table = pd.DataFrame(found)
    print(table[table.state == "trained"].groupby("kind")["loss"].agg(["min", "max"]).to_string())
    table = table.groupby(["arm", "reading", "state"])[[name for name in FIGURES if name in table]]
    print(
        table.agg(
            lambda values: f"{values.mean():.2f} ({values.min():.2f} … {values.max():.2f})"
        ).to_string()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "measure", "report"))
    parser.add_argument("--data", type=Path, help="text and tokenizer")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/block_books"), help="run folders of the trainings"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.command == "report":
        report(given)
    elif given.one:
        kind, seed = given.one.split("-")
        {"train": train, "measure": measure}[given.command](given, kind, int(seed))
    else:
        each(given)


if __name__ == "__main__":
    main()
