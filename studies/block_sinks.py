"""Do sinks stand still when blocks are causal? Bigram-Backcopy in blocks of 4 and 16, on the whole
canvas, and causal.

    python studies/block_sinks.py train      what is missing of the models, one after the other
    python studies/block_sinks.py measure    what is missing of the measures of the models that are
                                             there
    python studies/block_sinks.py report     results.json, the figure, and the sentences of the page

Models and measures are kept in --work, a file each; whatever stops a command, the same one goes on.
The page block_sinks.md beside this file says what is measured and why.
"""

# B rows, S columns, T steps, L layers, H heads, K keys = added sinks + S
from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor

from sinklab.core.models.diffusion_lm import DiffusionLM
from sinklab.core.probing.tracing import trace
from sinklab.core.sampling.canvas import Canvas
from sinklab.core.sinks import DEFAULT, MASKED, Gu
from sinklab.extras.backcopy.figures import at_equal_dose
from sinklab.extras.backcopy.masking import hidden
from sinklab.extras.backcopy.run import (
    MEASURED,
    Rows,
    heads,
    new_model,
    scored,
    trained,
    twin,
    untrained,
)
from sinklab.extras.backcopy.source import Source
from sinklab.extras.backcopy.study import BLOCKS, BackcopySettings
from sinklab.lab.analysis.estimates import SEEDS, mean_over
from sinklab.lab.analysis.movement import motion, motion_word
from sinklab.lab.records.storage import write_beside
from sinklab.lab.reports.style import DPI, theme_named, themed

RESULTS = Path(__file__).with_suffix("")
STEPS = {"causal plain": 2500, "causal sink": 1000, "diffusion": 2500, "more": 500}
"""Of training: "more" is what the models with blocks, and "full" beside them, have after the
diffusion models, at a third of the rates."""
KINDS = (
    *itertools.product(("causal", "block16", "block4", "full"), ("plain",)),
    *itertools.product(("block4", "causal", "full", "block16"), ("sink",)),
)
"""In the order of training; all seeds of a kind follow one another."""
GIVEN, NEW = 16, 3_000_000
"""Columns that are given, and where the seeds of the rows that are revealed begin."""
PRECONDITION, NEAR = 0.1, 0.05


class Arm(NamedTuple):
    """In which order tokens are revealed to a model, what it sees, and whose attention counts."""

    name: str
    size: int | None
    """Tokens of the blocks of the order; None for none."""
    seen: int | None
    """Tokens of the blocks of attention."""
    reading: str
    """own: queries under masks in these blocks; one: the query of the token that is revealed."""


def arms_of(objective: str) -> list[Arm]:
    """The arms that a kind of model is watched in."""
    if objective == "causal":
        return [Arm("causal", None, None, "one")]
    found = [(f"block {size}", size, size) for name, size in BLOCKS.items() if name == objective]
    if objective == "full":
        found += [("full, free", None, None)]
        found += [(f"full, as {size}", size, None) for size in BLOCKS.values()]
        found += [(f"full, read in {size}", size, size) for size in BLOCKS.values()]
    return [Arm(*arm, reading) for arm in found for reading in ("own", "one")]


TWINNED = [Arm(f"full, as {size}", size, None, "own") for size in BLOCKS.values()]
"""What untrained twins of the full canvas are watched in."""


def order_of(rows: int, length: int, given: int, size: int | None, seed: int) -> Tensor:
    """The column that each step reveals in each row, int64 (B, T): drawn from the seed inside
    blocks of this size.
    """
    column_BT = torch.arange(given, length).expand(rows, -1)
    key_BT = torch.rand(column_BT.shape, generator=torch.Generator().manual_seed(seed))
    return given + (key_BT if size is None else key_BT + column_BT // size).argsort(1)


@torch.no_grad()
def watched(
    model: Any, ids_BS: Tensor, order_BT: Tensor, arm: Arm, mask_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean weights times the number of keys, (B, T, L, H, K), NaN where there is no key yet; and
    those numbers (T,).

    An even share is 1, however many queries are asked. A causal model goes from left to right.
    """
    length, steps, counts = ids_BS.shape[1], [], []
    model.config.block_length = arm.seen
    column_S, prefix = torch.arange(length), model.config.sink_count
    for number in range(order_BT.shape[1]):
        now_B1 = order_BT[:, number : number + 1]
        if arm.name == "causal":
            stop = length - order_BT.shape[1] + number
            with trace(model, ("last_row",)) as seen:
                model(ids_BS[:, :stop], causal=True)
            weights_BLHK = seen.values("last_row")[0]
        else:
            open_BS = torch.zeros_like(ids_BS, dtype=torch.bool).scatter(
                1, order_BT[:, number:], True
            )
            asked_BS = (
                open_BS
                if arm.size is None
                else open_BS & (column_S // arm.size == now_B1 // arm.size)
            )
            asked_BS = asked_BS if arm.reading == "own" else column_S == now_B1
            stop = length if arm.seen is None else (int(now_B1[0]) // arm.seen + 1) * arm.seen
            noisy_BS = ids_BS.masked_fill(open_BS, mask_id)[:, :stop]
            canvas = Canvas(
                noisy_BS, torch.ones_like(noisy_BS, dtype=torch.bool), asked_BS[:, :stop], mask_id
            )
            with trace(model, ("received_by_state",), canvas=canvas) as seen:
                model.denoiser(plain=True)(canvas.ids_BS, canvas.open_BS)
            weights_BLHK = (
                seen.values("received_by_state")[0][:, MASKED]
                / asked_BS.sum(1)[:, None, None, None]
            )
        counts.append(weights_BLHK.shape[-1])
        room = prefix + length - counts[-1]
        steps.append(torch.nn.functional.pad(weights_BLHK * counts[-1], (0, room), value=math.nan))
    return torch.stack(steps, 1).double().numpy(), np.array(counts)


def moves(
    received: np.ndarray, keys_T: np.ndarray, arm: Arm, given: int, added: int
) -> dict[str, float]:
    """The measures 1 to 3 of the page."""
    visible = keys_T[:, None, None, None].astype(float)
    found, text = (
        motion(received[..., cut:], visible - cut, rule=DEFAULT, added=added - cut)
        for cut in (0, added)
    )
    main, counted = found.main, found.counted
    most = np.nanmax(received, -1) / visible[..., 0]
    told = {"excess": counted.mean(), "gu": (most > Gu().weight).mean(), "share": most.mean()}
    told |= {"mobility": found.overall.mobility, "mobility_text": text.overall.mobility}
    column_T = given + np.arange(len(keys_T))
    block_T = np.zeros_like(column_T) if arm.size is None else column_T // arm.size
    pairs, border_T = counted[:, 1:] & counted[:, :-1], np.diff(block_T) > 0
    moved = pairs & (main[:, 1:] != main[:, :-1])
    for name, here_T in (("within", ~border_T), ("across", border_T)):
        told[name] = _share(moved[:, here_T].sum(), pairs[:, here_T].sum())
    text_T = keys_T - added
    is_text = counted & (main >= added)
    told["added"] = _share((counted & ~is_text).sum(), counted.sum())
    place, total = main - added, is_text.sum()
    told["first"] = _share((is_text & (place == 0)).sum(), total)
    if arm.size is not None:
        start_T = (block_T * arm.size)[:, None, None]
        told["committed"] = _share((is_text & (place < start_T)).sum(), total)
        told["later"] = _share((is_text & (place >= start_T + arm.size)).sum(), total)
        told["even"] = _share((is_text * (start_T / text_T[:, None, None])).sum(), total)
    return {name: float(value) for name, value in told.items()}


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else math.nan


def settings_of(given: argparse.Namespace, stage: str) -> BackcopySettings:
    """How models are trained in a stage, a name in `STEPS`."""
    settings = BackcopySettings(
        layers=2, steps=given.steps or STEPS[stage], models=str(given.work / "models")
    )
    return (
        replace(settings, lr=settings.lr / 3, muon_lr=settings.muon_lr / 3)
        if stage == "more"
        else settings
    )


def model_of(given: argparse.Namespace, objective: str, variant: str, seed: int) -> DiffusionLM:
    """A model, from --work/models where it is, else trained and put there."""
    source = Source(seed)
    if objective == "causal":
        return twin(source, objective, variant, settings_of(given, f"causal {variant}"))
    settings = settings_of(given, "more")
    path = Path(settings.models or "") / f"{objective}-{variant}-{seed}.safetensors"
    model = new_model(source, variant, settings, BLOCKS.get(objective))
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    model.load_state_dict(
        twin(source, "diffusion", variant, settings_of(given, "diffusion")).state_dict()
    )
    model = trained(source, stage_of(objective), variant, settings, model)
    write_beside(path, lambda part: save_file(model.state_dict(), part))
    return model


def stage_of(objective: str) -> str:
    """The objective that it has in the study backcopy."""
    return "diffusion" if objective == "full" else objective


def wanted(given: argparse.Namespace) -> Iterator[tuple[str, str, int, Path]]:
    """Objective, variant and seed of every model, and the file of its measures."""
    for (objective, variant), seed in itertools.product(KINDS, given.seeds):
        yield (
            objective,
            variant,
            seed,
            given.work / "measures" / f"{objective}-{variant}-{seed}.json",
        )


def train(given: argparse.Namespace) -> None:
    """Train what is missing."""
    for objective, variant, seed, _ in wanted(given):
        began = time.process_time()
        model_of(given, objective, variant, seed)
        print(f"{objective} {variant} {seed}: {time.process_time() - began:.0f} s", flush=True)


def measure(given: argparse.Namespace) -> None:
    """Measure the models that are there and were not measured before."""
    for objective, variant, seed, path in wanted(given):
        if path.exists() or not (given.work / "models" / f"{path.stem}.safetensors").exists():
            continue
        began, source, settings = time.process_time(), Source(seed), settings_of(given, "more")
        model = model_of(given, objective, variant, seed)
        rows = Rows.of(
            source, given.rows, stage_of(objective), torch.Generator().manual_seed(MEASURED + seed)
        )
        ids_BS = source.rows(given.watched, torch.Generator().manual_seed(NEW + seed))
        found: dict[str, list[Any]] = {"moves": [], "models": [], "heads": []}
        for state, one in (
            {"trained": model} | untrained(source, variant, settings, model)
        ).items():
            label = {"objective": objective, "variant": variant, "seed": seed, "state": state}
            for arm in arms_of(objective):
                if state != "trained" and objective == "full" and arm not in TWINNED:
                    continue
                order_BT = order_of(len(ids_BS), source.length, GIVEN, arm.size, seed)
                received, keys_T = watched(one, ids_BS, order_BT, arm, source.mask_id)
                told = moves(received, keys_T, arm, GIVEN, model.config.sink_count)
                found["moves"].append(label | {"arm": arm.name, "reading": arm.reading} | told)
            one.config.block_length = BLOCKS.get(objective)
            if state == "trained":
                found["models"].append(label | scored(one, source, rows))
                found["heads"] += [label | head for head in heads(one, rows.by_block())]
                found["masking"] = [label | cell for cell in hidden(one, rows.by_block())]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(
            path, lambda part, found=found: part.write_text(json.dumps(found), encoding="utf-8")
        )
        print(f"{path.stem}: {time.process_time() - began:.0f} s", flush=True)


Tables = dict[str, pd.DataFrame]
SIDES = {"block 4": ("full, as 4", "block4"), "block 16": ("full, as 16", "block16")}
"""Arms in blocks, the same order on the whole canvas, and the kind of model."""


def tables(given: argparse.Namespace) -> Tables:
    """The measures that there are, by table."""
    files = [json.loads(path.read_text("utf-8")) for *_, path in wanted(given) if path.exists()]
    if not files:
        raise ValueError(
            f"there are no measures in {given.work / 'measures'}; run train and measure first"
        )
    return {
        name: pd.DataFrame(itertools.chain(*(file[name] for file in files))) for name in files[0]
    }


def of_arm(
    moved: pd.DataFrame, arm: str, name: str, reading: str = "own", **like: str
) -> pd.Series:
    """A measure of an arm by seed; of trained models without an added sink unless `like` says
    otherwise.
    """
    asked = {"arm": arm, "reading": reading, "state": "trained", "variant": "plain"} | like
    return moved[(moved[[*asked]] == pd.Series(asked)).all(axis=1)].set_index("seed")[name]


def refusal(found: Tables, kinds: list[tuple[str, str]], arms: list[tuple[str, str]]) -> str:
    """Why no verdict may be given on these kinds of model (objective, variant) in these arms (arm,
    variant), or "".
    """
    models = found["models"].set_index(["objective", "variant"]).sort_index()
    for kind in kinds:
        if kind not in models.index:
            return f"{' '.join(kind)} was not trained"
        if (far := (models.loc[[kind], "over"] > NEAR).sum()) > 0:
            return (
                f"{' '.join(kind)} is not within 5 % of the best loss in {far} of "
                f"{len(models.loc[[kind]])} seeds"
            )
    for arm, variant in arms:
        rates = of_arm(
            found["moves"], arm, "excess", "one" if arm == "causal" else "own", variant=variant
        )
        if (few := (rates < PRECONDITION).sum()) > 0:
            return (
                f"{arm} has a main sink in less than 10 % of its steps in {few} of "
                f"{len(rates)} seeds"
            )
    return ""


def flipped(gaps: np.ndarray) -> float:
    """p of the exact sign-flip test of a mean."""
    means = [abs(np.mean(gaps * signs)) for signs in itertools.product((1, -1), repeat=len(gaps))]
    return float(np.mean(np.array(means) >= abs(np.mean(gaps)) * (1 - 1e-9)))


def verdict(
    words: str, gaps: pd.Series, refused: str = "", twins: dict[str, pd.Series] | None = None
) -> str:
    """A paired difference in words, with its interval, its test, and what untrained twins show of
    it.
    """
    gaps = gaps.dropna()
    told, found = f"{words}: ", mean_over(gaps.to_numpy(), fewest=SEEDS)
    numbers = f"{found.value:+.3f} ({gaps.min():+.3f} … {gaps.max():+.3f}, {found.samples} seeds)"
    if not found.is_interval:
        return told + f"described only, {numbers}"
    numbers = (
        f"{found.value:+.3f}, 95 % {found.low:+.3f} to {found.high:+.3f}, sign-flip p "
        f"{flipped(gaps.to_numpy()):.3f}"
    )
    beside = {state: one.dropna().mean() for state, one in (twins or {}).items()}
    said = {
        True: "more",
        False: "less",
        None: f"inconclusive (±{found.reach:.3f} would have shown)",
    }[found.above()]
    alike = [state for state, mean in beside.items() if mean / found.value >= 1 / 3]
    said = (
        f"no finding, untrained twins show it as well ({said})"
        if alike and found.above() is not None
        else said
    )
    said = (
        f"inconclusive, since {refused}; ±{found.reach:.3f} would have shown" if refused else said
    )
    told += f"**{said}**, {numbers}"
    return told + "".join(
        f"; {state} {mean:+.3f}" for state, mean in beside.items() if not math.isnan(mean)
    )


def of_twins(moved: pd.DataFrame, gap: Any) -> dict[str, pd.Series]:
    """A difference of untrained twins."""
    return {
        state: gap(lambda *asked, state=state, **like: of_arm(moved, *asked, state=state, **like))
        for state in TWINS
    }


TWINS = ("fresh", "permuted")


def sentences(found: Tables) -> Iterator[str]:
    """The answers to questions A to F."""
    moved = found["moves"]

    def asked(words: str, gap: Any, refused: str) -> str:
        own = gap(lambda *one, **like: of_arm(moved, *one, **like))
        return verdict(words, own, refused, of_twins(moved, gap))

    for arm, (full, kind) in SIDES.items():
        refused = refusal(
            found, [(kind, "plain"), ("full", "plain")], [(arm, "plain"), (full, "plain")]
        )
        alone = refusal(found, [(kind, "plain")], [(arm, "plain")])
        yield asked(
            f"A mobility, {arm} less {full}",
            lambda of, a=arm, f=full: of(a, "mobility") - of(f, "mobility"),
            refused,
        )
        yield asked(
            f"B moves across less within, {arm}",
            lambda of, a=arm: of(a, "across") - of(a, "within"),
            alone,
        )
        yield asked(
            f"B that of {arm} less that of {full}",
            lambda of, a=arm, f=full: (
                of(a, "across") - of(a, "within") - of(f, "across") + of(f, "within")
            ),
            refused,
        )
        yield asked(
            f"C committed less even, {arm}",
            lambda of, a=arm: of(a, "committed") - of(a, "even"),
            alone,
        )
        yield asked(
            f"D mobility of one query, {arm} less causal",
            lambda of, a=arm: of(a, "mobility", "one") - of("causal", "mobility", "one"),
            refusal(
                found, [(kind, "plain"), ("causal", "plain")], [(arm, "plain"), ("causal", "plain")]
            ),
        )
        for other in ("causal", "full"):
            doses, gaps = at_dose(found, kind, other)
            words = (
                f"E cost at equal removed attention ({doses.min():.0%} … {doses.max():.0%}), "
                f"{arm} less {other}"
            )
            yield verdict(words, gaps, refusal(found, [(kind, "plain"), (other, "plain")], []))
    for arm, reading, kind in (
        ("causal", "one", "causal"),
        ("full, free", "own", "full"),
        ("block 4", "own", "block4"),
        ("block 16", "own", "block16"),
    ):
        sink = {"variant": "sink"}
        if of_arm(moved, arm, "added", reading, **sink).empty:
            continue
        refused = refusal(found, [(kind, "sink"), (kind, "plain")], [(arm, "sink"), (arm, "plain")])
        yield verdict(
            f"F share of the main sinks on the added one less 1 of 49, {arm}",
            of_arm(moved, arm, "added", reading, **sink) - 1 / 49,
            refused,
        )
        gaps = of_arm(moved, arm, "mobility", reading, **sink) - of_arm(
            moved, arm, "mobility", reading
        )
        yield verdict(f"F mobility with an added sink less without, {arm}", gaps, refused)


def costs(found: Tables, kind: str, seed: int) -> dict[Any, tuple[float, float]]:
    """Number of keys and control to the attention removed and the cost in nats, of a plain
    model.
    """
    masked = found["masking"]
    cells = masked[
        (masked["objective"] == kind) & (masked["variant"] == "plain") & (masked["seed"] == seed)
    ]
    clean = cells.loc[cells["k"] == 0, "loss"].iloc[0]
    return {
        (cell.k, cell.control): (cell.removed, cell.loss - clean)
        for cell in cells.itertuples()
        if cell.k
    }


def at_dose(found: Tables, kind: str, other: str) -> tuple[pd.Series, pd.Series]:
    """By seed: the removed attention that two kinds of model are compared at, the one's cost less
    the other's.
    """
    masked = found["masking"][found["masking"]["variant"] == "plain"]
    have = [set(masked.loc[masked["objective"] == one, "seed"]) for one in ("causal", kind, other)]
    seeds = sorted(set.intersection(*have))
    pairs = []
    for seed in seeds:
        wanted_dose = costs(found, "causal", seed)[1, "sinks"][0]
        two = [
            [pair for (_, arm), pair in costs(found, one, seed).items() if arm == "sinks"]
            for one in (kind, other)
        ]
        pairs.append(at_equal_dose(two[0], two[1], wanted_dose))
    doses, gaps = zip(*pairs, strict=True)
    return pd.Series(doses, seeds), pd.Series(gaps, seeds)


def by_arm(moved: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of every arm, with the range of mobility."""
    keys = ["variant", "arm", "reading", "state"]
    means = moved.groupby(keys, sort=False)[MEASURES].mean()
    spread = moved.groupby(keys, sort=False)["mobility"].agg(["min", "max", "size"])
    means.insert(
        4,
        "range",
        [f"{low:.2f} … {high:.2f}" for low, high in zip(spread["min"], spread["max"], strict=True)],
    )
    means["word"] = [motion_word(value) for value in means["mobility"]]
    return means.assign(seeds=spread["size"]).reset_index()


MEASURES = [
    "excess",
    "gu",
    "share",
    "mobility",
    "within",
    "across",
    "committed",
    "even",
    "later",
    "first",
    "added",
]


def drawn(moved: pd.DataFrame) -> Figure:
    """Mobility by arm, moves within blocks and across borders, and what stands on finished columns:
    a mark a seed.
    """
    look = theme_named("light")
    arms = [
        "block 4",
        "full, as 4",
        "full, read in 4",
        "block 16",
        "full, as 16",
        "full, read in 16",
        "full, free",
    ]
    own, other, grey = (look.runs[0], "o"), (look.runs[1], "s"), (look.muted, "v")
    panels = {
        "mobility over 32 steps": {
            "trained": ("mobility", "trained", 0, *own),
            "weights permuted (fresh: no sink)": ("mobility", "permuted", 0, *grey),
        },
        "steps at which the main sink moves, share": {
            "within a block": ("within", "trained", -0.15, *own),
            "across a border": ("across", "trained", 0.15, *other),
        },
        "on finished columns, share": {
            "main sinks": ("committed", "trained", -0.15, *own),
            "keys that are seen": ("even", "trained", 0.15, look.muted, "_"),
        },
    }
    with themed(look):
        figure = Figure(figsize=(10.4, 3.7), layout="constrained")
        for plot, (title, marks) in zip(
            figure.subplots(1, 3, sharey=True), panels.items(), strict=True
        ):
            for (label, (name, state, shift, colour, marker)), at in itertools.product(
                marks.items(), range(len(arms))
            ):
                values = of_arm(moved, arms[at], name, state=state)
                places, words = np.full(len(values), at + shift), None if at else label
                plot.plot(places, values, marker, color=colour, markersize=4, label=words)
            plot.set_xticks(range(len(arms)), arms, rotation=40, ha="right", fontsize=7)
            plot.set_title(title, fontsize=9)
            plot.set_ylim(-0.03, 1.03)
            plot.legend(fontsize=7, loc="best")
    return figure


def report(given: argparse.Namespace) -> None:
    """results.json, motion.png, and on the screen the tables and sentences of the page."""
    found = tables(given)
    given.out.mkdir(exist_ok=True)
    kept = {
        name: json.loads(table.round(5).to_json(orient="records")) for name, table in found.items()
    }
    lines = [*sentences(found)]
    text = json.dumps({"steps": STEPS, "sentences": lines} | kept, ensure_ascii=False)
    (given.out / "results.json").write_text(text.replace("}, {", "},\n{") + "\n", encoding="utf-8")
    drawn(found["moves"]).savefig(given.out / "motion.png", dpi=DPI)
    looks = (
        found["heads"]
        .groupby(["objective", "variant", "seed"], sort=False)[
            ["first", "strongest", "gu", "added"]
        ]
        .max()
    )
    models = found["models"].merge(looks.reset_index(), on=["objective", "variant", "seed"])
    models["cost of position 0"] = models["hidden"] / models["loss"] - 1
    told = models.groupby(["objective", "variant"], sort=False)[
        ["over", "first", "strongest", "cost of position 0"]
    ]
    masked = found["masking"].groupby(["objective", "variant", "control", "k"], sort=False)
    with pd.option_context(
        "display.width",
        250,
        "display.max_columns",
        30,
        "display.max_rows",
        200,
        "display.precision",
        3,
    ):
        print(
            told.agg(["mean", "min", "max"]),
            by_arm(found["moves"]),
            masked[["loss", "removed", "sinks", "matched"]].mean(),
            sep="\n\n",
        )
    print(*lines, sep="\n")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "measure", "report"))
    parser.add_argument(
        "--work", type=Path, default=Path("runs/block_sinks"), help="models and measures"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results.json and figures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(6)])
    parser.add_argument("--steps", type=int, help="of every training; fewer to try it out")
    parser.add_argument("--rows", type=int, default=512, help="rows of the loss and of masking")
    parser.add_argument("--watched", type=int, default=32, help="rows that are revealed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    {"train": train, "measure": measure, "report": report}[given.command](given)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
