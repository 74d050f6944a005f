"""Questions 10 to 12 of what_sinks_do.md: a screen of heads, sinks removed by degree, and states
amplified.

    python studies/screen_and_degree.py measure          what is missing, two texts at a time; stop
                                                         it and repeat it
    python studies/screen_and_degree.py measure heads smollm2 --texts 4
    python studies/screen_and_degree.py report           tables and figures, from the results

SINKLAB_BOOKS names the folder of public-domain books that the real models read.
"""

# T texts, S positions, L layers, H heads, K keys
import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import smollm2_measures as measures
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor

from sinklab import BlockKeys, intervene, load, trace
from sinklab.core.instrument import TopKeys
from sinklab.lab.analysis.differences import effects
from sinklab.lab.analysis.estimates import FEWEST, mean_over
from sinklab.lab.measures.amplify import Amplify
from sinklab.lab.measures.partial import Weaken
from sinklab.lab.measures.protocols import in_place_of
from sinklab.lab.measures.screen import screen
from sinklab.lab.scoring.arms import arm_losses, heldout_rows
from sinklab.lab.studies import heldout_text

RESULTS = Path(__file__).with_suffix("")
BOOKS = Path(os.environ.get("SINKLAB_BOOKS", "../shared/data/books_pd"))
REAL = ("smollm2-diffusion", "smollm2")
MODELS = ("tiny", "tiny-sink", "tiny-causal", *REAL)
TEXTS, TOGETHER, LENGTH = 16, 2, 64
BETAS = (0.0, 0.25, 0.5, 0.75)
ARMS = ("sinks", "random", "matched", "equal_mass")
PLACE, RATIO = 30, 0.15
"""Position whose states are amplified, behind the first layer, and the share of masked tokens."""
SCALES, MEANS = (3.0, 10.0, 30.0), ("channels", "positions", "none")
ARM_WORDS = dict(zip(ARMS, ("strongest keys", "random", "matched", "equal mass"), strict=True))
MEAN_WORDS = dict(zip(MEANS, ("λ(o − μ) + μ, channels", "the same, positions", "λo"), strict=True))
FIRST = 10
"""Heads that a screen is asked for."""


def texts_of(name: str, loaded: Any) -> Tensor:
    """The texts, ids (T, S): of the books, spread over them, or of the packaged excerpt."""
    if name not in REAL:
        return heldout_rows(loaded, heldout_text(None), rows=TEXTS, length=LENGTH).ids_RS
    rows = measures.book_rows(loaded.needed_tokenizer(), BOOKS / "valid.jsonl.gz", LENGTH, 8)
    books = rows.view(-1, 8, LENGTH).transpose(0, 1)
    return books.reshape(-1, LENGTH)[:TEXTS]


def heads(loaded: Any, ids_TS: Tensor, first: int) -> pd.DataFrame:
    """Question 10: the real cost of each head's strongest key, and the screen's, a line a text and
    head; held, the attention of that key.
    """
    layers, each = loaded.backbone.num_hidden_layers, loaded.backbone.num_attention_heads
    places = [*itertools.product(range(layers), range(each))]
    arms: dict[Any, Any] = {None: []}
    for layer, head in places:
        arms[layer, head] = [BlockKeys(TopKeys(1), layers=(layer,), heads=(head,))]
    begun = time.process_time()
    screened_TN = screen(loaded, ids_TS.tolist(), first=first).flatten(1)
    middle = time.process_time()
    found = [*arm_losses(loaded, arms, ids_TS.tolist(), first=first)]
    seconds = {"screen": middle - begun, "blocked": time.process_time() - middle}
    print("  " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()), flush=True)
    lines = []
    for text, screened_N in enumerate(screened_TN):
        clean, *blocked = found[text * len(arms) : (text + 1) * len(arms)]
        for (layer, head), one, cost in zip(places, blocked, screened_N.tolist(), strict=True):
            line = {"layer": layer, "head": head, "real": one.loss - clean.loss, "screen": cost}
            lines.append({"text": first + text, **line, "held": one.about["held"]})
    return pd.DataFrame(lines).assign(**{f"{name}_s": value for name, value in seconds.items()})


def degree(loaded: Any, ids_TS: Tensor, first: int) -> pd.DataFrame:
    """Question 11: loss and dose as each head's strongest key keeps a part of its weight."""
    arms: dict[Any, Any] = {("none", 1.0): []}
    for name, beta in itertools.product(ARMS, BETAS):
        keys = in_place_of(TopKeys(1), name)
        arms[name, beta] = [BlockKeys(keys, how=Weaken(beta=beta))]
    lines = [
        {"text": one.text, "arm": one.arm[0], "beta": one.arm[1], "loss": one.loss, **one.about}
        for one in arm_losses(loaded, arms, ids_TS.tolist(), first=first)
    ]
    return pd.DataFrame(lines)[["text", "arm", "beta", "loss", "held", "removed", "matched"]]


@torch.inference_mode()
def amplify(loaded: Any, ids_TS: Tensor, first: int) -> pd.DataFrame:
    """Question 12: the mean weight of a position in the layers above the one whose output is
    amplified there, and the share of their heads in which it is strong.
    """
    if loaded.is_diffusion:
        mask_id = loaded.model.config.mask_token_id
        before_TS = ids_TS.new_zeros(first, ids_TS.shape[1])
        ids_TS = measures.masked_at(torch.cat([before_TS, ids_TS]), RATIO, mask_id)[first:]
    lines = []
    for scale, mean in [(1.0, "none"), *itertools.product(SCALES, MEANS)]:
        edit = Amplify(positions=(PLACE,), scale=scale, mean=mean, layers=(0,))
        with intervene(loaded.model, edit), trace(loaded.model) as recording:
            loaded.model(ids_TS, logits_to_keep=torch.zeros(0, dtype=torch.int64))
        weight_TLHK = recording.received[0] / recording.visible[0].float()[:, None, None]
        own_TLH = weight_TLHK[:, 1:, :, loaded.added_sinks + PLACE]
        for text, own_LH in enumerate(own_TLH):
            strong = float((own_LH > measures.STRONG).float().mean())
            line = {"text": first + text, "scale": scale, "mean": mean}
            lines.append({**line, "weight": float(own_LH.mean()), "strong": strong})
    return pd.DataFrame(lines)


QUESTIONS: dict[str, Callable[[Any, Tensor, int], pd.DataFrame]] = {
    "amplify": amplify,
    "degree": degree,
    "heads": heads,
}


def measure(questions: list[str], models: list[str], texts: int) -> None:
    """What is missing: every model reads four texts more before any reads another four."""
    for first, name in itertools.product(range(0, texts, TOGETHER), models or MODELS):
        loaded = None
        for question in questions or QUESTIONS:
            file = RESULTS / f"{question}-{name}.csv"
            there = pd.read_csv(file) if file.is_file() else pd.DataFrame({"text": []})
            if first in {*there["text"]}:
                continue
            loaded = loaded or load(name)
            ids_TS = texts_of(name, loaded)[first : first + TOGETHER]
            print(f"{question} of {name}, texts from {first}", flush=True)
            found = QUESTIONS[question](loaded, ids_TS, first)
            RESULTS.mkdir(exist_ok=True)
            every = pd.concat([there, found]).astype({"text": int})
            every.to_csv(file, index=False, float_format="%.5g")


def result(question: str, name: str) -> pd.DataFrame | None:
    """What is measured of a model; None for nothing."""
    file = RESULTS / f"{question}-{name}.csv"
    return pd.read_csv(file) if file.is_file() else None


def recall(one_N: np.ndarray, real_N: np.ndarray) -> float:
    """Share of the `FIRST` costliest heads that are among as many first ones by another number."""
    return len({*np.argsort(-one_N)[:FIRST]} & {*np.argsort(-real_N)[:FIRST]}) / FIRST


def rank(one_N: np.ndarray, real_N: np.ndarray) -> float:
    """Spearman's correlation."""
    return float(spearmanr(one_N, real_N).statistic)


def screened(table: pd.DataFrame) -> dict[str, Any]:
    """Question 10 of a model, as a line of the table."""
    by_TN = {
        name: table.pivot(index="text", columns=["layer", "head"], values=name).to_numpy()
        for name in ("real", "screen", "held")
    }
    texts, count = by_TN["real"].shape
    whole = {name: values_TN.mean(0) for name, values_TN in by_TN.items()}
    generator, drawn, halves = np.random.default_rng(0), [], []
    for _ in range(1000):
        some_T = generator.integers(texts, size=texts)
        drawn.append(recall(by_TN["screen"][some_T].mean(0), by_TN["real"][some_T].mean(0)))
        order_T = generator.permutation(texts)
        real, other = by_TN["real"][order_T[: texts // 2]], by_TN["real"][order_T[texts // 2 :]]
        guess = by_TN["screen"][order_T[: texts // 2]]
        pairs = [(one.mean(0), other.mean(0)) for one in (real, guess)]
        halves.append([of(*pair) for of in (recall, rank) for pair in pairs])
    low, high = np.quantile(drawn, (0.025, 0.975))
    ceiling, crossed, rank_ceiling, rank_crossed = np.mean(halves, 0)
    seconds = table.drop_duplicates(["screen_s", "blocked_s"])[["screen_s", "blocked_s"]].sum()
    interval = f" ({low:.2f} … {high:.2f})" if texts >= FEWEST else ""
    first, chance = np.argsort(-whole["screen"])[:FIRST], generator.permutation(count)[:FIRST]
    return {
        "heads": count,
        "texts": texts,
        "recall of ten": f"{recall(whole['screen'], whole['real']):.2f}{interval}",
        "by attention": f"{recall(whole['held'], whole['real']):.2f}",
        "halves: screen, ceiling": f"{crossed:.2f}, {ceiling:.2f}",
        "rank correlation": f"{rank(whole['screen'], whole['real']):.2f}",
        "its halves: screen, ceiling": f"{rank_crossed:.2f}, {rank_ceiling:.2f}",
        "costliest head: real, screen": told(whole, [int(whole["real"].argmax())]),
        "ten first: real, screen": told(whole, first),
        "ten random: real, screen": told(whole, chance),
        "seconds: screen, blocked": f"{seconds['screen_s']:.0f}, {seconds['blocked_s']:.0f}",
    }


def told(whole: dict[str, np.ndarray], places: Any) -> str:
    """Mean real cost of some heads and their mean cost by the screen, nats."""
    return f"{whole['real'][places].mean():+.4f}, {whole['screen'][places].mean():+.4f}"


def by_degree(table: pd.DataFrame) -> tuple[list[dict[str, Any]], list[float]]:
    """Question 11 of a model: a line a weight that stays, and the primary outcome of each text."""
    cells = table.set_index(["text", "arm", "beta"])
    clean = cells["loss"].xs(("none", 1.0), level=("arm", "beta"))
    cost, removed = (cells["loss"] - clean).unstack("text"), cells["removed"].unstack("text")
    lines = []
    for beta in BETAS:
        line: dict[str, Any] = {"β": beta}
        for arm in ARMS:
            one, mass = cost.loc[arm, beta], removed.loc[arm, beta]
            line[ARM_WORDS[arm]] = f"{mean_of(one)} at {100 * mass.mean():.1f} %"
        lines.append(line)
    share = removed.loc["sinks", 0.5] / removed.loc["sinks", 0.0]
    return lines, (cost.loc["sinks", 0.5] - share * cost.loc["sinks", 0.0]).tolist()


def amplified(table: pd.DataFrame) -> tuple[list[dict[str, Any]], list[float]]:
    """Question 12 of a model: a line a factor, and the primary outcome of each text."""
    weight = table.pivot(index="text", columns=["scale", "mean"], values="weight")
    strong = table.groupby(["scale", "mean"])["strong"].mean()
    lines = []
    for scale in SCALES:
        line: dict[str, Any] = {"λ": scale, "nothing": f"{weight[1.0, 'none'].mean():.3f}"}
        for mean in MEANS:
            heads_ = f"{100 * strong[scale, mean]:.0f} % strong"
            line[MEAN_WORDS[mean]] = f"{weight[scale, mean].mean():.3f}, {heads_}"
        lines.append(line)
    return lines, (weight[10.0, "channels"] - weight[10.0, "none"]).tolist()


def mean_of(values: Any) -> str:
    """A mean over texts with its 95 % interval."""
    found = mean_over(np.asarray(values))
    if np.isnan(found.low):
        return f"{found.value:+.3f}"
    return f"{found.value:+.3f} ({found.low:+.3f} … {found.high:+.3f})"


def as_table(lines: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    rows = ["| " + " | ".join(map(str, line.values())) + " |" for line in lines]
    return ["| " + " | ".join(lines[0]) + " |", "|---" * len(lines[0]) + "|", *rows, ""]


def report() -> None:
    """Print tables of what is measured, and draw heads.png and degree.png."""
    found = {name: result("heads", name) for name in MODELS}
    lines = [{"": name} | screened(one) for name, one in found.items() if one is not None]
    text = ["## 10. A screen of heads", ""]
    for line in zip(*(one.items() for one in lines), strict=True):
        text.append("| " + " | ".join([line[0][0], *(str(value) for _, value in line)]) + " |")
        if len(text) == 3:
            text.append("|---" * (len(lines) + 1) + "|")
    outcomes = []
    for title, question, of in (
        ("11. By degree: cost in nats, at the attention removed", "degree", by_degree),
        ("12. Amplified: mean weight of the position in later layers", "amplify", amplified),
    ):
        text += ["", f"## {title}", ""]
        for name in MODELS:
            table = result(question, name)
            if table is None:
                continue
            lines, values = of(table)
            text += [f"{name}, {table['text'].nunique()} texts", "", *as_table(lines)]
            outcomes += [
                {"arm": f"{question}, {name}", "sample": text_, "value": value}
                for text_, value in enumerate(values)
            ]
    rows = pd.DataFrame(outcomes)
    for names in (rows["arm"].unique(), [f"{one}, {REAL[0]}" for one in ("degree", "amplify")]):
        some = rows[rows["arm"].isin(names)]
        if some.empty:
            continue
        told_ = effects(some)[["arm", "mean", "low", "high", "detectable", "p", "n", "verdict"]]
        title = "Primary outcomes of all models" if len(names) > 2 else "Those registered"
        text += ["", f"## {title}, corrected together (Holm)", ""]
        text += as_table(
            told_.map(lambda x: f"{x:.3g}" if isinstance(x, float) else x).to_dict("records")
        )
    print("\n".join(text))
    draw()


def draw() -> None:
    """Real costs over those of the screen, and the cost over the attention removed."""
    for question in ("heads", "degree"):
        tables = {name: result(question, name) for name in MODELS}
        there = {name: table for name, table in tables.items() if table is not None}
        figure = Figure((2.6 * len(there), 2.6), layout="constrained")
        for axes, (name, table) in zip(figure.subplots(1, len(there)), there.items(), strict=True):
            axes.set_title(f"{name}, {table['text'].nunique()} texts", fontsize=8)
            if question == "heads":
                means = table.groupby(["layer", "head"])[["screen", "real"]].mean()
                axes.scatter(means["screen"], means["real"], s=6)
                axes.set(xlabel="screen, nats", ylabel="blocked, nats")
                for scale in (axes.set_xscale, axes.set_yscale):
                    scale("symlog", linthresh=1e-3)
                axes.set_xticks([-1e-2, 0, 1e-2])
                continue
            clean = table[table["arm"] == "none"].set_index("text")["loss"]
            table = table.assign(cost=table["loss"] - table["text"].map(clean))
            for arm in ARMS:
                means = (
                    table[table["arm"].isin([arm, "none"])].groupby("beta").mean(numeric_only=True)
                )
                axes.plot(100 * means["removed"], means["cost"], ".-", label=ARM_WORDS[arm])
            axes.set(xlabel="attention removed, %", ylabel="cost, nats")
        if question == "degree":
            axes.legend(fontsize=6)
        figure.savefig(RESULTS / f"{question}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("measure", "report"))
    parser.add_argument("names", nargs="*", help="questions and models; all when left out")
    parser.add_argument("--texts", type=int, default=TEXTS, help="at most so many texts")
    given = parser.parse_args()
    questions = [name for name in given.names if name in QUESTIONS]
    if given.command == "report":
        return report()
    measure(questions, [name for name in given.names if name in MODELS], given.texts)


if __name__ == "__main__":
    main()
