"""A comparison of caches on one model: fidelity, written texts, time and memory, in a run folder of kind "caches"."""

# R rows, S canvas columns, N new tokens
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from sinklab.evaluation.cache_costs import costs
from sinklab.evaluation.cache_policies import Policy, pairs, policies
from sinklab.evaluation.cache_rows import METRICS, evaluations, forced, rows_of_text, written
from sinklab.evaluation.cache_settings import CacheSettings
from sinklab.evaluation.progress import Progress, as_progress
from sinklab.models import Loaded
from sinklab.records import RunWriter, open_run, weights_hash

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES = 2000


def cache_fidelity(
    loaded: Loaded,
    out: str | Path,
    settings: CacheSettings | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
    resume: bool = False,
) -> Path:
    """Write a run folder of kind "caches".

    Tables: ``rows`` (a line per policy and row: loss, divergence from uncached, same first token), ``texts`` (share of
    written tokens that uncached decoding writes too), ``policies`` (means of both with 95 % bootstrap intervals over
    rows), ``protection`` (protected less unprotected at equal budget, paired over rows), ``costs`` (time, memory).

    Args:
        loaded: a diffusion model.
        out: folder to write; it must be empty or absent, or hold this very run to resume.
        settings: what to compare.
        progress: told how far it is; a function is called with a short text at each stage.
        resume: go on where an interrupted run stopped, batch by batch and policy by policy.

    Raises:
        ValueError: for a model that does not denoise, rows that do not fit it, and settings that make no sense.
    """
    settings, path = settings or CacheSettings(), Path(out)
    if loaded.family != "diffusion":
        raise ValueError(f"block caches belong to diffusion models, but {loaded.name} is {loaded.family}")
    model: Any = loaded.model
    if model.config.mask_token_id is None:
        raise ValueError(f"{loaded.name} has no mask token, so it cannot denoise; set mask_token_id in its config")
    lengths = settings.lengths or (settings.length,)
    if max(settings.length, *lengths) > (limit := model.config.text_positions):
        raise ValueError(
            f"canvases of {max(settings.length, *lengths)} tokens do not fit {loaded.name}, whose context is {limit}; "
            "lower prompt_tokens, new_tokens or lengths"
        )
    found = policies(settings)
    teller = as_progress(progress)
    teller.stage("reading text")
    packaged = resources.files("sinklab.models") / "packaged" / "heldout.jsonl"
    ids_RS = rows_of_text(loaded, settings, settings.text or Path(str(packaged)))
    about = {
        "name": loaded.name,
        "weights_sha256": weights_hash(model.state_dict()),
        "sink_count": model.config.sink_count,
    }
    with RunWriter(
        path, kind="caches", model=about, settings=dataclasses.asdict(settings), seed=settings.seed, resume=resume
    ) as run:
        _score(run, loaded, ids_RS, found, settings, teller)
        _write(run, loaded, ids_RS, found, settings, teller)
        if settings.repeats and not run.has("costs"):
            teller.stage(f"time and memory at {', '.join(map(str, lengths))} columns")
            # sparse attention saves no time as it is done here
            timed = [policy for policy in found if policy.family != "window"]
            run.table("costs", costs(model, lengths, timed, settings, _count(teller, len(timed) * settings.repeats)))
    # read back: parts that an earlier process wrote belong to it
    done = open_run(path)
    rows, texts = done.table("rows"), done.table("texts") if settings.texts else None
    with RunWriter(
        path, kind="caches", model=about, settings=dataclasses.asdict(settings), seed=settings.seed, resume=True
    ) as run:
        run.table("policies", summary(rows, texts, found, settings.seed))
        run.table("protection", protection(rows, found, settings.seed))
    return path


def _score(
    run: RunWriter, loaded: Loaded, ids_RS: Tensor, found: list[Policy], settings: CacheSettings, teller: Progress
) -> None:
    starts = range(0, settings.rows, settings.batch)
    count = _count(teller, len(starts) * evaluations(settings))
    for part, start in enumerate(starts):
        rows = range(start, min(start + settings.batch, settings.rows))
        if not run.has("rows", part):
            teller.stage(f"revealing rows {rows[0] + 1} to {rows[-1] + 1} under {len(found)} policies")
            run.table("rows", forced(loaded, ids_RS[rows], rows, found, settings, count), part=part)


def _write(
    run: RunWriter, loaded: Loaded, ids_RS: Tensor, found: list[Policy], settings: CacheSettings, teller: Progress
) -> None:
    # sparse attention would take a clean pass a step, and no shorter than uncached decoding
    found = [policy for policy in found if policy.family != "window"]
    if not settings.texts or all(run.has("texts", part) for part in range(len(found))):
        return
    ids_RS, count = ids_RS[: settings.texts], _count(teller, len(found))
    teller.stage(f"writing {len(ids_RS)} texts under {len(found)} policies")
    plain_RN = written(loaded, ids_RS, found[0], settings)
    for part, policy in enumerate(found):
        if not run.has("texts", part):
            texts_RN = plain_RN if part == 0 else written(loaded, ids_RS, policy, settings)
            same_R = (texts_RN == plain_RN).double().mean(1)
            fields = dataclasses.asdict(policy)
            table = {key: [value] * len(ids_RS) for key, value in fields.items()}
            run.table("texts", table | {"row": [*range(len(ids_RS))], "agreement": same_R.tolist()}, part=part)
        count()


def _count(teller: Progress, total: int) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        teller.count(done, total)

    return count


def interval(values_R: np.ndarray, seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean over rows."""
    draws = np.random.default_rng(seed).integers(len(values_R), size=(RESAMPLES, len(values_R)))
    low, high = np.quantile(values_R[draws].mean(1), [0.025, 0.975])
    return float(low), float(high)


def _of(table: pd.DataFrame, policy: Policy, column: str) -> np.ndarray:
    """A column of this policy's lines, by row."""
    mine = table
    for key, value in dataclasses.asdict(policy).items():
        mine = mine[mine[key] == value]
    return mine.sort_values("row")[column].to_numpy()


def summary(rows: pd.DataFrame, texts: pd.DataFrame | None, found: Sequence[Policy], seed: int) -> dict[str, list[Any]]:
    """Means over rows with 95 % intervals, a line per policy."""
    lines: list[dict[str, Any]] = []
    for policy in found:
        line: dict[str, Any] = {"label": policy.label, **dataclasses.asdict(policy)}
        for metric in METRICS:
            values_R = _of(rows, policy, metric)
            line[metric] = float(values_R.mean())
            line[f"{metric}_low"], line[f"{metric}_high"] = interval(values_R, seed)
        agreement_R = np.array([]) if texts is None else _of(texts, policy, "agreement")
        line["agreement"] = float(agreement_R.mean()) if len(agreement_R) else float("nan")
        lines.append(line)
    return {key: [line[key] for line in lines] for key in lines[0]}


def protection(rows: pd.DataFrame, found: Sequence[Policy], seed: int) -> dict[str, list[Any]]:
    """Protected less unprotected at equal budget, paired over rows, with 95 % intervals: a line per pair and metric."""
    lines: dict[str, list[Any]] = {
        key: [] for key in ("family", "keep", "sinks", "protect", "metric", "difference", "low", "high", "rows")
    }
    for policy, bare in pairs(list(found)):
        for metric in METRICS:
            delta_R = _of(rows, policy, metric) - _of(rows, bare, metric)
            values = (*dataclasses.astuple(policy), metric, float(delta_R.mean()), *interval(delta_R, seed))
            for key, value in zip(lines, (*values, len(delta_R)), strict=True):
                lines[key].append(value)
    return lines
