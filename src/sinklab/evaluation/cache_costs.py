"""What caches cost: processor time of a token, and the keys and values that a block's evaluations attend to."""

# S canvas columns, B batch (1 here), M wanted positions
from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sinklab.evaluation.cache_policies import DELAY, Policy
from sinklab.evaluation.cache_rows import canvas_of
from sinklab.evaluation.cache_settings import CacheSettings
from sinklab.sampling import Canvas, denoise

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
