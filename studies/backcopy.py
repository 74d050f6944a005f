"""Parts B to F of Bigram-Backcopy in one command: its models side by side, a processor each.

    python studies/backcopy.py run       train and measure what is missing, and put what is there
                                         into one run folder
    python studies/backcopy.py report    the sentences, table and figure of that folder

42 models: causal and diffusion twins of six seeds with masking (B, C, D), the causal ones converted
(E), and the diffusion twins' variants (F); 65 seconds of a processor each, those with masking 35
more. Whatever stops it, the same command goes on where it was. Each model has a run folder in
--work, with its weights in --work/models; --out gets the run folder of all that are finished and
work.tar.gz, with which another machine can go on.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.extras.backcopy.figures import backcopy_sentences, draw_backcopy
from sinklab.extras.backcopy.study import VARIANTS, Backcopy, BackcopySettings
from sinklab.lab.records import open_run
from sinklab.lab.records.writing import RunWriter

CHAINS = (
    (("causal", "plain"), ("converted", "plain")),
    (("diffusion", "plain"),),
    *((("diffusion", variant),) for variant in VARIANTS if variant != "plain"),
)
"""What trains one after another, longest first: a conversion goes on from the causal twin."""
TABLES = ("masking", "heads", "models")
PACK = "work.tar.gz"


def settings_of(given: argparse.Namespace) -> BackcopySettings:
    """Of all models together, as registered where no option says otherwise."""
    kinds = list(itertools.chain(*CHAINS))
    return BackcopySettings(
        seeds=tuple(given.seeds),
        objectives=tuple(dict.fromkeys(objective for objective, _ in kinds)),
        variants=tuple(dict.fromkeys(variant for _, variant in kinds)),
        layers=2,
        steps=given.steps,
        rows=given.rows,
        masking=True,
        models=str(given.work / "models"),
    )


def one_chain(asked: tuple[BackcopySettings, Path, int, tuple[tuple[str, str], ...]]) -> str:
    """Train and measure models of a seed that are not there; a line on how it went. Never
    raises.
    """
    import dataclasses

    import torch

    torch.set_num_threads(1)
    settings, work, seed, kinds = asked
    for objective, variant in kinds:
        folder, began = work / f"{objective}-{variant}-{seed}", time.monotonic()
        own = dataclasses.replace(
            settings,
            seeds=(seed,),
            objectives=(objective,),
            variants=(variant,),
            masking=variant == "plain" and objective != "converted",
        )
        try:
            Backcopy()(None, folder, own, resume=True)
        except Exception as problem:
            return f"{folder.name} failed: {type(problem).__name__}: {problem}"
        print(f"{folder.name}: {time.monotonic() - began:.0f} s", flush=True)
    return ""


def finished(given: argparse.Namespace) -> list[Any]:
    """Runs of the models that are measured."""
    names = [
        f"{'-'.join(kind)}-{seed}" for chain in CHAINS for kind in chain for seed in given.seeds
    ]
    there = [
        open_run(given.work / name) for name in names if (given.work / name / "run.json").is_file()
    ]
    return [run for run in there if run.info.status == "complete"]


def merged(given: argparse.Namespace) -> int:
    """Put what is finished into --out; how many models that is."""
    runs = finished(given)
    if not runs:
        return 0
    record = Backcopy().record(settings_of(given))
    with RunWriter(
        given.out / "run", kind="backcopy", model={}, settings=record, seed=None, overwrite=True
    ) as out:
        for name in TABLES:
            if tables := [run.table(name) for run in runs if name in run.tables]:
                out.table(name, pd.concat(tables, ignore_index=True))
    part = given.out / f"{PACK}.part"
    with tarfile.open(part, "w:gz", compresslevel=1) as pack:
        pack.add(given.work, arcname=".")
    part.replace(given.out / PACK)
    return len(runs)


def run(given: argparse.Namespace) -> int:
    """Train and measure until all is there or the time is over."""
    began, settings = time.monotonic(), settings_of(given)
    given.work.mkdir(parents=True, exist_ok=True)
    if not any(given.work.iterdir()) and (given.out / PACK).is_file():
        shutil.unpack_archive(given.out / PACK, given.work, filter="data")
    (given.work / "models").mkdir(exist_ok=True)
    asked = [(settings, given.work, seed, chain) for chain in CHAINS for seed in given.seeds]
    wanted = sum(len(chain) for *_, chain in asked)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # what all processes need is imported once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sinklab.extras.backcopy.run"])
    with context.Pool(given.processes) as pool:
        found = pool.imap_unordered(one_chain, asked)
        try:
            for _ in asked:
                if said := found.next(timeout=max(began + given.seconds - time.monotonic(), 0.1)):
                    print(said, flush=True)
        except multiprocessing.TimeoutError:
            print(f"stopped after {given.seconds} s: the same command goes on")
    count = merged(given)
    print(
        f"{count} of {wanted} models are measured after {time.monotonic() - began:.0f} s; see "
        f"{given.out}"
    )
    return 0 if count == wanted else 3


def report(given: argparse.Namespace) -> int:
    """Print what the merged run says."""
    whole: Any = open_run(given.out / "run")
    draw_backcopy([whole], given.out, None)
    print((whole.path / "backcopy.md").read_text("utf-8"))
    return 0 if backcopy_sentences([whole]) else 1


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument(
        "--out", type=Path, default=Path("runs/backcopy"), help="results: run/ and work.tar.gz"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/backcopy-work"),
        help="what is finished, a model each",
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="models at the same time"
    )
    parser.add_argument(
        "--seconds", type=float, default=86400.0, help="stop after this many, with what is finished"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(6)])
    parser.add_argument("--steps", type=int, default=2500, help="fewer to try it out")
    parser.add_argument("--rows", type=int, default=512, help="fewer to try it out")
    given = parser.parse_args(arguments)
    return {"run": run, "report": report}[given.command](given)


if __name__ == "__main__":
    raise SystemExit(main())
