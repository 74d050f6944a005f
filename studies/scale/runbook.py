"""What added sinks are worth at 10M parameters, and how causal and diffusion twins differ: one GPU,
45 minutes.

    python studies/scale/runbook.py pack CORPUS HELDOUT   text and tokenizer to travel with the
                                                          tree, before
    python studies/scale/runbook.py measure               first command there: tokens per second,
                                                          and the plan that fits
    python studies/scale/runbook.py train                 again and again, ten minutes at most; goes
                                                          on where it stopped
    python studies/scale/runbook.py report                tables and what may be said of them

Nothing is downloaded. Everything is kept under runs/scale (--out): data/, plan.json, results.jsonl
with a line a finished run, and runs/ with their folders. To go on elsewhere, data/, plan.json and
results.jsonl are enough. Settings are those of settings.toml beside this file (--settings).
README.md has questions and rules, registered before any run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LARGEST = 48 * 2**20
"""Bytes of text and tokenizer that travel."""


@dataclass(frozen=True)
class Run:
    """One model to train."""

    stage: str
    kind: str
    """A variant of the diffusion model, or causal."""
    seed: int
    shape: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.kind}-{self.seed}"


class Runbook:
    """Settings, and the folder that everything is kept in."""

    def __init__(self, out: Path, settings: Path = HERE / "settings.toml") -> None:
        self.out, self.file = out, settings
        self.settings: dict[str, Any] = tomllib.loads(settings.read_text("utf-8"))
        self.limits: dict[str, float] = self.settings["limits"]

    def lines(self) -> list[dict[str, Any]]:
        """What is known so far, a dict a line; a line that a kill cut short is left out."""
        found = []
        path = self.out / "results.jsonl"
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                print(f"{path}: a line that was cut short is left out")
        return found

    def note(self, line: dict[str, Any]) -> None:
        """Add a line."""
        path = self.out / "results.jsonl"
        cut = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps(line) + "\n")

    def results(self) -> dict[str, dict[str, Any]]:
        """Finished runs by name."""
        return {line["name"]: line for line in self.lines() if "name" in line}

    def spent(self) -> float:
        """Seconds of the machine that earlier commands took."""
        return sum(line["seconds"] for line in self.lines() if "command" in line)

    def spend(self, command: str, since: float) -> float:
        """Note the seconds of the machine since a time, and give the time now."""
        now = time.monotonic()
        self.note({"command": command, "seconds": round(now - since, 1)})
        return now

    def plan(self) -> dict[str, Any]:
        """What `measure` decided.

        Raises:
            ValueError: before it did.
        """
        path = self.out / "plan.json"
        if not path.exists():
            raise ValueError(
                f"runs are planned by what was measured, but {path} is not there; run measure first"
            )
        return json.loads(path.read_text("utf-8"))

    def runs(self, plan: dict[str, Any]) -> list[Run]:
        """The runs of a plan in their order: stage by stage, and in a stage seed by seed with all
        kinds of a seed.
        """
        return [
            Run(stage["name"], kind, seed, stage["shape"], plan["stages"][stage["name"]]["tokens"])
            for stage in self.settings["stages"]
            for seed in range(plan["stages"][stage["name"]]["seeds"])
            for kind in stage["kinds"]
        ]


# the plan


def planned(book: Runbook, speeds: dict[str, dict[str, float]], spent: float) -> dict[str, Any]:
    """What fits into the time that is left, at these speeds.

    Seeds are given up from the last stage on, one at a time, and a stage whole where fewer than its
    least would be left. The first stage keeps its seeds: where they do not fit, all its runs get
    fewer tokens; below a share of them (`fewest_tokens`) nothing is run, since a smaller answer
    would not be one.

    Args:
        book: the settings.
        speeds: by shape, ``tokens_per_second`` of all runs at once together, and ``start``, the
            seconds before a run's first step and after its last.
        spent: seconds that are gone.
    """
    limits, stages = book.limits, book.settings["stages"]
    left = limits["seconds"] - limits["reserve"] - spent
    seeds = {stage["name"]: stage["seeds"] for stage in stages}
    tokens = {stage["name"]: stage["tokens"] for stage in stages}

    def seconds(stage: dict[str, Any]) -> float:
        speed, name = speeds[stage["shape"]], stage["name"]
        runs = seeds[name] * len(stage["kinds"])
        return runs * (tokens[name] / speed["tokens_per_second"] + speed["start"] / limits["jobs"])

    def total() -> float:
        return sum(map(seconds, stages))

    for stage in reversed(stages[1:]):
        while seeds[stage["name"]] and total() > left:
            fewer = seeds[stage["name"]] - 1
            seeds[stage["name"]] = fewer if fewer >= stage["fewest"] else 0
    first, speed = stages[0], speeds[stages[0]["shape"]]
    if total() > left:
        runs = first["seeds"] * len(first["kinds"])
        fits = (left / runs - speed["start"] / limits["jobs"]) * speed["tokens_per_second"]
        whole = first["tokens"] // 100
        tokens[first["name"]] = max(0, int(fits // whole * whole))
        if tokens[first["name"]] < limits["fewest_tokens"] * first["tokens"]:
            seeds[first["name"]] = 0
    made = {name: {"seeds": seeds[name], "tokens": tokens[name]} for name in seeds}
    return {"stages": made, "seconds": round(total()), "left": round(left), "speeds": speeds}


def told(plan: dict[str, Any], book: Runbook) -> Iterator[str]:
    """The plan in words."""
    for stage in book.settings["stages"]:
        name, kinds = stage["name"], ", ".join(stage["kinds"])
        seeds, tokens = plan["stages"][name]["seeds"], plan["stages"][name]["tokens"]
        cut = (
            ""
            if (seeds, tokens) == (stage["seeds"], stage["tokens"])
            else f" (asked: {stage['seeds']} seeds"
        )
        cut += f", {stage['tokens'] / 1e6:g}M tokens)" if cut else ""
        yield (
            f"{name}: {seeds} seeds of {kinds}, {tokens / 1e6:g}M tokens each{cut}"
            if seeds
            else f"{name}: left out"
        )
    yield f"about {plan['seconds']} s of the {plan['left']} s that are left"


# one run


def settings_of(book: Runbook, run: Run, **changes: Any) -> Any:
    """The training settings of a run. Of one seed all kinds see the same rows in the same order."""
    from sinklab.lab.training import TrainSettings
    from sinklab.lab.training.settings import VARIANTS

    given, data = book.settings["train"], book.out / "data"
    of_stage = next(
        (stage.get("train", {}) for stage in book.settings["stages"] if stage["name"] == run.stage),
        {},
    )
    fields = {**given, **book.settings["shapes"][run.shape], **of_stage}
    fields |= {"corpus": str(data / "train.jsonl.gz"), "heldout": str(data / "heldout.jsonl.gz")}
    fields |= {
        "tokenizer": str(data / "tokenizer"),
        "out": str(book.out / "runs" / run.name),
        "seed": run.seed,
    }
    fields["steps"] = max(1, round(run.tokens / (given["batch"] * given["length"])))
    if run.kind == "causal":
        fields["objective"] = "autoregressive"
    elif run.kind != "diffusion":
        fields |= VARIANTS[run.kind]
    return TrainSettings(**fields | changes)


def one(book: Runbook, run: Run) -> dict[str, Any]:
    """Train a run, or go on with it, and measure it: the line that is kept of it."""
    from sinklab.lab.records import open_run
    from sinklab.lab.training import train

    settings = settings_of(book, run)
    folder = Path(settings.out)
    began = time.perf_counter()
    train(
        dataclasses.replace(settings, resume=(folder / "run.json").exists()),
        progress=lambda text: print(text, flush=True),
    )
    found = open_run(folder)
    heldout, monitor, history = (
        found.table("heldout"),
        found.table("monitor"),
        found.table("history"),
    )
    overall = monitor[monitor["layer"] == -1]
    seen = (
        "step",
        "first_share",
        "main_first",
        "main_added",
        "main_none",
        "top_text_share",
        "sink_share",
    )
    line = dataclasses.asdict(run) | {"name": run.name, "steps": settings.steps}
    line |= {"parameters": int(heldout["parameters"][0]), "loss": float(heldout["loss"][0])}
    line["bits_per_byte"] = float(heldout["bits_per_byte"][0])
    line["rows"] = [round(loss, 5) for loss in found.table("heldout_rows")["loss"]]
    line["monitor"] = overall[[*seen]].round(5).to_dict("list")
    line["tokens_per_second"] = float(history["tokens_per_second"].median())
    line["seconds"] = round(time.perf_counter() - began, 1)
    line["versions"] = found.info.versions
    if run.stage == "twins":
        line["masking"] = masked(book, settings)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return line


def masked(book: Runbook, settings: Any) -> list[dict[str, Any]]:
    """What blocking keys costs, on rows of the held-out text: a dict a number of keys and control.

    Keys are chosen by a clean pass, per row, layer and head, and hidden from all queries, in both
    models alike. The arm "matched" is "sinks" on the heads that have a control of equal mass, and
    is compared with that.
    """
    import torch

    from sinklab.core.probing import Dose, intervene
    from sinklab.lab.checkpoints import load
    from sinklab.lab.measures import MaskSinks
    from sinklab.lab.scoring import row_losses
    from sinklab.lab.training.text import prepare

    given, loaded = book.settings["masking"], load(Path(settings.out) / "model")
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    # rows of the held-out text, made as those to learn from
    rows = dataclasses.replace(settings, corpus=str(settings.heldout), heldout_rows=given["rows"])
    ids_RS = prepare(rows).heldout.ids_RS.long()
    batches = [*enumerate(ids_RS.split(given["batch"]))]
    clean_R = torch.cat([row_losses(loaded, ids_BS, seed=seed) for seed, ids_BS in batches])
    cells = [{"k": 0, "control": "none", "loss": float(clean_R.mean()), "removed": 0.0}]
    arms = {"sinks": {}, "matched": {"matched": True}, "equal_mass": {"control": "equal_mass"}}
    arms["random"] = {"control": "random"}
    for k, (arm, fields) in itertools.product(given["ks"], arms.items()):
        losses, doses = [], []
        for seed, ids_BS in batches:
            with intervene(
                loaded.model, MaskSinks(k=k, source="clean_pass", seed=seed, **fields)
            ) as log:
                with log.probing():
                    row_losses(loaded, ids_BS, seed=seed)
                losses.append(row_losses(loaded, ids_BS, seed=seed))
            doses.append(log.dose())
        cell = {"k": k, "control": arm, "loss": float(torch.cat(losses).mean())}
        cells.append(cell | Dose.pooled(doses).row())
    return cells


# many runs on one machine


def started(book: Runbook, name: str, *words: str) -> subprocess.Popen[bytes]:
    """A process of this script, with a log beside its run; it ends as an own group can be ended."""
    log = book.out / "logs" / f"{name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    command += ["--out", str(book.out), "--settings", str(book.file)]
    threads = max(1, (os.cpu_count() or 1) // int(book.limits["jobs"]))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started: a run goes on from its newest checkpoint."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def together(book: Runbook, runs: Iterable[Run], seconds: float) -> list[str]:
    """Run as many at once as the settings say, until all are done or the time is up; names of those
    that failed.
    """
    queue, running, failed = list(runs), dict[str, subprocess.Popen[bytes]](), list[str]()
    noted = time.monotonic()
    deadline = noted + seconds
    try:
        while (queue or running) and time.monotonic() < deadline:
            while queue and len(running) < book.limits["jobs"]:
                run = queue.pop(0)
                running[run.name] = started(book, run.name, "one", run.name)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode:
                    failed.append(name)
                    print(_failure(book, name), flush=True)
                    continue
                line = json.loads((book.out / "runs" / name / "result.json").read_text("utf-8"))
                book.note(line)
                print(f"{name}: {line['loss']:.4f} nats, {line['seconds']:.0f} s", flush=True)
            # what a command that is killed has spent is known to half a minute
            noted = book.spend("train", noted) if time.monotonic() > noted + 30 else noted
            time.sleep(0.2)
    finally:
        for process in running.values():
            ended(process)
        book.spend("train", noted)
    return failed


def _failure(book: Runbook, name: str) -> str:
    lines = (book.out / "logs" / f"{name}.txt").read_text("utf-8", "replace").splitlines()
    return f"{name} failed; its log ends with\n" + "\n".join(lines[-12:])


# the commands


def pack(book: Runbook, corpus: str, heldout: str, tokenizer: str | None) -> None:
    """Write text and tokenizer into the folder that travels; held-out documents are no text to
    learn from.

    Raises:
        ValueError: if they are larger than what travels.
    """
    from sinklab.lab.data import read_corpus
    from sinklab.lab.data.rows import train_tokenizer
    from sinklab.lab.training.text import load_tokenizer

    data = book.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    texts = {"heldout": list(read_corpus(heldout))}
    held = {*texts["heldout"]}
    # a folder of books may hold the held-out ones too
    texts["train"] = [text for text in read_corpus(corpus) if text not in held]
    for name, documents in texts.items():
        with gzip.GzipFile(data / f"{name}.jsonl.gz", "wb", mtime=0) as file:
            for text in documents:
                file.write((json.dumps({"text": text}) + "\n").encode())
    size = book.settings["tokenizer"]["vocab_size"]
    found = load_tokenizer(tokenizer) if tokenizer else train_tokenizer(texts["train"], size)
    found.save_pretrained(data / "tokenizer")
    files = sorted(
        path for path in data.rglob("*") if path.is_file() and path.name != "packed.json"
    )
    facts = {
        path.relative_to(data).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    total = sum(path.stat().st_size for path in files)
    counts = {
        name: {"documents": len(some), "characters": sum(map(len, some))}
        for name, some in texts.items()
    }
    (data / "packed.json").write_text(
        json.dumps({"bytes": total, "texts": counts, "sha256": facts}, indent=2) + "\n"
    )
    print(f"{data}: {total / 2**20:.1f} MiB, {counts}")
    if total > LARGEST:
        raise ValueError(
            f"text and tokenizer must fit {LARGEST / 2**20:g} MiB, but are {total / 2**20:.1f}; "
            "give less"
        )


def measure(book: Runbook) -> None:
    """Train every shape for some steps, as many at once as later, and plan by what that shows."""
    began, jobs = time.monotonic(), int(book.limits["jobs"])
    speeds = dict[str, dict[str, float]]()
    for shape in dict.fromkeys(stage["shape"] for stage in book.settings["stages"]):
        start = time.monotonic()
        names = [f"measure-{shape}-{number}" for number in range(jobs)]
        processes = [started(book, name, "speed", name, shape) for name in names]
        try:
            failed = [
                name for name, process in zip(names, processes, strict=True) if process.wait()
            ]
        finally:
            for process in processes:
                ended(process)
        if failed:
            raise ValueError(_failure(book, failed[0]))
        found = [
            json.loads((book.out / "runs" / f"{name}.json").read_text("utf-8")) for name in names
        ]
        speed = sum(one["tokens_per_second"] for one in found)
        training = max(one["tokens"] / one["tokens_per_second"] for one in found)
        speeds[shape] = {
            "tokens_per_second": speed,
            "start": max(0.0, time.monotonic() - start - training),
        }
        print(
            f"{shape}: {speed:,.0f} tokens a second in {jobs} runs at once, "
            f"{speeds[shape]['start']:.0f} s to start"
        )
    book.spend("measure", began)
    plan = planned(book, speeds, book.spent())
    (book.out / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
    print("\n".join(told(plan, book)))


def speed(book: Runbook, name: str, shape: str) -> None:
    """What one of the runs that are measured does."""
    from sinklab.lab.records import open_run
    from sinklab.lab.training import train

    given = book.settings["measure"]
    run = Run("measure", "plain", 0, shape, 1)
    folder = book.out / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    settings = settings_of(
        book, run, out=str(folder), steps=given["steps"], log_every=given["log_every"]
    )
    train(settings, progress=lambda text: print(text, flush=True))
    # the first steps compile
    seen = open_run(folder).table("history")["tokens_per_second"].dropna().to_numpy()[1:]
    line = {"tokens_per_second": float(sorted(seen)[len(seen) // 2])}
    line["tokens"] = settings.steps * settings.batch * settings.length
    folder.with_suffix(".json").write_text(json.dumps(line))
    shutil.rmtree(folder)


def train_all(book: Runbook, seconds: float | None) -> int:
    """Go on with the plan for the time of one command, or what is left of the whole time."""
    results = book.results()
    left = book.limits["seconds"] - book.spent()
    seconds = min(book.limits["command"] if seconds is None else seconds, left)
    missing = [run for run in book.runs(book.plan()) if run.name not in results]
    if not missing or seconds <= 0:
        print(
            "every run of the plan is done" if not missing else "the time is spent", "- see report"
        )
        return 0
    failed = together(book, missing, seconds)
    still = len(missing) - sum(run.name in book.results() for run in missing)
    print(
        f"{still} runs of the plan are left, and "
        f"{max(0, book.limits['seconds'] - book.spent()):.0f} s"
    )
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["pack", "measure", "train", "report", "one", "speed"])
    parser.add_argument(
        "rest", nargs="*", help="of pack: corpus and held-out corpus, as `sinklab train` takes them"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/scale"), help="where everything is kept"
    )
    parser.add_argument("--settings", type=Path, default=HERE / "settings.toml")
    parser.add_argument(
        "--tokenizer", help="of pack: a tokenizer to take; without it one is trained on the corpus"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="of train: how long; without it what the settings give a command",
    )
    given = parser.parse_args(arguments)
    book = Runbook(given.out, given.settings)
    if given.command == "pack":
        pack(book, *given.rest, tokenizer=given.tokenizer)
    elif given.command == "measure":
        measure(book)
    elif given.command == "train":
        return train_all(book, given.seconds)
    elif given.command == "report":
        from answers import report

        print(report(book))
    elif given.command == "speed":
        speed(book, *given.rest)
    else:
        run = next(run for run in book.runs(book.plan()) if run.name == given.rest[0])
        line = one(book, run)
        beside = book.out / "runs" / run.name / "result.json.part"
        beside.write_text(json.dumps(line))
        beside.rename(beside.with_suffix(""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
