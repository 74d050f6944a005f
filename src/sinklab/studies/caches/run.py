"""A comparison of caches on one model: fidelity, written texts, time and memory, in a run folder of kind "caches"."""

# S canvas columns, B batch (1 here), M wanted positions
# R rows, S canvas columns, N new tokens
from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sinklab.analysis.intervals import percentile_interval
from sinklab.checkpoints.loading import Loaded
from sinklab.records.reading import open_run
from sinklab.records.storage import weights_hash
from sinklab.records.writing import RunWriter
from sinklab.sampling.canvas import Canvas
from sinklab.sampling.loop import denoise
from sinklab.studies.base import heldout_text
from sinklab.studies.caches.policies import DELAY, Policy, pairs, policies
from sinklab.studies.caches.rows import METRICS, canvas_of, evaluations, forced, rows_of_text, written
from sinklab.studies.caches.settings import CacheSettings
from sinklab.studies.processes import Progress, as_progress

if TYPE_CHECKING:
    import pandas as pd


KINDS = ("full_ms", "partial_ms")
"""Median milliseconds of an evaluation that computes everything (and chooses, where something is chosen) and of one
that does not."""


class _Noting:
    """A denoiser that notes the bytes its session holds after each evaluation."""

    def __init__(self, denoiser: Any) -> None:
        self._denoiser = denoiser
        self.held: list[int] = []

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        return self._denoiser(ids_BS, wanted_BS)

    def session(self) -> Callable[[Tensor, Tensor, Any], Tensor]:
        session = self._denoiser.session()

        def noted(ids_BS: Tensor, wanted_BS: Tensor, columns: Any) -> Tensor:
            logits_MV = session(ids_BS, wanted_BS, columns)
            self.held.append(session.nbytes)
            return logits_MV

        return noted


def held_bytes(model: Any, canvas: Canvas, policy: Policy, block_length: int) -> int:
    """Bytes of keys and values that an evaluation of the block attends to, as the session holds them.

    Without a cache nothing is held: the same number as with a dual cache is computed and dropped in every evaluation.
    """
    noting = _Noting(model.denoiser())
    cache = Policy("dual").cache if policy.cache is None else policy.cache
    steps = denoise(noting, canvas, cache=cache, block_length=block_length)
    # the third evaluation is partial under every cache
    for _ in itertools.islice(steps, 3):
        pass
    return noting.held[-1]


def costs(
    model: Any,
    lengths: Sequence[int],
    found: Sequence[Policy],
    settings: CacheSettings,
    progress: Callable[[], object] | None = None,
) -> dict[str, list[Any]]:
    """Time and memory of one row at these canvas lengths: a table, a line per length and policy.

    Policies take turns, `settings.repeats` each; of every step the best turn counts, so that a busy neighbour disturbs
    long runs no more than short ones. Prompts are random tokens: neither time nor memory depends on them. Only the last
    `settings.new_tokens` columns are written.
    """
    config = model.config
    columns = ("length", "family", "keep", "sinks", "protect", "ms_per_token", "ratio", *KINDS, "held_bytes", "turns")
    lines = {key: list[Any]() for key in columns}
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        ids_1S = torch.randint(3, config.vocab_size - 1, (1, length), generator=generator)
        canvas = canvas_of(model, ids_1S.to(model.device), settings.new_tokens)
        taken: dict[Policy, list[list[float]]] = {policy: [] for policy in found}
        for _ in range(settings.repeats):
            for policy, turns in taken.items():
                turns.append(_step_seconds(model, canvas, policy, settings.block_length))
                if progress is not None:
                    progress()
        best = {policy: [min(turn) for turn in zip(*turns, strict=True)] for policy, turns in taken.items()}
        seconds = {policy: sum(steps) for policy, steps in best.items()}
        unit = seconds[found[0]]
        for policy in found:
            held = held_bytes(model, canvas, policy, settings.block_length)
            token = 1e3 * seconds[policy] / settings.new_tokens
            fields = (length, policy.family, policy.keep, policy.sinks, policy.protect)
            kinds = _kinds(best[policy], policy, settings.block_length)
            line = (*fields, token, seconds[policy] / unit, *kinds, held, settings.repeats)
            for key, value in zip(columns, line, strict=True):
                lines[key].append(value)
    return lines


def _kinds(seconds: Sequence[float], policy: Policy, block_length: int) -> tuple[float, float]:
    """`KINDS` of one run, one token a step."""
    chosen = DELAY if policy.is_evicting else 0
    nths = [index % block_length for index in range(len(seconds))]
    full = [taken for taken, nth in zip(seconds, nths, strict=True) if nth == chosen or policy.cache is None]
    partial = [taken for taken, nth in zip(seconds, nths, strict=True) if nth > chosen and policy.cache is not None]
    return 1e3 * statistics.median(full), 1e3 * statistics.median(partial) if partial else math.nan


@torch.inference_mode()
def _step_seconds(model: Any, canvas: Canvas, policy: Policy, block_length: int) -> list[float]:
    is_cuda = model.device.type == "cuda"
    clock = time.perf_counter if is_cuda else time.process_time
    marks = [clock()]
    for _ in denoise(policy.denoiser(model), canvas, cache=policy.cache, block_length=block_length):
        if is_cuda:
            torch.cuda.synchronize()
        marks.append(clock())
    return [after - before for before, after in itertools.pairwise(marks)]


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
    ids_RS = rows_of_text(loaded, settings, heldout_text(settings.text))
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
    return percentile_interval(values_R[draws].mean(1))


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
