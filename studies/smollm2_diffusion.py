"""A diffusion model made of SmolLM2, and what becomes of its sink: smollm2_diffusion.md has the
questions.

    python studies/smollm2_diffusion.py train       every sibling, in the registered order; stop it
                                                    and repeat it
    python studies/smollm2_diffusion.py adapters    the adapters of every measured point, out of the
                                                    checkpoints
    python studies/smollm2_diffusion.py measure     what is registered, for every point that was
                                                    reached
    python studies/smollm2_diffusion.py report      tables and figures from the results, without a
                                                    model

`measure iii-0-500 --parts costs` measures a part of a point, and with `--texts 2` it is a try that
keeps no result. Folders come from the environment: SINKLAB_STUDY for run folders
(runs/smollm2-diffusion when unset), SINKLAB_BASE for the parent (a Hugging Face folder or the GGUF
file), SINKLAB_BOOKS for the public-domain books in .jsonl.gz, SINKLAB_SHARED for a folder whose
data/ has the benchmarks.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import smollm2_costs as costs
import smollm2_measures as measures
import smollm2_runs as runs
from smollm2_report import report

from sinklab.lab.checkpoints import from_causal, load, load_adapters
from sinklab.lab.checkpoints.adapters import add_adapters, read_adapters
from sinklab.lab.checkpoints.controls import permuted
from sinklab.lab.records import open_run
from sinklab.lab.training import TrainSettings, recipe, train
from sinklab.lab.training.adapters import extract
from sinklab.lab.training.checkpoints import whole_checkpoints

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/smollm2-diffusion"))
BASE = os.environ.get("SINKLAB_BASE", "smollm2")
BOOKS = Path(os.environ.get("SINKLAB_BOOKS", "../shared/data/books_pd"))
DATA = Path(os.environ.get("SINKLAB_SHARED", "../shared")) / "data"
RESULTS = Path(__file__).with_suffix("")
PUBLISHED = "6cebc001ef124ddd30ac36261b335279c2b4d618"
"""The commit whose tree has the adapters of every measured point."""

SIBLINGS: dict[str, dict[str, Any]] = {
    "iii": {"logit_shift": True},
    "i": {"objective": "autoregressive"},
    "iv": {"logit_shift": True, "sink_kind": "token", "sink_count": 1},
    "ii": {"logit_shift": True, "attention": "causal"},
    "v": {"logit_shift": True, "attention": "first_alone"},
}
"""Name in the study to what distinguishes it, in the order of training."""
SEEDS = (0, 1, 2)
RATIOS = (0.0, 0.15, 0.5, 0.9)
CURVE = ("iii-0", "iv-0")
"""Runs of which every point of the curve is measured, and which go on; of the others the last
one.
"""
POINTS = (100, 300, 500, 1000, 3000, 10000)
"""Steps in all that are measured, of 1,024 tokens each."""
FIRST = 500
"""Steps of the first half million tokens."""
LONGER = ((500, 3000), (3000, 10000))
"""Steps in all at which the longer stages begin and end."""
FILES = {
    True: ("train-00.jsonl.gz", "train-01.jsonl.gz"),
    False: ("train-02.jsonl.gz", "train-03.jsonl.gz", "train-04.jsonl.gz", "train-05.jsonl.gz"),
}
"""Text of the first half million tokens (True), and of the longer stages."""


@dataclass(frozen=True)
class Stage:
    """A run of training: the first half million tokens of a sibling and seed, or a longer stage
    that goes on from it.

    Steps are counted in all, over the stages before too.
    """

    sibling: str
    seed: int
    begins: int = 0
    ends: int = FIRST

    @property
    def name(self) -> str:
        """Sibling and seed, as points and files of adapters are named."""
        return f"{self.sibling}-{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return RUNS / (f"{self.name}-{self.ends}" if self.begins else self.name)

    @property
    def points(self) -> list[int]:
        """Steps that are measured."""
        inside = [step for step in POINTS if self.begins < step <= self.ends]
        return inside if self.name in CURVE else inside[-1:]

    def settings(self) -> TrainSettings:
        """The registered settings; of a longer stage a lower peak, other text, and the adapters it
        goes on from.
        """
        is_first = self.begins == 0
        changes = dict(SIBLINGS[self.sibling])
        if not is_first:
            changes["adapters"] = str(fetched(adapters_of(self.name, self.begins)))
        return recipe(
            "qwen-0.5b",
            init_from=BASE,
            corpus=str(together(FILES[is_first])),
            heldout=str(BOOKS / "valid.jsonl.gz"),
            heldout_rows=64,
            length=256,
            batch=4,
            micro_batch=4,
            steps=self.ends - self.begins,
            lr=2e-3 if is_first else 1e-3,
            warmup=0.04,
            train_only="lora",
            lora_rank=32,
            compile=False,
            streaming=False,
            save_every=100,
            log_every=20,
            monitor_every=0,
            # a stage has order and noise of its own, or the last would begin with the rows of the
            # one before it
            seed=self.seed + self.begins,
            out=str(self.folder),
            **changes,
        )


def stages() -> Iterator[Stage]:
    """Every run in the registered order: all seeds of the first half million tokens, then the
    longer stages.
    """
    for seed in SEEDS:
        for sibling in SIBLINGS:
            yield Stage(sibling, seed, 0, FIRST)
    for begins, ends in LONGER:
        for name in CURVE:
            sibling, seed = name.split("-")
            yield Stage(sibling, int(seed), begins, ends)


def together(names: tuple[str, ...]) -> Path:
    """A folder that holds these files of the books and no others."""
    folder = RUNS / "-".join(name.split(".")[0] for name in names)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        link = folder / name
        if not link.exists():
            link.symlink_to((BOOKS / name).resolve())
    return folder


def train_all() -> None:
    """Every stage that is not complete; an interrupted one goes on from its last checkpoint."""

    for stage in stages():
        file = adapters_of(stage.name, stage.ends)
        if file.is_file() or file.stem in published():
            continue
        begun = (stage.folder / "run.json").is_file()
        if not begun or open_run(stage.folder).info.status != "complete":
            print(f"{stage.folder.name}: {'goes on' if begun else 'begins'}", flush=True)
            train(stage.settings(), progress=partial(tell, stage))
        take_adapters([stage])


def tell(stage: Stage, text: str) -> None:
    """Print a line of a run; a long stage does not keep all its checkpoints, so that its adapters
    are taken now.
    """
    print(text, flush=True)
    take_adapters([stage])


def adapters_of(run: str, step: int) -> Path:
    """Where the adapters of a point are kept, beside the results: 7 MB each, so not in git."""
    return RESULTS / "adapters" / f"{run}-{step}.safetensors"


def published() -> dict[str, str]:
    """SHA-256 of the adapters that `PUBLISHED` has, by the name of their point."""
    file = RESULTS / "adapters.json"
    return json.loads(file.read_text("utf-8"))["sha256"] if file.is_file() else {}


def fetched(file: Path) -> Path:
    """Adapters; where they are not here, out of the commit that has them.

    Exits where that commit cannot be had, and where they are not those that were measured.
    """
    if not file.is_file():
        git = ["git", "-C", str(Path(__file__).parents[1])]
        path = f"{PUBLISHED}:studies/smollm2_diffusion/adapters/{file.name}"
        found = subprocess.run([*git, "show", path], capture_output=True)
        if found.returncode:
            subprocess.run([*git, "fetch", "--depth", "1", "origin", PUBLISHED])
            found = subprocess.run([*git, "show", path], capture_output=True)
        if hashlib.sha256(found.stdout).hexdigest() != published().get(file.stem):
            raise SystemExit(f"{file.name} is needed, and `git show {path}` does not give it")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(found.stdout)
    return file


def take_adapters(of: Iterable[Stage]) -> None:
    """Write the adapters of every point that a checkpoint holds, and the history of its run, beside
    the results.
    """
    for stage in of:
        checkpoints = whole_checkpoints(stage.folder / "checkpoints")
        for step in stage.points:
            checkpoint = stage.folder / "checkpoints" / f"checkpoint-{step - stage.begins}"
            file = adapters_of(stage.name, step)
            if checkpoint in checkpoints and not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                extract(checkpoint, file, base="SmolLM2-135M-Instruct")
                print(f"{file.name}: {file.stat().st_size:,} bytes", flush=True)
        if (stage.folder / "history.parquet").is_file():
            (RESULTS / "history").mkdir(parents=True, exist_ok=True)
            table = open_run(stage.folder).table("history")
            table.to_csv(RESULTS / "history" / f"{stage.folder.name}.csv", index=False)


@dataclass(frozen=True)
class Point:
    """A model that is measured."""

    name: str
    adapters: Path | None = None
    attention: str = "full"
    """Who sees whom, as `measures.sight_of` names it, where the model does not know it itself."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of an untrained model: fields of its config besides the shift."""

    @property
    def result(self) -> Path:
        return RESULTS / "points" / f"{self.name}.json"

    @property
    def is_autoregressive(self) -> bool:
        """Whether its objective is the next token."""
        return self.name == "parent" or self.name.startswith("i-")

    @property
    def parts(self) -> tuple[str, ...]:
        """What is measured of it unless parts are named."""
        if self.name == "lifted-sink":
            return ("added",)
        has_sink = self.name.startswith("iv-")
        steps = self.name.split("-")[-1]
        wanted = CURVE_PARTS if steps.isdecimal() and int(steps) not in WHOLE else PARTS[:-1]
        return tuple(part for part in wanted if part != "added" or has_sink)

    def load(self) -> Any:
        """The model with its tokenizer, a `DiffusionLM` that predicts each token from the position
        before it.
        """
        if self.adapters is None:
            return from_causal(BASE, logit_shift=True, **dict(self.settings))
        if not self.is_autoregressive:
            return load_adapters(BASE, fetched(self.adapters))
        loaded = from_causal(BASE, logit_shift=True)
        add_adapters(loaded.model, read_adapters(fetched(self.adapters))[1])
        return loaded

    def as_trained(self) -> Any:
        """The same, but a model of the next token as an autoregressive one."""
        if not self.is_autoregressive:
            return self.load()
        return load(BASE) if self.adapters is None else load_adapters(BASE, fetched(self.adapters))


def points() -> Iterator[Point]:
    """Models that can be measured now: the parent, the lifted parent, and every point that has
    adapters.
    """
    yield Point("parent", attention="causal")
    yield Point("lifted")
    yield Point("lifted-sink", settings=(("sink_count", 1), ("sink_kind", "token")))
    kept = {file.stem for file in (RESULTS / "adapters").glob("*.safetensors")}
    for name in sorted(kept | {*published()}, key=lambda one: (steps_of(one), one)):
        sibling = name.split("-")[0]
        file = RESULTS / "adapters" / f"{name}.safetensors"
        yield Point(name, file, "causal" if sibling in ("i", "ii") else "full")


def steps_of(name: str) -> int:
    """Steps in all of a point, by its name."""
    return int(name.split("-")[-1])


PARTS = (
    "strength",
    "channel",
    "value_norms",
    "added",
    "lone",
    "controls",
    "motion",
    "start",
    "bound",
    "costs",
    "kept",
    "benchmarks",
)
"""What is measured of a point, costs last as they take most of the time; benchmarks only where they
are named.
"""
CURVE_PARTS = ("strength", "channel", "value_norms", "added", "motion", "bound")
"""What is measured of the points of the curve that are not `WHOLE`."""
WHOLE = (500, 10000)
"""Steps at which all is measured."""
TEXTS = {"motion": 8}
"""Texts of a part, where they are not 40."""


def measure(only: list[str], parts: list[str], texts: int | None) -> None:
    """Every point that has no result yet, or lacks a part of it.

    With `texts`, a try on so many: the numbers are printed and not kept.
    """
    for point in points():
        if only and point.name not in only:
            continue
        found = json.loads(point.result.read_text("utf-8")) if point.result.is_file() else {}
        missing = [part for part in parts or point.parts if texts or part not in found]
        if not missing:
            continue
        print(f"measuring {', '.join(missing)} of {point.name}", flush=True)
        loaded = point.load()
        loaded.model.eval()
        for part in missing:
            count = texts or TEXTS.get(part, 40)
            begun, busy = time.perf_counter(), time.process_time()
            one = measured(part, point, loaded, count, found)
            seconds, busy = time.perf_counter() - begun, time.process_time() - busy
            # what other work on the machine costs is in the first number alone
            words = f"{seconds:.0f} s, {busy:.0f} s of processor time"
            print(
                f"  {part} of {point.name}: {words} on {count} texts, {busy / count:.1f} a text",
                flush=True,
            )
            found[part] = one
            if texts:
                print(json.dumps(one)[:3000], flush=True)
                continue
            found.setdefault("seconds", {})[part] = round(busy)
            point.result.parent.mkdir(parents=True, exist_ok=True)
            point.result.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def measured(
    part: str, point: Point, loaded: Any, count: int, found: dict[str, Any]
) -> dict[str, Any]:
    """One of `PARTS` of a point, on so many texts; `found` has the parts that are there."""
    model, tokenizer, attention = loaded.model, loaded.needed_tokenizer(), point.attention
    mask_id, length = model.config.mask_token_id, 128 if part in ("costs", "kept", "bound") else 64
    every_NS = measures.book_rows(tokenizer, BOOKS / "valid.jsonl.gz", length, 8)
    # all texts in the order of the books; fewer are spread over them
    rows_NS = every_NS if count >= len(every_NS) else runs.spread_over_books(every_NS, 8, count)
    seen = measures.sight_of(attention, length)
    if part == "costs":
        return costs.block_costs(model, rows_NS, attention, mask_id)
    if part == "kept":
        return costs.kept_costs(
            model, rows_NS, attention, mask_id, needed("costs", found, point.name)
        )
    if part == "value_norms":
        return measures.value_norms(model, rows_NS, seen)
    if part == "added":
        return measures.added_sink(model, rows_NS)
    if part == "start":
        ends = tokenizer.bos_token_id, tokenizer.eos_token_id
        return measures.starts(model, rows_NS, attention, mask_id, *ends)
    if part == "lone":
        # a sibling that was trained with a constraint is read without it as well
        with costs.attending(model, "full"):
            return lone(model, rows_NS)
    if part == "strength":
        return strength(model, rows_NS, seen, tokenizer)
    if part == "controls":
        return strength(permuted(loaded).model, rows_NS, seen, tokenizer)
    if part == "channel":
        pairs = needed("strength", results().get("parent", {}), "parent")["0.0"][
            "first_strong_pairs"
        ]
        noisy = {str(ratio): measures.masked_at(rows_NS, ratio, mask_id) for ratio in (0.0, 0.15)}
        return {
            ratio: measures.channels(model, noisy_NS, seen, pairs)
            for ratio, noisy_NS in noisy.items()
        }
    if part == "motion":
        written = runs.motion(point.as_trained(), rows_NS)
        return written | {"redrawn": runs.redrawn(model, rows_NS, attention, mask_id)}
    if part == "bound":
        return runs.bounds(point.as_trained(), rows_NS)
    seconds = runs.seconds_of_benchmarks(model, is_diffusion=not point.is_autoregressive)
    print(
        f"  benchmarks of {point.name}: about {seconds / 60:.0f} min of processor time", flush=True
    )
    # a try on few texts is one on as many documents, in a folder of its own
    limit, folder = (count, f"benchmarks-{count}") if count < 40 else (None, "benchmarks")
    return runs.benchmarks(point.as_trained, DATA, RUNS / folder, point.name, limit)


def needed(part: str, found: dict[str, Any], name: str) -> Any:
    """A part that another one is made of. Exits where it is not there."""
    if part not in found:
        raise SystemExit(
            f"this part needs {part} of {name}, which is not there; measure that first"
        )
    return found[part]


def strength(model: Any, rows_NS: Any, seen: Any, tokenizer: Any) -> dict[str, Any]:
    """How strong the strongest keys are, and where they stand, by mask ratio."""
    mask_id, found = model.config.mask_token_id, {}
    for ratio in RATIOS:
        noisy_NS = measures.masked_at(rows_NS, ratio, mask_id)
        weights_NLHK = measures.weights_of(model, noisy_NS, seen)
        found[str(ratio)] = measures.strength(weights_NLHK, rows_NS, noisy_NS, tokenizer, mask_id)
    return found


def lone(model: Any, rows_NS: Any) -> dict[str, Any]:
    """Weight and spike of a key whose row sees itself alone, and without that."""
    found, length = {}, rows_NS.shape[1]
    for name in ("causal", "all_first", "full", "alone-0", "alone-30"):
        key = int(name.removeprefix("alone-")) if name.startswith("alone-") else 0
        sight = measures.sight_of(name, length)
        weights_NLHK = measures.weights_of(model, rows_NS, sight)
        share_N = weights_NLHK[..., weights_NLHK.shape[-1] - length + key].mean((1, 2))
        found[name] = {"share": share_N.tolist(), **measures.spikes(model, rows_NS, sight)}
        print(f"  {name}: key {key} {float(share_N.mean()):.3f}", flush=True)
    return found


def results() -> dict[str, dict[str, Any]]:
    """Measured points by name."""
    return {
        file.stem: json.loads(file.read_text("utf-8"))
        for file in sorted((RESULTS / "points").glob("*.json"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "adapters", "measure", "report"))
    parser.add_argument("points", nargs="*", help="of measure: names of points; all when left out")
    parser.add_argument(
        "--parts", nargs="*", default=[], choices=PARTS, help="of measure; see Point.parts"
    )
    parser.add_argument(
        "--texts", type=int, help="of measure: a try on so many texts, which keeps no result"
    )
    given = parser.parse_args()
    if given.command == "train":
        train_all()
    elif given.command == "adapters":
        take_adapters(stages())
    elif given.command == "measure":
        measure(given.points, given.parts, given.texts)
    else:
        report(results(), RESULTS)


if __name__ == "__main__":
    main()
