"""A comparison of caches on one model: the same half-revealed text, whole texts, time and
memory.
"""

# R rows, B batch (1 if costs are measured), S canvas columns, N new tokens, M wanted positions
# (row-major), V vocabulary
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinklab.core.probing import trace
from sinklab.core.sampling import (
    Cache,
    Canvas,
    Denoiser,
    Evaluation,
    Places,
    Session,
    cache_of,
    denoise,
)
from sinklab.core.sampling.canvas import numbered_blocks
from sinklab.core.sampling.denoisers import ChangedDenoiser
from sinklab.lab.caching.policies import SCORES, EvictingCache
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring import heldout_rows
from sinklab.lab.studies import (
    Arm,
    Progress,
    Row,
    Rows,
    Tick,
    Trial,
    Work,
    check_fits,
    heldout_text,
    less_other,
    mean_table,
    nothing,
)
from sinklab.lab.studies.caches.study import CacheSettings

DELAY = 1
"""Evicting caches all choose at the second evaluation of a block, as Sparse-dLLM does: full
evaluations are equal.
"""


@dataclass(frozen=True)
class Policy:
    """One way to evaluate a block."""

    family: str
    """none, prefix, dual, sink_refresh; nearest, aligned, received, random (evicting); window
    (sparse attention).
    """
    keep: float = 1.0
    """Share of the columns outside the block (window: of all columns) that a query attends to."""
    sinks: int = 0
    """Columns protected, or recomputed with the block."""
    protect: str = ""
    """Choice of protected sinks; "random" columns in their place are the control of the window."""

    @property
    def label(self) -> str:
        """Name in tables."""
        if self.family == "sink_refresh":
            return f"dual, {self.sinks} sinks recomputed"
        name = self.family
        if self.keep < 1:
            name += f" {self.keep:.3g}"
        elif self.is_evicting:
            name = "all kept"
        if not self.sinks:
            return name
        whose = {"first": "first ", "earlier": "earlier ", "random": "random columns for "}
        return f"{name} + {self.sinks} {whose.get(self.protect, '')}sinks"

    @property
    def is_evicting(self) -> bool:
        """Whether it chooses columns, and forgets the others."""
        return self.family in SCORES

    @property
    def cache(self) -> Cache | None:
        """The cache of this policy; None if everything is computed."""
        if self.family == "window":
            return None
        if self.family == "sink_refresh":
            return cache_of(f"sink_refresh:sinks={self.sinks}")
        if self.family in ("none", "prefix", "dual"):
            return cache_of(self.family)
        how: dict[str, Any] = {"sinks": self.sinks, "score": self.family, "delay": DELAY}
        if self.protect:
            how["protect"] = self.protect
        return EvictingCache(keep=self.keep, **how)

    def denoiser(self, model: Any) -> Any:
        """The model as this policy runs it."""
        if self.family == "window":
            return SparseDenoiser(model, self.keep, self.sinks, is_random=self.protect == "random")
        return model.denoiser()


def policies(settings: CacheSettings) -> list[Policy]:
    """Policies to compare, the uncached one first. Raises ValueError for budgets and names that
    make no sense.
    """
    found = [Policy("none"), Policy("prefix"), Policy("dual")]
    found += [Policy("sink_refresh", sinks=count) for count in settings.refreshed]
    found += [Policy("nearest")]
    for keep in sorted(settings.cache_keep, reverse=True):
        for score in settings.scores:
            found.append(Policy(score, keep))
            # a cache that keeps by attention received keeps the sinks of now by itself
            protect = [which for which in settings.protect if score != "received" or which != "now"]
            found += [Policy(score, keep, settings.cache_sinks, which) for which in protect]
        if settings.sparse:
            found.append(Policy("window", keep))
            found += [
                Policy("window", keep, settings.cache_sinks, which) for which in ("now", "random")
            ]
    for policy in found:
        _ = policy.cache
    return found


def pairs(found: list[Policy]) -> list[tuple[Policy, Policy]]:
    """(protected, the same without protection), at equal budgets."""
    return [(policy, Policy(policy.family, policy.keep)) for policy in found if policy.protect]


class SparseDenoiser(Denoiser):
    """Full recomputation in which every query attends to a share of the keys: the sinks first, then
    the nearest.

    Sinks are the columns that receive most over all layers and heads in a clean pass over the same
    canvas, each row its own; the mask is one for all layers and heads. For fidelity alone: the mask
    saves no time. Added sinks are always seen.
    """

    def __init__(self, model: Any, keep: float, sinks: int, *, is_random: bool = False) -> None:
        self.model, self.keep, self.sinks, self.is_random = model, keep, sinks, is_random

    @torch.inference_mode()
    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V). The canvas has no padding."""
        visible_BQK = nearest_keys(
            self._sinks(ids_BS), math.floor(self.keep * ids_BS.shape[1] + 1e-9)
        )
        return self.model(
            ids_BS, logits_to_keep=at.wanted_BS, visible=visible_BQK.to(ids_BS.device)
        ).logits

    def _sinks(self, ids_BS: Tensor) -> Tensor:
        batch, length = ids_BS.shape
        sinks_BS = torch.zeros(batch, length, dtype=torch.bool)
        if not self.sinks:
            return sinks_BS
        if self.is_random:
            draws_BS = torch.rand(1, length, generator=torch.Generator().manual_seed(0)).expand(
                batch, -1
            )
        else:
            with trace(self.model, ("received",)) as recording:
                self.model(ids_BS, logits_to_keep=torch.zeros_like(ids_BS, dtype=torch.bool))
            draws_BS = recording.received[0].sum((1, 2))[:, -length:]
        return sinks_BS.scatter_(1, draws_BS.topk(min(self.sinks, length)).indices.cpu(), True)


def nearest_keys(sinks_BS: Tensor, count: int) -> Tensor:
    """Visibility of keys, bool (B, S, S): each query sees itself, the sinks, then the nearest,
    `count` in all (at least 1).
    """
    length = sinks_BS.shape[1]
    position_S = torch.arange(length)
    # twice the distance, so that of two equally near keys the left one is nearer
    far_QK = 2 * (position_S[:, None] - position_S).abs() + (position_S > position_S[:, None])
    first_BQK = sinks_BS[:, None] & (far_QK > 0)
    far_BQK = torch.where(first_BQK, far_QK - 2 * length, far_QK) - 8 * length * (far_QK == 0)
    seen_BQK = torch.zeros(len(sinks_BS), length, length, dtype=torch.bool)
    return seen_BQK.scatter_(2, far_BQK.topk(max(count, 1), largest=False).indices, True)


POLICY = ["family", "keep", "sinks", "protect"]
"""Columns that name a policy."""
METRICS = ("loss", "divergence", "same")
"""Measures over the tokens still masked: nats of the true one; nats from the uncached distribution
to the cached one; share of positions at which both have the same token first.
"""


def revealed(settings: CacheSettings, rows: Sequence[int]) -> Tensor:
    """Turn within its block at which each new token is revealed, int64 (B, N); by row, whatever the
    batch.
    """
    draws_BN = np.stack(
        [np.random.default_rng([settings.seed, row]).random(settings.new_tokens) for row in rows]
    )
    blocks = np.split(
        draws_BN, range(settings.block_length, settings.new_tokens, settings.block_length), axis=1
    )
    return torch.from_numpy(np.concatenate([block.argsort(1).argsort(1) for block in blocks], 1))


def canvas_of(model: Any, ids_BS: Tensor, new_tokens: int) -> Canvas:
    """The rows with their last tokens masked. Raises ValueError for rows that do not fit the
    model.
    """
    fits = {"mask_id": model.config.mask_token_id, "context": model.config.text_positions}
    return Canvas.from_prompts(
        ids_BS[:, : ids_BS.shape[1] - new_tokens], new_tokens=new_tokens, **fits
    )


@torch.inference_mode()
def forced(
    loaded: Loaded,
    ids_BS: Tensor,
    rows: Sequence[int],
    found: Sequence[Policy],
    settings: CacheSettings,
    progress: Tick = nothing,
) -> list[Row]:
    """Every policy on the same text, revealed block by block, in the same random order: a table, a
    line per policy and row with the means of `METRICS`.

    Only evaluations that run the block alone under every cache count, from the third on. The true
    tokens are revealed whatever a policy proposes, so that errors do not pile up and rows can be
    compared in pairs.

    Args:
        ids_BS: the true text.
        rows: the numbers of these rows, which seed the order.
        found: the policies, the uncached one first.
        progress: called after each evaluation of all policies.
    """
    model: Any = loaded.model
    ids_BS = ids_BS.to(model.device)
    canvas = canvas_of(model, ids_BS, settings.new_tokens)
    canvas = model.denoiser().in_blocks(canvas, settings.block_length)
    _, block_BS = numbered_blocks(canvas, settings.block_length)
    turn_BS = torch.full_like(ids_BS, -1)
    turn_BS[canvas.open_BS] = revealed(settings, rows).flatten().to(model.device)
    run = {policy: Evaluation(policy.denoiser(model), policy.cache, block_BS) for policy in found}
    sums = {policy: torch.zeros(len(METRICS), len(ids_BS)) for policy in found}
    count_B = torch.zeros(len(ids_BS))
    for block in range(int(block_BS.max()) + 1):
        inside_BS = block_BS == block
        for nth in range(-(-int(inside_BS[0].sum()) // settings.tokens_per_step)):
            wanted_BS = inside_BS & (turn_BS >= nth * settings.tokens_per_step)
            noisy_BS = torch.where(wanted_BS | (block_BS > block), canvas.mask_id, ids_BS)
            counts = nth > DELAY
            truth_MV = None
            for policy, evaluate in run.items():
                # nothing that an uncached or delayed evaluation computes is remembered
                if not counts and (policy.cache is None or (nth < DELAY and policy.is_evicting)):
                    continue
                logits_MV = evaluate(noisy_BS, Places.of(wanted_BS), block, nth)
                if counts:
                    log_MV = _log_probs(logits_MV, model.config)
                    if truth_MV is None:
                        truth_MV = log_MV
                    row_M = wanted_BS.nonzero()[:, 0].cpu()
                    values = _measured(log_MV, truth_MV, ids_BS[wanted_BS])
                    sums[policy].index_add_(1, row_M, values)
            count_B += wanted_BS.sum(1).cpu() * counts
            progress()
    return [
        asdict(policy) | {"row": row} | dict(zip(METRICS, means, strict=True))
        for policy in found
        for row, means in zip(rows, (sums[policy] / count_B).T.tolist(), strict=True)
    ]


def evaluations(settings: CacheSettings, block: Any = None) -> int:
    """Number of calls of its progress by `forced` for a batch."""
    starts = range(0, settings.new_tokens, settings.block_length)
    sizes = (min(settings.block_length, settings.new_tokens - start) for start in starts)
    return sum(-(-size // settings.tokens_per_step) for size in sizes)


def _log_probs(logits_MV: Tensor, config: Any) -> Tensor:
    """Log-probabilities over the tokens that may be written: text, and not [MASK]."""
    logits_MV = logits_MV[:, : config.text_vocab_size].float()
    if config.mask_token_id < logits_MV.shape[1]:
        logits_MV = logits_MV.index_fill(
            1, torch.tensor([config.mask_token_id], device=logits_MV.device), -torch.inf
        )
    return logits_MV.log_softmax(1)


def _measured(log_MV: Tensor, truth_MV: Tensor, ids_M: Tensor) -> Tensor:
    """`METRICS` of every position, (3, M)."""
    loss_M = -log_MV.gather(1, ids_M[:, None])[:, 0]
    # tokens ruled out have probability 0 in both
    divergence_M = (truth_MV.exp() * (truth_MV - log_MV).nan_to_num(0.0)).sum(1)
    same_M = (log_MV.argmax(1) == truth_MV.argmax(1)).float()
    return torch.stack([loss_M, divergence_M, same_M]).cpu()


def written(loaded: Loaded, ids_BS: Tensor, policy: Policy, settings: CacheSettings) -> Tensor:
    """Tokens that a policy writes after the beginnings of these rows, one token a step, int64 (B,
    N).
    """
    model = loaded.model
    canvas = canvas_of(model, ids_BS.to(model.device), settings.new_tokens)
    options = {"text_vocabulary": model.config.text_vocab_size, "cache": policy.cache}
    with torch.inference_mode():
        *_, last = settings.decoding().decode(policy.denoiser(model), canvas, **options)
    return last.ids_BS[:, -settings.new_tokens :].clone().cpu()


def held_bytes(model: Any, canvas: Canvas, policy: Policy, block_length: int) -> int:
    """Bytes of keys and values that an evaluation of the block attends to, as the session holds
    them.

    Without a cache nothing is held: the same number as with a dual cache is computed and dropped in
    every evaluation.
    """
    denoiser = _Held(model.denoiser())
    cache = policy.cache or Policy("dual").cache
    # the third evaluation is partial under every cache
    for _ in itertools.islice(denoise(denoiser, canvas, cache=cache, block_length=block_length), 3):
        held = denoiser.session.nbytes
    return held


class _Held(ChangedDenoiser):
    """A denoiser whose last session can be asked."""

    session: Any = None

    def begin(self, cache: Cache) -> Session:
        self.session = self.denoiser.begin(cache)
        return self.session


def costs(
    model: Any,
    lengths: Sequence[int],
    found: Sequence[Policy],
    settings: CacheSettings,
    progress: Tick = nothing,
) -> list[Row]:
    """Time and memory of one row at these canvas lengths: a table, a line per length and policy.

    Policies take turns, `settings.repeats` each; the best turn of every step counts, so that a busy
    neighbour disturbs long runs no more than short ones. Prompts are random tokens: neither time
    nor memory depends on them. Only the last `settings.new_tokens` columns are written.
    """
    config = model.config
    lines = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        ids_1S = torch.randint(3, config.vocab_size - 1, (1, length), generator=generator)
        canvas = canvas_of(model, ids_1S.to(model.device), settings.new_tokens)
        taken: dict[Policy, list[list[float]]] = {policy: [] for policy in found}
        for _, policy in itertools.product(range(settings.repeats), found):
            taken[policy].append(_step_seconds(model, canvas, policy, settings.block_length))
            progress()
        best = {policy: np.min(turns, axis=0) for policy, turns in taken.items()}
        for policy, steps in best.items():
            full, partial = _kinds(steps, policy, settings.block_length)
            line = {
                "length": length,
                **asdict(policy),
                "ms_per_token": 1e3 * steps.sum() / settings.new_tokens,
                "ratio": steps.sum() / best[found[0]].sum(),
                "full_ms": full,
                "partial_ms": partial,
                "held_bytes": held_bytes(model, canvas, policy, settings.block_length),
                "turns": settings.repeats,
            }
            lines.append(line)
    return lines


def _kinds(seconds: Iterable[float], policy: Policy, block_length: int) -> tuple[float, float]:
    """Median milliseconds of an evaluation that computes everything (and chooses, if something is
    chosen) and of one that does not, in a run of one token a step.
    """
    chosen = DELAY * policy.is_evicting
    full = []
    partial = []
    for index, taken in enumerate(seconds):
        nth = index % block_length
        if policy.cache is None or nth == chosen:
            full.append(taken)
        # before it chooses, a cache computes everything, too, but for the choice
        elif nth > chosen:
            partial.append(taken)
    return 1e3 * median(full), 1e3 * median(partial or [math.nan])


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


@dataclass(frozen=True)
class Texts:
    """The text that caches are compared on."""

    ids_RS: Tensor
    rows: int
    """Rows that are revealed; the first `CacheSettings.texts` of all are written."""

    def __len__(self) -> int:
        return self.rows


def read_samples(loaded: Loaded, settings: CacheSettings, progress: Progress) -> Texts:
    """The text.

    Raises:
        ValueError: for a model that does not denoise, rows that do not fit it, and settings that
            make no sense.
    """
    progress.stage("reading text")
    if not loaded.is_diffusion:
        raise ValueError(
            f"block caches belong to diffusion models, but {loaded.name} is {loaded.family}"
        )
    longest = max(settings.length, *settings.lengths, 0)
    check_fits(loaded, "caches", longest, "lower prompt_tokens, new_tokens or lengths")
    most = max(settings.rows, settings.texts)
    source = heldout_text(settings.heldout)
    ids_RS = heldout_rows(loaded, source, rows=most, length=settings.length).ids_RS
    if len(ids_RS) < settings.rows:
        raise ValueError(
            f"the text fills {len(ids_RS)} rows of {settings.length} tokens, but "
            f"rows={settings.rows}; ask for fewer, or name a longer text."
        )
    return Texts(ids_RS, settings.rows)


def arms(loaded: Loaded, settings: CacheSettings, samples: Texts) -> dict[Arm, Policy]:
    """The policies to compare, the uncached one first."""
    return {astuple(policy): policy for policy in policies(settings)}


def measure(trial: Trial) -> Rows:
    """Lines of the table ``rows``."""
    ids_BS = trial.samples.ids_RS[trial.rows.start : trial.rows.stop]
    found = [*trial.arms.values()]
    rows = forced(trial.loaded, ids_BS, trial.rows, found, trial.settings, trial.step)
    return {"rows": pd.DataFrame(rows)}


def write_more(work: Work) -> None:
    """Write the tables ``texts`` and ``costs``: whole texts under each policy, time and memory.

    Sparse attention is in neither: it saves no time as it is done here, and would take a clean pass
    a step.
    """
    settings, progress = work.settings, work.progress
    timed = [policy for policy in work.plan.arms.values() if policy.family != "window"]
    ids_RS = work.plan.samples.ids_RS[: settings.texts]
    missing = [part for part in range(len(timed)) if not work.run.has("texts", part)]
    if missing and len(ids_RS):
        count = progress.counter(len(missing))
        progress.stage(f"writing {len(ids_RS)} texts under {len(timed)} policies")
        plain_RN = written(work.loaded, ids_RS, timed[0], settings)
        for part in missing:
            texts_RN = plain_RN
            if part:
                texts_RN = written(work.loaded, ids_RS, timed[part], settings)
            rows = pd.DataFrame({"agreement": (texts_RN == plain_RN).double().mean(1)})
            rows = rows.assign(row=range(len(ids_RS)), **asdict(timed[part]))
            work.run.table("texts", rows, part=part)
            count()
    if settings.repeats and not work.run.has("costs"):
        lengths = settings.lengths or (settings.length,)
        progress.stage(f"time and memory at {', '.join(map(str, lengths))} columns")
        count = progress.counter(len(lengths) * len(timed) * settings.repeats)
        work.run.table("costs", costs(work.loaded.model, lengths, timed, settings, count))


def contrasts(trial: Trial, rows: Rows) -> Rows:
    """The tables ``policies``, means over rows, and ``protection``, protected less unprotected at
    equal budget, paired over rows: a line per pair and metric.
    """
    measured = rows["rows"]
    found = [*trial.arms.values()]
    policies = mean_table(measured, POLICY, METRICS)
    policies.insert(0, "label", [policy.label for policy in found])
    agreement = {}
    if "texts" in rows:
        agreement = rows["texts"].groupby(POLICY)["agreement"].mean()
    policies["agreement"] = [agreement.get(arm, math.nan) for arm in trial.arms]
    others = {astuple(policy): astuple(bare) for policy, bare in pairs(found)}
    apart = {metric: less_other(measured, POLICY, metric, others) for metric in METRICS}
    # a line per row and metric; those without another have no difference
    each = measured[POLICY].assign(**apart).melt(POLICY, METRICS, "metric", "difference").dropna()
    protection = mean_table(each, [*POLICY, "metric"], ("difference",))
    ends = {"difference_low": "low", "difference_high": "high"}
    return {"policies": policies, "protection": protection.rename(columns=ends)}
