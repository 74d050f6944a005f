"""A diffusion model made of SmolLM2, and what becomes of its sink: smollm2_diffusion.md has the questions.

    python studies/smollm2_diffusion.py train       every sibling, in the registered order; stop it and repeat it
    python studies/smollm2_diffusion.py adapters    the adapters of every measured point, out of the checkpoints
    python studies/smollm2_diffusion.py measure     what is registered, for every point that was reached
    python studies/smollm2_diffusion.py report      tables and figures from the results, without a model

Folders come from the environment: SINKLAB_STUDY for run folders (runs/smollm2-diffusion when unset), SINKLAB_BASE for
the parent (a Hugging Face folder or the GGUF file), SINKLAB_BOOKS for the public-domain books in .jsonl.gz.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import smollm2_measures as measures

from sinklab.checkpoints import from_causal, load_adapters
from sinklab.records import open_run
from sinklab.training import TrainSettings, recipe, train
from sinklab.training.adapters import extract
from sinklab.training.checkpoints import whole_checkpoints

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/smollm2-diffusion"))
BASE = os.environ.get("SINKLAB_BASE", "smollm2")
BOOKS = Path(os.environ.get("SINKLAB_BOOKS", "../shared/data/books_pd"))
RESULTS = Path(__file__).with_suffix("")

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
"""Runs of which every point of the curve is measured, and which go on; of the others the last one."""
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
    """A run of training: the first half million tokens of a sibling and seed, or a longer stage that goes on from it.

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
        """The registered settings; of a longer stage a lower peak, other text, and the adapters it goes on from."""
        is_first = self.begins == 0
        changes = dict(SIBLINGS[self.sibling])
        if not is_first:
            changes["adapters"] = str(adapters_of(self.name, self.begins))
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
            workers=0,
            save_every=100,
            eval_every=100,
            log_every=20,
            monitor_every=0,
            keep=5,
            log_to="none",
            # a stage has order and noise of its own, or the last would begin with the rows of the one before it
            seed=self.seed + self.begins,
            out=str(self.folder),
            **changes,
        )


def stages() -> Iterator[Stage]:
    """Every run in the registered order: all seeds of the first half million tokens, then the longer stages."""
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

    def tell(text: str) -> None:
        print(text, flush=True)
        # a long stage does not keep all its checkpoints
        take_adapters()

    for stage in stages():
        if adapters_of(stage.name, stage.ends).is_file():
            continue
        begun = (stage.folder / "run.json").is_file()
        if not begun or open_run(stage.folder).info.status != "complete":
            print(f"{stage.folder.name}: {'goes on' if begun else 'begins'}", flush=True)
            train(replace(stage.settings(), resume=begun), progress=tell)
        take_adapters()


def adapters_of(run: str, step: int) -> Path:
    """Where the adapters of a point are kept, beside the results."""
    return RESULTS / "adapters" / f"{run}-{step}.safetensors"


def take_adapters() -> None:
    """Write the adapters of every point that a checkpoint holds, and the history of its run, beside the results."""
    for stage in stages():
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
    adapters: Path | None
    attention: str
    """Who sees whom, as `measures.sight_of` names it, where the model does not know it itself."""

    @property
    def result(self) -> Path:
        return RESULTS / "points" / f"{self.name}.json"

    def load(self) -> Any:
        """The model with its tokenizer, a `DiffusionLM` that predicts each token from the position before it."""
        if self.adapters is None:
            return from_causal(BASE, logit_shift=True)
        return load_adapters(BASE, self.adapters)


def points() -> Iterator[Point]:
    """Models that can be measured now: the parent, the lifted parent, and every point that has adapters."""
    yield Point("parent", None, "causal")
    yield Point("lifted", None, "full")
    for file in sorted((RESULTS / "adapters").glob("*.safetensors")):
        sibling = file.name.split("-")[0]
        # an autoregressive sibling is measured as a model with causal attention
        yield Point(file.stem, file, "causal" if sibling in ("i", "ii") else "full")


PARTS = ("strength", "lone", "value_norms", "costs")
"""What is measured of a point; costs take most of the time."""


def measure(only: list[str], parts: list[str]) -> None:
    """Every point that has no result yet, or lacks a part of it."""
    for point in points():
        if (only and point.name not in only) or point.name.startswith("i-"):
            continue
        found = json.loads(point.result.read_text("utf-8")) if point.result.is_file() else {}
        missing = [part for part in parts or PARTS if part not in found]
        if not missing:
            continue
        print(f"measuring {', '.join(missing)} of {point.name}", flush=True)
        loaded = point.load()
        for part in missing:
            found[part] = measured(part, loaded.model.eval(), loaded.needed_tokenizer(), point.attention)
            point.result.parent.mkdir(parents=True, exist_ok=True)
            point.result.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def measured(part: str, model: Any, tokenizer: Any, attention: str) -> dict[str, Any]:
    """One of `PARTS` of a model."""
    mask_id, valid = model.config.mask_token_id, BOOKS / "valid.jsonl.gz"
    rows_NS = measures.book_rows(tokenizer, valid, 128 if part == "costs" else 64, 8)
    seen = measures.sight_of(attention, 64)
    if part == "costs":
        return measures.block_costs(model, rows_NS, attention, mask_id)
    if part == "value_norms":
        return measures.value_norms(model, rows_NS, seen)
    found = {}
    if part == "strength":
        for ratio in RATIOS:
            noisy_NS = measures.masked_at(rows_NS, ratio, mask_id)
            weights_NLHK = measures.weights_of(model, noisy_NS, seen)
            found[str(ratio)] = measures.strength(weights_NLHK, rows_NS, noisy_NS, tokenizer, mask_id)
        return found
    for name in ("causal", "all_first", "full", "alone-0", "alone-30"):
        key = int(name.removeprefix("alone-")) if name.startswith("alone-") else 0
        sight = measures.sight_of(name, 64)
        weights_NLHK = measures.weights_of(model, rows_NS, sight)
        share_N = weights_NLHK[..., weights_NLHK.shape[-1] - 64 + key].mean((1, 2))
        found[name] = {"share": share_N.tolist(), **measures.spikes(model, rows_NS, sight)}
        print(f"  {name}: key {key} {float(share_N.mean()):.3f}", flush=True)
    return found


def results() -> dict[str, dict[str, Any]]:
    """Measured points by name."""
    return {file.stem: json.loads(file.read_text("utf-8")) for file in sorted((RESULTS / "points").glob("*.json"))}


def report() -> None:
    """The tables as Markdown, and the figures, from the results."""
    found = results()
    lines = [*lone_table(found), "", *strength_table(found), "", *cost_table(found), ""]
    (RESULTS / "tables.md").write_text("\n".join(lines), "utf-8")
    draw(found)
    print("\n".join(lines))


def shown(values: Any, digits: int = 3) -> str:
    """A mean over texts with its interval."""
    one = measures.interval(values)
    return f"{one['mean']:.{digits}f} ({one['low']:.{digits}f} … {one['high']:.{digits}f})".replace("-", "−")


def lone_table(found: dict[str, Any]) -> list[str]:
    """What the key of a row that sees itself alone gets, and its spike."""
    names = ("causal", "all_first", "full", "alone-0", "alone-30")
    found = {name: one for name, one in found.items() if "lone" in one}
    words = ("causal: key 0", "causal, row 0 sees all: key 0", "full: key 0", "full, row 0 alone: key 0")
    words += ("full, row 30 alone: key 30",)
    columns = [name for name in ("parent", *found) if name in found and name != "lifted"]
    lines = ["| attention | " + " | ".join(dict.fromkeys(columns)) + " |"]
    lines.append("|---" * (1 + len(dict.fromkeys(columns))) + "|")
    for name, said in zip(names, words, strict=True):
        cells = []
        for column in dict.fromkeys(columns):
            one = found[column]["lone"][name]
            cells.append(f"{shown(one['share'])}, spike {np.median(one['greatest']):,.0f}")
        lines.append(f"| {said} | " + " | ".join(cells) + " |")
    return lines


def strength_table(found: dict[str, Any]) -> list[str]:
    """Strong heads, the strongest key's share and the first token's, by mask ratio."""
    lines = ["| model | masked | heads with a strong key, % | strongest key | first token | strong keys stand on |"]
    lines.append("|---|---|---|---|---|---|")
    for name, one in found.items():
        for ratio, row in one["strength"].items():
            tokens = ", ".join(f"{token!r} {share:.0%}" for token, share in list(row["tokens"].items())[:3])
            strong = shown(100 * np.array(row["strong_heads"]), 1)
            shares = shown(row["strongest_share"]), shown(row["first_share"])
            lines.append(f"| {name} | {ratio} | {strong} | {shares[0]} | {shares[1]} | {tokens} |")
    return lines


def cost_table(found: dict[str, Any]) -> list[str]:
    """What blocking the strongest key of a text costs, less what a random key costs, in nats."""
    lines = ["| model | loss | blocked for all | for queries from 32 on | random, for all | random, late |"]
    lines.append("|---|---|---|---|---|---|")
    for name, one in found.items():
        if "costs" not in one:
            continue
        loss = {arm: np.array(values) for arm, values in one["costs"]["loss"].items()}
        arms = ("all", "late", "random all", "random late")
        cells = [shown(loss[arm] - loss["none"]) for arm in arms]
        lines.append(f"| {name} | {loss['none'].mean():.2f} | " + " | ".join(cells) + " |")
    return lines


def draw(found: dict[str, Any]) -> None:
    """The share of the first token and of the strongest key over the mask ratio, for every model."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    for name, one in found.items():
        ratios = [float(ratio) for ratio in one["strength"]]
        for axis, field in zip(axes, ("strongest_share", "first_share"), strict=True):
            axis.plot(ratios, [np.mean(row[field]) for row in one["strength"].values()], marker="o", label=name)
    axes[0].set_ylabel("mean weight")
    axes[0].set_title("strongest key of a head")
    axes[1].set_title("first token")
    for axis in axes:
        axis.set_xlabel("share of tokens that are masked")
        axis.set_ylim(0, None)
    axes[1].legend(fontsize=8)
    figure.savefig(RESULTS / "strength.png", dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "adapters", "measure", "report"))
    parser.add_argument("points", nargs="*", help="of measure: names of points; all when left out")
    parser.add_argument("--parts", nargs="*", default=[], choices=PARTS, help="of measure; all when left out")
    given = parser.parse_args()
    if given.command == "train":
        train_all()
    elif given.command == "adapters":
        take_adapters()
    elif given.command == "measure":
        measure(given.points, given.parts)
    else:
        report()


if __name__ == "__main__":
    main()
