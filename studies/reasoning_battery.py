"""Does a small diffusion model keep reasoning without its most attended columns, and which of its
habits help it?

    python studies/reasoning_battery.py               trains four models, hours of one core
    python studies/reasoning_battery.py --smallest    less than a minute, to see that it runs
    python studies/reasoning_battery.py --trained DENOISING AUTOREGRESSIVE WINDOWED
                                                      asks models that are there

Six skills at four levels, made by rule, with known answers. All of it is single letters and digits.
Every cell is kept in --out, where the tables and figures of the page go as well: the same command
goes on where it stopped, beside others with other --parts.
"""

# B problems written together, L layers, H heads
import argparse
import hashlib
import itertools
import json
import math
import random
import string
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from matplotlib import pyplot as plt
from scipy.stats import binomtest

from sinklab import BlockKeys, Random, TopKeys, load
from sinklab.core.subject import DecodingSettings, DiffusionLM
from sinklab.lab.analysis import mean_over
from sinklab.lab.measures import WindowAttention
from sinklab.lab.scoring import Writing, WritingRequest, by_last_query, encode, ended, stop_ids
from sinklab.lab.training import TrainSettings, train

Problem = tuple[str, str]
"""A question and its answer."""
LEVELS, LEVEL_WEIGHTS, EASY = (1, 2, 3, 4), (4, 3, 2, 2), (1, 2)
NEW_TOKENS, RADIUS, GATE, ALL = 18, 8, 0.9, "all"
"""Tokens of an answer, neighbours that a windowed model sees on either side, share of right answers
above which a drop can be seen, and the name of all skills together."""
CONTROLS = {
    "sinks": ("previous", TopKeys),
    "clean_pass": ("clean", TopKeys),
    "random": ("previous", lambda k: Random(TopKeys(k))),
    "random_clean_pass": ("clean", lambda k: Random(TopKeys(k))),
}
"""When keys are chosen, and which: most attended ones (closed loop; held on to) or others."""
BESIDE = {"sinks": ("random",), "clean_pass": ("random_clean_pass", "random")}
"""Controls that each is compared with: the first that was run."""
FEW = {"levels": EASY, "ks": (1, 2, 5)}
PARTS: dict[str, dict[str, Any]] = {
    "denoising": {"model": "denoising"},
    "autoregressive": {"model": "autoregressive", "controls": tuple(CONTROLS)},
    "blocks of 6": {"model": "denoising", "block_length": 6, **FEW},
    "left to right": {"model": "denoising", "rule": "left_to_right", **FEW},
    "random order": {"model": "denoising", "rule": "random", **FEW},
    "window, untrained": {"model": "denoising", "window": RADIUS, **FEW},
    "window, trained": {"model": "windowed", "window": RADIUS, "levels": EASY},
}
PLAIN = {"levels": LEVELS, "ks": (1, 2, 5, 10), "controls": ("sinks", "clean_pass", "random")}
FORWARD = DiffusionLM.forward
ARM, SAMPLE = ["series", "control", "k"], ["skill", "level", "problem"]


def arithmetic(level: int, source: random.Random) -> Problem:
    """2, 3, 5 or 8 sums modulo ten, all running results: ``A3+5-2=`` → ``86``."""
    total = source.randrange(10)
    question, answer = f"A{total}", ""
    for _ in range((2, 3, 5, 8)[level - 1]):
        sign, number = source.choice("+-"), source.randrange(10)
        total = (total + {"+": number, "-": -number}[sign]) % 10
        question += f"{sign}{number}"
        answer += str(total)
    return f"{question}=", answer


def deduction(level: int, source: random.Random) -> Problem:
    """1, 1, 2 or 3 rules from a known truth value to the one asked for, from level 2 on among as
    many that do not lead there: ``Db=aa1d!cc0?b`` (b equals a, a is true, d is the opposite of c, c
    is false, what is b?) → ``a1b1``.
    """
    hops = (1, 1, 2, 3)[level - 1]
    names = source.sample(string.ascii_lowercase, 2 * (hops + 1))
    facts, answers = list[str](), list[str]()
    for chain in [names[: hops + 1], names[hops + 1 :]][: 1 + (level > 1)]:
        value = source.randrange(2)
        facts.append(f"{chain[0]}{value}")
        answer = facts[-1]
        for before, after in pairwise(chain):
            sign = source.choice("=!")
            value = 1 - value if sign == "!" else value
            facts.append(f"{after}{sign}{before}")
            answer += f"{after}{value}"
        answers.append(answer)
    source.shuffle(facts)
    return f"D{''.join(facts)}?{names[hops]}", answers[0]


def planning(level: int, source: random.Random) -> Problem:
    """The way of 2, 3, 4 or 5 steps through a directed graph of dead ends: ``Pabbdaccf?ad`` (edges
    a→b, b→d, a→c, c→f, from a to d) → ``abd``.
    """
    steps = (2, 3, 4, 5)[level - 1]
    names = source.sample(string.ascii_lowercase, 2 * steps + 1)
    way = names[: steps + 1]
    edges, aside = [one + other for one, other in pairwise(way)], way[0]
    # the other way out of the start is as long as the right one, the rest hang where chance has it
    for number, node in enumerate(names[steps + 1 :]):
        edges.append(aside + node)
        aside = source.choice(way[:-1]) if number + 1 >= steps - 1 else node
    source.shuffle(edges)
    return f"P{''.join(edges)}?{way[0]}{way[-1]}", "".join(way)


def rewriting(level: int, source: random.Random) -> Problem:
    """1 to 4 rules for every letter, the string after each: ``Sabca:ac,cb`` → ``cbccbbbb``."""
    text = "".join(source.choice("abcdef") for _ in range(4))
    question, answer, rules = f"S{text}:", "", list[str]()
    for _ in range(level):
        old = source.choice(sorted(set(text)))
        new = source.choice([letter for letter in "abcdef" if letter != old])
        text = text.replace(old, new)
        rules.append(old + new)
        answer += text
    return question + ",".join(rules), answer


def retrieval(level: int, source: random.Random) -> Problem:
    """The values of three of 4, 8, 12 or 16 keys: ``Rk3v8m1p7?mkv`` → ``138``."""
    keys = source.sample(string.ascii_lowercase, 4 * level)
    values = [str(source.randrange(10)) for _ in keys]
    asked = source.sample(range(len(keys)), 3)
    pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
    question = f"R{pairs}?{''.join(keys[place] for place in asked)}"
    return question, "".join(values[place] for place in asked)


def copying(level: int, source: random.Random) -> Problem:
    """4, 8, 12 or 16 letters behind as many dots: ``Cdabf....=`` → ``dabf``."""
    text = "".join(source.choice(string.ascii_lowercase) for _ in range(4 * level))
    return f"C{text}{'.' * (4 * level)}=", text


SKILLS = {
    one.__name__: one for one in (arithmetic, deduction, planning, rewriting, retrieval, copying)
}


def problems(
    split: str, count: int, skills: Any = tuple(SKILLS), levels: Any = LEVELS
) -> Iterator[Problem]:
    """Problems of a split, no question twice and none in both: one in ten, by a hash of its text,
    is for tests. In training deduction, which is learned last, and easy levels come more often.
    """
    source, seen, weights, often = random.Random(f"{split} 0"), set[str](), None, None
    if split == "train":
        weights = [LEVEL_WEIGHTS[level - 1] for level in levels]
        often = [3 if skill == "deduction" else 1 for skill in skills]
    while len(seen) < count:
        skill = source.choices(skills, often)[0]
        question, answer = SKILLS[skill](source.choices(levels, weights)[0], source)
        is_test = hashlib.sha256(question.encode()).digest()[0] < 26
        if is_test == (split == "test") and question not in seen:
            seen.add(question)
            yield question, answer


def is_right(question: str, answer: str, written: str) -> bool:
    """Whether a text answers: itself, but of a plan any way through the graph."""
    if not question.startswith("P"):
        return written == answer
    edges, ends = question[1:].split("?")
    known = {edges[place : place + 2] for place in range(0, len(edges), 2)}
    steps = {one + other for one, other in pairwise(written)}
    return len(written) > 1 and written[0] + written[-1] == ends and steps <= known


def nearby(model: DiffusionLM, input_ids: Any, **how: Any) -> Any:
    """A forward in which a token sees `RADIUS` neighbours on either side, and no others."""
    place_S = torch.arange(input_ids.shape[1], device=input_ids.device)
    return FORWARD(model, input_ids, visible=(place_S[:, None] - place_S).abs() <= RADIUS, **how)


def trained(out: Path, smallest: bool) -> dict[str, Path]:
    """Folders of the models, trained where they are not there: a causal model, and from it one that
    denoises, one that stays causal, and one that denoises and sees its neighbours alone.
    """
    files = {}
    for split, count in {"train": 300_000, "test": 2400}.items():
        files[split] = out / f"{split}.jsonl"
        some = problems(split, 300 if smallest else count)
        rows = ({"question": one, "answer": f"#### {two}"} for one, two in some)
        files[split].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    size: dict[str, Any] = {"steps": 10_000, "save_every": 1000, "heldout_rows": 480}
    if smallest:
        size = dict(steps=2, heldout_rows=60, layers=1, hidden_size=16, heads=2, mlp_size=16)
    size |= {"corpus": str(files["train"]), "heldout": str(files["test"])}
    size |= {"pairs": "completion", "length": 56, "tokenizer": "259", "batch": 64, "warmup": 0.02}
    size |= {"log_every": 100, "objective": "autoregressive"}
    on = {"lr": 1.5e-3, "steps": 2 if smallest else 4000, "init_from": str(out / "start/model")}
    denoises = {"objective": "diffusion", "logit_shift": True}
    every: dict[str, dict[str, Any]] = {"start": {}, "denoising": on | denoises}
    every |= {"autoregressive": on, "windowed": on | denoises}
    for name, own in every.items():
        print(f"training {name}", flush=True)
        near = patch.object(DiffusionLM, "forward", nearby)
        with near if name == "windowed" else nullcontext():
            train(TrainSettings(**size | own, out=str(out / name)), progress=print)
    return {name: out / name / "model" for name in every}


def cell(
    model: Any, how: dict[str, Any], control: str, k: int, asked: list[Problem], key: str
) -> Any:
    """The answers to the problems of a skill and level, written in one batch with k keys blocked in
    every layer and head, and what that took away; None where the shortest question is too short.
    """
    # the same draws however many keys are blocked, so that these alone differ
    seed = int(hashlib.sha256(f"0:{key} 0".encode()).hexdigest()[:15], 16)
    requests = [WritingRequest(encode(model, question).ids, (), seed) for question, _ in asked]
    room = min(len(one.ids) for one in requests) + NEW_TOKENS * model.is_diffusion
    if k and (2 * k > room if "random" in control else k >= room):
        return None
    edits = [WindowAttention(radius=how["window"])] if "window" in how else []
    if k:
        when, keys = CONTROLS[control]
        edits.append(BlockKeys(keys(k), when=when, seed=seed))
        edits = edits if model.is_diffusion else [*by_last_query(edits)]
    decoding: dict[str, Any] = {"rule": how.get("rule", "low_confidence"), "stop_at_eos": True}
    settings = DecodingSettings(**decoding, block_length=how.get("block_length"), seed=seed)
    sums = dict.fromkeys(("share", "mass", "of_keys", "sinks", "chosen"), (0.0, 0))
    with Writing(model, requests, settings, NEW_TOKENS, edits).begin() as writer:
        for step in writer.steps():
            for one in writer.log.removals:
                if isinstance(one.edit, BlockKeys):
                    of_keys_BLH = one["keys"] / (one["keys"] + one["left"])
                    facts = (
                        one["removed"],
                        one["held"],
                        of_keys_BLH,
                        one["sinks"],
                        one["chosen"],
                    )
                    for name, fact_BLH in zip(sums, facts, strict=True):
                        # of rows that were still being written
                        known = fact_BLH[step.active_B].double()
                        total, many = sums[name]
                        many += int((~known.isnan()).sum())
                        sums[name] = total + float(known.nansum()), many
            writer.log.removals.clear()
    answers = []
    for row, (question, answer) in enumerate(asked):
        written = ended(model, writer.row(row), ())[1].strip()
        stopped = not stop_ids(model).isdisjoint(writer.row(row))
        facts = {"written": written, "right": is_right(question, answer, written)}
        answers.append({"problem": row, "question": question} | facts | {"ended": stopped})
    means = {name: total / many if many else math.nan for name, (total, many) in sums.items()}
    return {"answers": answers, "removed": means if k else None}


def score(given: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All answers, and of every cell what blocking took away; cells that are there are read."""
    folders = given.trained or trained(given.out / "models", given.smallest)
    models: dict[str, Any] = {}
    answers, removed = list[pd.DataFrame](), list[dict[str, Any]]()
    for part in given.parts:
        how = PLAIN | PARTS[part] | given.smaller
        arms = [("none", 0), *((name, k) for k in how["ks"] for name in how["controls"])]
        for (control, k), skill, level in itertools.product(arms, given.skills, how["levels"]):
            name = f"{part}-{control}-{k}-{skill}-{level}"
            path = given.out / "cells" / f"{name}.json"
            if not path.exists():
                folder = str(folders[how["model"]])
                models[folder] = models.get(folder) or load(folder)
                asked = [*problems("test", given.problems, (skill,), (level,))]
                found = cell(models[folder], how, control, k, asked, f"{skill} {level}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found))
                print(name, flush=True)
            found = json.loads(path.read_text())
            facts = {"series": part, "control": control, "k": k, "skill": skill, "level": level}
            if found is not None:
                answers.append(pd.DataFrame(found["answers"]).assign(**facts))
                removed += [facts | found["removed"]] if k else []
    return pd.concat(answers, ignore_index=True), pd.DataFrame(removed)


def difference(change: pd.Series, name: str) -> dict[str, Any]:
    """A difference of shares on the same problems, with the interval of Agresti and Min (2005) and
    the exact McNemar test.
    """
    change = change.dropna()
    n, gained, lost = len(change), int((change > 0).sum()), int((change < 0).sum())
    if not n:
        return {f"{name}_n": 0}
    middle, spread = (gained - lost) / (n + 2), gained + lost + 1 - (gained - lost) ** 2 / (n + 2)
    half = 1.959963984540054 * math.sqrt(max(spread, 0)) / (n + 2)
    found = {name: (gained - lost) / n}
    found |= {f"{name}_low": max(middle - half, -1), f"{name}_high": min(middle + half, 1)}
    found[f"{name}_p"] = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    return found | {f"{name}_n": n, "gained": gained, "lost": lost}


def accuracy(answers: pd.DataFrame) -> pd.DataFrame:
    """Right answers by series, control, k, skill and level (0: all levels) with Wilson's interval,
    less those with nothing blocked (`delta`) and under the control (`beyond`) on the same problems.
    """
    wide, rows = answers.pivot(index=SAMPLE, columns=ARM, values="right").astype(float), []
    for (series, control, k), own in answers.groupby(ARM, sort=False):
        own = own.set_index(SAMPLE).astype({"right": float})
        own["clean"] = wide[series, "none", 0]
        own["delta"], own["beyond"] = own["right"] - own["clean"], math.nan
        there = [one for one in BESIDE.get(control, ()) if (series, one, k) in wide]
        if there:
            own["beyond"] = own["right"] - wide[series, there[0], k]
        own = own.reset_index()
        wider: list[dict[str, Any]] = [{}, {"level": 0}, {"skill": ALL}, {"skill": ALL, "level": 0}]
        whole = pd.concat([own.assign(**each) for each in wider], ignore_index=True)
        for (skill, level), group in whole.groupby(["skill", "level"], sort=False):
            n, hits = len(group), int(group["right"].sum())
            low, high = binomtest(hits, n).proportion_ci(0.95, "wilson")
            row = {"series": series, "control": control, "k": k, "skill": skill, "level": level}
            row |= {"n": n, "right": hits, "share": hits / n, "low": low, "high": high}
            row |= difference(group["beyond"], "beyond") | difference(group["delta"], "delta")
            row |= {"clean": group["clean"].mean(), "empty": int((group["written"] == "").sum())}
            rows.append(row | {"endless": int((~group["ended"]).sum())})
    return pd.DataFrame(rows)


def contrasts(answers: pd.DataFrame) -> pd.DataFrame:
    """What blocking costs one series less what it costs another, on problems of those skills and
    levels of which both answer more than `GATE` with nothing blocked.
    """
    wide, rows = answers.pivot(index=SAMPLE, columns=ARM, values="right").astype(float), []
    there = [*answers["series"].unique()]
    pairs = [("denoising", name) for name in there if name != "denoising"]
    pairs += [("left to right", "autoregressive"), ("window, untrained", "window, trained")]
    for reference, series in [pair for pair in pairs if {*pair} <= {*there}]:
        mine, other = wide[series], wide[reference]
        able = pd.concat([mine["none", 0], other["none", 0]], axis=1).groupby(level=[0, 1]).mean()
        able = able[(able > GATE).all(axis=1)].index
        for control, k in sorted({*mine.columns} & {*other.columns} - {("none", 0)}):
            drops = [one[control, k] - one["none", 0] for one in (mine, other)]
            both = pd.concat(drops, axis=1, keys=["drop", "reference_drop"]).dropna()
            cells = both.index.droplevel("problem")
            both, cells = both[cells.isin(able)], cells[cells.isin(able)].nunique()
            if len(both):
                apart = mean_over(both["drop"] - both["reference_drop"])
                row = {"series": series, "reference": reference, "control": control, "k": k}
                row |= {"cells": cells, "n": len(both), **both.mean(), "difference": apart.value}
                rows.append(row | dict(zip(("low", "high"), apart.interval, strict=True)))
    return pd.DataFrame(rows)


def tables(answers: pd.DataFrame, removed: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables of the page, by name."""
    table = accuracy(answers)
    taken = pd.concat([removed, removed.assign(skill=ALL)])
    taken["sinks"] = taken["sinks"] / taken.pop("chosen")
    taken = pd.concat([taken, taken.assign(level=0)])
    taken = taken.groupby([*ARM, "skill", "level"], as_index=False, sort=False).mean()
    doses = taken[[*ARM, "skill", "level", "share", "of_keys"]].rename(columns={"share": "removed"})
    table = table.merge(doses, on=[*ARM, "skill", "level"], how="left")
    clean = table[(table["k"] == 0) & (table["skill"] != ALL) & (table["level"] == 1)]
    gate = clean[["series", "skill", "level", "n", "share", "low", "high"]]
    scores = table[table["level"] == 0].drop(columns="level")
    summary = scores[scores["skill"] == ALL].drop(columns="skill")
    kept = [*ARM, "n", "clean", "share", "removed", "of_keys", "empty", "endless"]
    told = summary[kept].round(4)
    for name in ("delta", "beyond"):
        ends = 100 * summary[[name, f"{name}_low", f"{name}_high"]].fillna(math.nan)
        told[name] = ["{:+.1f} ({:+.1f} to {:+.1f})".format(*row) for row in ends.to_numpy()]
    columns = ["n", "share", "delta", "beyond", "removed"]
    return {
        "gate": gate.assign(holds=gate["share"] > GATE).round(4),
        "scores": scores.round(4),
        "summary": told.replace("+nan (+nan to +nan)", "–"),
        "contrasts": contrasts(answers).round(4),
        "by_level": table.loc[table["level"] > 0, [*ARM, "skill", "level", *columns]].round(4),
        "taken": taken.query("skill == @ALL and level == 0")[
            [*ARM, "share", "mass", "of_keys", "sinks"]
        ].round(4),
    }


def draw(by_level: pd.DataFrame, summary: pd.DataFrame, out: Path) -> None:
    """Right answers over the number of blocked columns, by skill, and over attention removed."""
    pictures = {
        "models": ("denoising", "autoregressive", "window, trained"),
        "decoders": ("denoising", "blocks of 6", "left to right", "random order"),
        "windows": ("denoising", "window, untrained", "window, trained"),
    }
    for (name, shown), level in itertools.product(pictures.items(), EASY):
        skills = [*by_level["skill"].unique()]
        figure, axes = plt.subplots(1, len(skills), figsize=(15, 2.4), sharey=True, squeeze=False)
        here = by_level[(by_level["level"] == level) & by_level["series"].isin(shown)]
        for (series, control), some in here[here["k"] > 0].groupby(["series", "control"]):
            style = dict(zip(CONTROLS, ("-", "--", ":", "-."), strict=True))[control]
            clean = here[(here["k"] == 0) & (here["series"] == series)]
            for ax, skill in zip(axes[0], skills, strict=True):
                line = pd.concat([clean, some]).query("skill == @skill")
                colour = f"C{shown.index(series)}"
                ax.plot(line["k"], line["share"], style, color=colour, label=f"{series}, {control}")
                ax.set(title=skill, xlabel="keys blocked per head")
        figure.legend(*axes[0, -1].get_legend_handles_labels(), fontsize=5)
        figure.savefig(out / f"{name}_level_{level}.png", bbox_inches="tight")
        plt.close(figure)
    figure, ax = plt.subplots()
    for (series, control), some in summary[summary["k"] > 0].groupby(["series", "control"]):
        if series in ("denoising", "autoregressive"):
            ax.plot(
                some["removed"], some["share"] / some["clean"], "o-", label=f"{series}, {control}"
            )
    ax.set(xlabel="attention removed", ylabel="right, of those with nothing blocked")
    ax.legend()
    figure.savefig(out / "removed.png")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--trained", nargs=3, metavar=("DENOISING", "AUTOREGRESSIVE", "WINDOWED"))
    parser.add_argument("--out", type=Path, default=Path("runs/reasoning_battery"))
    parser.add_argument("--smallest", action="store_true", help="2 steps, one skill, 2 problems")
    given = parser.parse_args()
    given.problems, given.skills, given.smaller = 50, tuple(SKILLS), {}
    if given.smallest:
        given.problems, given.skills = 2, ("copying",)
        given.smaller = {"levels": (1,), "ks": (1, 2)}
    if given.trained:
        names = ("denoising", "autoregressive", "windowed")
        given.trained = dict(zip(names, given.trained, strict=True))
    torch.set_num_threads(1)
    (given.out / "models").mkdir(parents=True, exist_ok=True)
    found = tables(*score(given))
    for name in [name for name in found if len(found[name])]:
        found[name].to_csv(given.out / f"{name}.csv", index=False)
    draw(found["by_level"], found["summary"], given.out)
    print(found["summary"].to_string(index=False))


if __name__ == "__main__":
    main()
