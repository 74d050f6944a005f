"""The referee, run: margins of a run's texts, the effect of rounding on its score, and two runs in
pairs.
"""

# B batch rows, S canvas positions
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.sampling.settings import DecodingSettings
from sinklab.extras.referee.margins import (
    PROBES,
    check_greedy,
    measure_margins,
    near_ties,
    rewritten,
)
from sinklab.extras.referee.rounding import (
    change_chances,
    counted,
    draws_variance,
    noise_between,
    redrawn,
    swing,
)
from sinklab.extras.referee.study import RefereeSettings
from sinklab.lab.analysis.intervals import mcnemar, paired_share_interval, wilson
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.records import Run, open_run, weights_hash
from sinklab.lab.reports.words import statements
from sinklab.lab.scoring.prompts import encode
from sinklab.lab.scoring.writing import WritingRequest, canvas_of, ending
from sinklab.lab.studies.base import Work, from_record, text_of
from sinklab.lab.studies.processes import Amount, Progress

KEYS = ["task", "filter", "item"]
TOKENS = 256
"""Tokens of an answer if the run does not say."""
FACTS = ("weights_sha256", "dtype", "device")
"""Facts of a model in which two runs may differ."""


@dataclass(frozen=True)
class Plan:
    """Runs to be judged."""

    runs: list[Run]
    """One run, or two to be compared."""
    items: pd.DataFrame
    """Items of the first run, from `items_of`."""
    pairs: pd.DataFrame | None
    """Items that both answered."""
    loaded: Any
    """The model of the first; None if no margins are measured."""
    settings: Any
    """Decoding settings of the run."""
    why: str
    """Why no margins are measured; empty if they are."""


def items_of(run: Run) -> pd.DataFrame:
    """Answers of a run, a line an item: `KEYS`, prompt, text (or the choice), right (NaN if not
    said, as for texts of a trace), target, logprobs, stderrs. Of a benchmark with several filters
    the first. Raises ValueError for a run of another kind.
    """
    if run.info.kind == "benchmark":
        found = run.table("samples").rename(columns={"doc_id": "item"})
        # if likelihoods choose there is no text; a share of an answer (F1, a probability) is not
        # right or wrong
        found["text"] = found["response"].where(found["response"] != "", found["answer"])
        found["right"] = found["right"].where(found["right"].isin([0, 1]))
        # not in runs of before
        found["new_tokens"] = found.get("new_tokens", 0)
        return found[
            found["filter"] == found.groupby("task")["filter"].transform("min")
        ].reset_index(drop=True)
    if "generations" not in run.tables:
        raise ValueError(
            f"the referee judges runs of `sinklab eval` and `sinklab trace`, but {run.path} is of "
            f"kind {run.info.kind!r}; make one of these"
        )
    found = run.table("generations").rename(columns={"sample": "item", "completion": "text"})
    found = found[found["masked_sinks"] == 0].reset_index(drop=True)
    return found.assign(
        task="", filter="", right=np.nan, target="", logprobs="", stderrs="", cut=0, new_tokens=0
    )


def _prompt(loaded: Any, run: Run, item: Any) -> tuple[int, ...]:
    """The ids that a text was written behind; those of a benchmark are in the chat format already,
    and may be cut.
    """
    chat = bool(run.info.settings.get("chat"))
    if chat and run.info.kind == "benchmark":
        return tuple(loaded.needed_tokenizer()(item.prompt, add_special_tokens=False)["input_ids"])[
            item.cut :
        ]
    return encode(loaded, item.prompt, chat).ids[item.cut :]


def prepare(loaded: None, settings: RefereeSettings, progress: Progress) -> Plan:
    """The runs, and the model of the first.

    Raises:
        ValueError: for no run, runs of another kind, two without a common item, and, if no second
            run is given, a model or decoder with margins that cannot be measured.
    """
    plan = _asked(settings)
    if plan.why:
        return plan
    try:
        return replace(plan, loaded=_model_of(plan.runs[0], settings.device, progress))
    except (ValueError, OSError) as error:
        # two runs are compared without their model as well
        if len(plan.runs) == 1:
            raise
        return replace(plan, why=str(error))


def _asked(settings: RefereeSettings) -> Plan:
    """The plan before the model is read."""
    if not settings.runs:
        raise ValueError(
            "the referee needs a run folder of `sinklab eval` or `sinklab trace`; give RUN or RUN "
            "OTHER"
        )
    runs = [open_run(path) for path in settings.runs]
    items, pairs = items_of(runs[0]), None
    if len(runs) == 2:
        pairs = items.merge(items_of(runs[1]), on=[*KEYS, "prompt"], suffixes=("", "_other"))
        if pairs.empty:
            raise ValueError(
                f"{runs[0].path} and {runs[1].path} have no item in common; compare runs of one "
                "task"
            )
        pairs["same"] = pairs["text"] == pairs["text_other"]
    if not settings.texts:
        return Plan(runs, items, pairs, None, None, "texts=0 measures no margins")
    how, why = None, ""
    try:
        how = decoding_of(runs[0], items)
    except ValueError as error:
        if len(runs) == 1:
            raise
        why = str(error)
    return Plan(runs, items, pairs, None, how, why)


def amount(settings: RefereeSettings, info: None) -> Amount:
    """Every step of every text, read as it is and under jitter, and of the texts that go on from
    near ties. Raises ValueError as `prepare` does, but for the model, which is not read.
    """
    plan = _asked(settings)
    about, kept = plan.runs[0].info.model, plan.runs[0].info.settings
    texts = forced = 0
    if not plan.why:
        texts, forced = min(settings.texts, len(plan.items)), settings.forced
    new = kept.get("new_tokens") or TOKENS
    steps, batches = kept.get("steps") or new, math.ceil(texts / settings.batch)
    # a token of text has some four letters
    positions = min(texts, settings.batch) * (new + int(plan.items["prompt"].str.len().mean()) // 4)
    evaluations = steps * (batches * (1 + PROBES) + math.ceil(forced / settings.batch))
    if not evaluations:
        return Amount("the answers as they are recorded", 0, 0)
    words = f"{texts} texts × {steps} steps, and up to {forced} near ties"
    return Amount(words, evaluations, positions, about.get("parameters"), about.get("layers", 0))


def decoding_of(run: Run, items: pd.DataFrame) -> DecodingSettings:
    """Decoding settings of a run. Raises ValueError if its choices have no margins."""
    kept, remedy = run.info.settings, "give another run to compare it with, and --texts 0"
    if run.info.model.get("family") != "diffusion" or any(map(len, items["logprobs"])):
        raise ValueError(
            f"margins are of texts that a diffusion model wrote, and {run.path} has none; {remedy}"
        )
    if kept.get("edits") or (kept.get("mask_sinks") and run.info.kind == "benchmark"):
        raise ValueError(
            f"margins are of texts written without edits, but {run.path} has some; {remedy}"
        )
    names = [one.name for one in fields(DecodingSettings)]
    known = {name: kept[name] for name in names if name in kept}
    how: DecodingSettings = from_record(DecodingSettings(), known)
    check_greedy(how)
    return how


def _model_of(run: Run, device: str | None, progress: Progress) -> Any:
    about = run.info.model
    progress.stage(f"loading {about['name']}")
    loaded = load(
        about["name"],
        dtype=about["dtype"],
        device=device or about["device"],
        revision=about["revision"],
    )
    if weights_hash(loaded.model.state_dict()) != about["weights_sha256"]:
        raise ValueError(
            f"{about['name']} has other weights than when {run.path} was made; bring those back"
        )
    return loaded


def judge(work: Work) -> None:
    """Write the tables ``margins``, ``forced`` and ``rounding`` if margins are measured,
    ``variance`` if the run has scores, and ``pairs`` and ``verdict`` of two runs.
    """
    plan = work.plan
    tables = {}
    if plan.loaded is not None:
        tables["margins"], tables["forced"] = _measured(plan, work.settings, work.progress)
        tables["rounding"] = rounding_table(plan, tables["margins"], tables["forced"])
    scores = plan.items["right"].dropna()
    if len(scores):
        tables["variance"] = variance_table(plan, scores, tables.get("rounding"))
    if plan.pairs is not None:
        tables["pairs"] = plan.pairs[[*KEYS, "right", "right_other", "same"]]
        tables["verdict"] = pd.DataFrame([verdict(plan, tables.get("rounding"))])
    for name, table in tables.items():
        work.run.table(name, table)


def _measured(
    plan: Plan, settings: RefereeSettings, progress: Progress
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The margins of the texts, and the results of near ties that were decided otherwise."""
    loaded, kept = plan.loaded, plan.runs[0].info.settings
    how = ending(plan.settings, loaded.model.config)
    items = plan.items.head(settings.texts)
    requests = [WritingRequest(_prompt(loaded, plan.runs[0], one)) for one in items.itertuples()]
    lengths = items["new_tokens"].where(items["new_tokens"] > 0, kept.get("new_tokens") or TOKENS)
    # the last number is the answer if all targets are numbers, else the whole text
    numbers = bool(items["target"].str.contains(r"\d").all())
    found, forced = [], []
    parts = [
        at[start : start + settings.batch]
        for at in items.groupby(lengths).indices.values()
        for start in range(0, len(at), settings.batch)
    ]
    for rows in parts:
        length = int(lengths.iloc[rows[0]])
        progress.stage(f"{len(rows)} of {len(requests)} texts, of {length} tokens")
        canvas = canvas_of(loaded, [requests[row] for row in rows], length).to(loaded.model.device)
        ids_BS, table = measure_margins(loaded, canvas, how, seed=settings.seed or 0)
        ties = math.ceil(settings.forced * len(ids_BS) / len(requests))
        near = near_ties(table, ties, settings.seed)
        others = rewritten(loaded, canvas, how, near)
        for line, other_S in zip(near.to_dict("records"), others, strict=True):
            open_S = canvas.open_BS[line["row"]]
            own, other = ids_BS[line["row"]][open_S], other_S[open_S]
            texts = [text_of(loaded, ids) for ids in (own, other)]
            answers: list[Any] = texts
            if numbers:
                answers = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)[-1:] for text in texts]
            changed = float((own != other).float().mean())
            line |= {"row": rows[line["row"]], "tokens": changed, "text": changed > 0}
            forced.append(line | {"answer": answers[0] != answers[1]})
        found.append(table.assign(row=rows[table["row"]]))
    return pd.concat(found, ignore_index=True), pd.DataFrame(forced)


def rounding_table(plan: Plan, found: pd.DataFrame, forced: pd.DataFrame) -> pd.DataFrame:
    """Effects of each possible difference, the largest first: how many texts take another way, mean
    and 95 % interval; the share of answers that change, mean and upper end; and whether it is
    extrapolated.
    """
    texts = found["row"].nunique()
    share, most = np.nan, np.nan
    if len(forced):
        hits = int(forced["answer"].sum())
        share, most = hits / len(forced), wilson(hits, len(forced))[1]
    lines = []
    for kind, noise in noise_between(*(run.info.model for run in plan.runs)).items():
        mean, low, high = counted(change_chances(found, noise, PROBES))
        reach = high / texts
        if texts < len(plan.items):
            # the texts are a sample of the items, as the ties are of all ties
            reach = wilson(high, texts)[1]
        line = {"kind": kind, "texts": texts, "changed": mean, "low": low, "high": high}
        line |= {"answers": mean * share / texts, "answers_high": reach * most}
        lines.append(line | {"is_extrapolated": kind == "device"})
    return pd.DataFrame(lines).sort_values("changed", ascending=False, ignore_index=True)


def variance_table(plan: Plan, scores: pd.Series, rounding: pd.DataFrame | None) -> pd.DataFrame:
    """The variance of the mean score in parts that have names, and how each is known; NaN for an
    unknown part.
    """
    items = len(scores)
    nothing = 0.0, "nothing is drawn"
    parts = {
        "items": (scores.mean() * (1 - scores.mean()) / items, "binomial"),
        "rounding": (np.nan, f"not measured: {plan.why}"),
        "estimator draws": nothing,
        "seed": nothing if plan.settings else (np.nan, "not known: takes another seed"),
    }
    if rounding is not None:
        worst = rounding.iloc[0]
        source = f"{worst['kind']}, margins of {worst['texts']} texts"
        parts["rounding"] = worst["answers"] / (2 * items), source
    if any(map(len, plan.items["logprobs"])):
        source = "errors of the choices, taken as independent"
        parts["estimator draws"] = draws_variance(plan.items), source
    if plan.pairs is not None and _differences(plan) == ["seed"]:
        scored = _scored(plan.pairs)
        apart = (scored["right"] != scored["right_other"]).mean()
        source = "two runs that differ in their seed alone"
        parts["seed"] = apart / (2 * max(len(scored), 1)), source
    lines = [(part, value, value**0.5, source) for part, (value, source) in parts.items()]
    return pd.DataFrame(lines, columns=["part", "variance", "deviation", "source"])


def _scored(pairs: pd.DataFrame) -> pd.DataFrame:
    """The items that are right or wrong in both runs."""
    return pairs.dropna(subset=["right", "right_other"])


def _differences(plan: Plan) -> list[str]:
    """Names of the settings and facts in which two runs differ: settings, model, type, device."""
    one, other = (
        run.info.settings | {f: run.info.model.get(f) for f in FACTS} for run in plan.runs
    )
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def verdict(plan: Plan, rounding: pd.DataFrame | None) -> dict[str, Any]:
    """Two runs on the items that both answered, as numbers; the swings are half the intervals of
    the difference, by the rounding that was measured, and were every item drawn anew."""
    pairs: Any = plan.pairs
    scored = _scored(pairs)
    facts: dict[str, Any] = {
        "items": len(pairs),
        "apart": int((~pairs["same"]).sum()),
        "why": plan.why,
        "scored": len(scored),
        "differ_in": ", ".join(_differences(plan)),
        "swing": np.nan,
        "kind": "",
        "is_extrapolated": False,
    }
    if rounding is not None:
        facts |= rounding.iloc[0][["kind", "is_extrapolated", "answers_high"]].to_dict()
    if len(scored):
        one, other = scored["right"], scored["right_other"]
        items, gained, lost = len(scored), int((other > one).sum()), int((other < one).sum())
        low, high = paired_share_interval(gained, lost, items)
        # one right and one wrong answer more: a score of 0 does not say that nothing can be right
        redrawn_share = redrawn(*((each.sum() + 1) / (items + 2) for each in (one, other)))
        facts |= {
            "score": one.mean(),
            "score_other": other.mean(),
            "gained": gained,
            "lost": lost,
            "difference": other.mean() - one.mean(),
            "low": low,
            "high": high,
            "p": mcnemar(gained, lost),
            "swing_most": swing(items, redrawn_share),
        }
        if rounding is not None:
            facts["swing"] = swing(items, facts["answers_high"])
    return facts


def sentences(runs: list[Run]) -> list[str]:
    """Sentences about the tables."""
    told = statements("sinklab.extras.referee", ())
    said = []
    for run in runs:
        tables = {name: run.table(name) for name in run.tables}
        if "margins" in tables:
            margins, forced = tables["margins"], tables["forced"]
            kinds = margins.groupby("kind")["margin"].describe(percentiles=[0.01, 0.5])
            said += told(
                "margins", kinds.reset_index().to_dict("records"), margins["row"].nunique()
            )
            said += told("forced", forced.mean(numeric_only=True), len(forced))
            said += told("rounding", tables["rounding"].to_dict("records"))
        if "variance" in tables:
            said += told("variance", tables["variance"].to_dict("records"))
        if "verdict" in tables:
            said += told("verdict", tables["verdict"].iloc[0])
    return said
