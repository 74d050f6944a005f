"""Measurements of smollm2_diffusion.py that the package's own studies make: motion, bounds,
benchmarks.
"""

# N texts, T draws of masks, L layers, H heads, K keys (added sink tokens first), R rows
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smollm2_measures import masked_at, sight_of, weights_of
from torch import Tensor

from sinklab.core.instrument import BlockKeys, TopKeys
from sinklab.lab.analysis.answers import staying_word
from sinklab.lab.analysis.estimates import median_over
from sinklab.lab.analysis.movement import STRONG, chance_elsewhere, of_windows
from sinklab.lab.measures import EqualMass, MaskSinks, Random
from sinklab.lab.records.reading import open_run
from sinklab.lab.reports.runs import as_studies
from sinklab.lab.scoring.arms import arm_losses
from sinklab.lab.short_road.models import LM
from sinklab.lab.studies.benchmarks.run import cells_of, table1
from sinklab.lab.studies.benchmarks.study import EvalSettings, Plan

PROMPT, NEW = 32, 32
"""Tokens of a text that are given, and that are written behind them."""
DRAWS = 2
"""Draws of masks of equal ratio on the same text."""
REDRAWN = (0.15, 0.5, 0.9)
DOCUMENTS = {"piqa": 200, "arc_easy": 200, "lambada_openai": 100}
"""Documents of each benchmark."""
BLOCKED = {"piqa": (0, 5), "arc_easy": (0, 5), "lambada_openai": (0, 5, 10)}
"""Keys that are hidden: as many random ones must be left beside them, and texts of PIQA have fewer
than 20 tokens.
"""


def spread_over_books(rows_NS: Tensor, per_book: int, count: int) -> Tensor:
    """The first row of every book, then the second, …; so many in all."""
    order = [book + row for row in range(per_book) for book in range(0, len(rows_NS), per_book)]
    return rows_NS[order[:count]]


def motion(loaded: Any, rows_NS: Tensor) -> dict[str, Any]:
    """Mobility of the strongest keys while texts are written, in heads with a strong key, by the
    words of the package.

    The chance that a head's strongest keys at two steps differ; of an autoregressive model, in two
    windows of queries.

    Returns:
        ``mobility`` by text (NaN without strong heads), ``word``, ``value``, ``low`` and ``high``
        of their median, ``strong_heads`` by text, ``reading``, what is compared, and ``sentence``,
        the package's own answer, which weighs all heads that have a sink.
    """
    lm = LM(**{one.name: getattr(loaded, one.name) for one in fields(loaded)})
    prompts = [lm.needed_tokenizer().decode(row_S[:PROMPT].tolist()) for row_S in rows_NS]
    run = lm.watch(prompts, NEW, statistics=("received",))
    (study,) = as_studies(run)
    mobility, strong = [], []
    for sample in map(study.sample, study.recorded):
        arrays = sample.derived()
        windows = None if loaded.family == "diffusion" else sample.array("window_received")
        stays, share = of_strong(arrays["main"], arrays["share"], windows)
        mobility.append(stays)
        strong.append(share)
    median = median_over(mobility)
    told = {
        "word": staying_word(median),
        "value": median.value,
        "low": median.low,
        "high": median.high,
    }
    told |= {"reading": "steps" if loaded.family == "diffusion" else "windows"}
    return {
        "mobility": mobility,
        "strong_heads": strong,
        **told,
        "sentence": run.summary()["stay"].sentence,
    }


def of_strong(
    key_TLH: np.ndarray, weight_TLH: np.ndarray, windows_WLHK: np.ndarray | None = None
) -> tuple[float, float]:
    """Mobility over the heads with a strong key, be it another in every window of queries, and the
    share of heads that have one.
    """
    counts_LH = np.maximum((~np.isnan(weight_TLH)).sum(0), 1)
    strong_LH = np.nansum(weight_TLH, axis=0, dtype=float) / counts_LH > STRONG
    mobility_LH, counted_LH = chance_elsewhere(key_TLH, key_TLH >= 0), strong_LH
    if windows_WLHK is not None:
        mobility_LH, window_LH = of_windows(windows_WLHK)
        counted_LH = strong_LH | (np.nan_to_num(window_LH) > STRONG)
    known = mobility_LH[counted_LH & ~np.isnan(mobility_LH)]
    mean = float("nan")
    if len(known):
        mean = float(known.mean())
    return mean, float(strong_LH.mean())


def redrawn(model: Any, rows_NS: Tensor, attention: str, mask_id: int) -> dict[str, Any]:
    """Mobility of the strongest keys over draws of masks of equal ratio on the same text, per text
    and ratio.

    The chance that the strongest keys under two draws differ, mean over the heads with a strong
    key.
    """
    seen = sight_of(attention, rows_NS.shape[1])
    found: dict[str, list[float]] = {}
    for ratio in REDRAWN:
        draws = []
        for draw in range(DRAWS):
            weights_NLHK = weights_of(model, masked_at(rows_NS, ratio, mask_id, draw), seen)
            top_NLH, place_NLH = weights_NLHK.nan_to_num(-1).max(-1)
            draws.append((place_NLH.numpy(), top_NLH.numpy()))
        found[str(ratio)] = []
        for row in range(len(rows_NS)):
            key_TLH, weight_TLH = (np.stack([one[part][row] for one in draws]) for part in (0, 1))
            found[str(ratio)].append(of_strong(key_TLH, weight_TLH)[0])
    return found


def bounds(loaded: Any, rows_NS: Tensor) -> dict[str, Any]:
    """Held-out loss of each text, nats a token, clean and with the strongest key of every head
    hidden: a diffusion model's bound under noise that depends on the text alone, an autoregressive
    model's next-token loss.

    Returns:
        ``loss`` by arm and text, and ``removed``, the share of attention that was taken, by arm.
    """
    arms = {
        "clean": [],
        "strongest": [MaskSinks(k=1)],
        "strongest, for queries from 32 on": [MaskSinks(k=1, queries="from32")],
        "random": [BlockKeys(Random(TopKeys(1)))],
        "equal mass": [BlockKeys(EqualMass(TopKeys(1)))],
        "strongest, in the same heads": [BlockKeys(EqualMass(TopKeys(1), arm="keys"))],
    }
    losses: dict[str, list[float]] = {arm: [] for arm in arms}
    removed: dict[str, list[float]] = {arm: [] for arm in arms if arm != "clean"}
    for one in arm_losses(loaded, arms, rows_NS.tolist(), batch=8):
        losses[one.arm].append(one.loss)
        if one.arm in removed:
            removed[one.arm].append(one.about["removed"])
    return {"loss": losses, "removed": {arm: float(np.mean(some)) for arm, some in removed.items()}}


def benchmarks(
    load: Any, data: Path, out: Path, name: str, limit: int | None = None
) -> dict[str, Any]:
    """Scores of PIQA, ARC-Easy and LAMBADA, clean and with the strongest keys or random ones hidden
    (`BLOCKED`).

    Args:
        load: makes the model (autoregressive ones are scored exactly, others by 4 samples).
        data: folder with the benchmarks.
        out: folder of the cells, which are resumed.
        name: of the model.
        limit: documents of each, where fewer than `DOCUMENTS` are wanted.

    Returns:
        by cell its ``scores``, whether each document's likeliest answer is ``right``, and the
        share of the attention that blocked keys ``held``, averaged over documents.
    """
    found: dict[str, Any] = {}
    for task, documents in DOCUMENTS.items():
        plan = Plan(ks=BLOCKED[task], protocols=("clean",), controls=("sinks", "random"))
        settings = EvalSettings(
            tasks=(task,),
            data=str(data),
            limit=limit or documents,
            mc_samples=4,
            record_sinks=0,
            num_fewshot=0,
        )
        table1(
            {name: load}, settings, out, plan, progress=lambda text: print(f"  {text}", flush=True)
        )
        for folder in cells_of(out / name, settings, plan):
            run = open_run(folder)
            right = run.table("samples").sort_values("doc_id")["right"].tolist()
            found[folder.name] = {"scores": run.table("scores").to_dict("records"), "right": right}
            if "doses" in run.tables:
                found[folder.name]["held"] = float(run.table("doses")["held"].iloc[0])
    return found


def seconds_of_benchmarks(model: Any, is_diffusion: bool) -> float:
    """Seconds of processor time that `benchmarks` would take: a forward over 64 tokens is timed,
    and counted for every row.

    PIQA has 2 continuations of a question, ARC-Easy 4, LAMBADA 1; a diffusion model reads each 4
    times; cells with blocked keys look first and read then, once for the strongest and once for
    random ones.
    """
    ids_BS, few_M = torch.zeros(4, 64, dtype=torch.int64), torch.arange(8)
    with torch.inference_mode():
        # the first forward is slower than those that follow
        model(ids_BS, logits_to_keep=few_M)
        begun = time.process_time()
        model(ids_BS, logits_to_keep=few_M)
    a_row = (time.process_time() - begun) / len(ids_BS)
    rows = 0
    for task, continuations in (("piqa", 2), ("arc_easy", 4), ("lambada_openai", 1)):
        hidden = len(BLOCKED[task]) - 1
        rows += DOCUMENTS[task] * continuations * (1 + 2 * 2 * hidden)
    return a_row * rows * (4 if is_diffusion else 1)
