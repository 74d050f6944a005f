"""Log-probabilities of tokens for rows of many requests in the same forwards: the one place where rows are scored."""

# B rows of a forward, H query heads, S keys
# N rows of a job, S the longest text, L tokens of a continuation, M wanted positions, C columns, V vocabulary
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.checkpoints.loading import Loaded
from sinklab.data.rows import place_generator
from sinklab.probing.intervention import Intervention, InterventionLog, intervene
from sinklab.probing.interventions.mask_sinks import MaskSinks
from sinklab.probing.interventions.positions import MaskPositions, TruncateContext
from sinklab.probing.tap import Listener
from sinklab.registry import interventions
from sinklab.scoring.requests import Plan, Request
from sinklab.scoring.writing import needs_clean_pass

Place = tuple[int, ...]
"""What a row's random control is drawn by: (seed, group, number)."""


def scoring_edits(edits: Sequence[Intervention], *, is_diffusion: bool) -> tuple[Intervention, ...]:
    """The edits as scoring carries them out.

    `MaskSinks` chooses in a clean pass over the same row (source "clean_pass") whatever its source is, and in an
    autoregressive model by the attention of all queries (selector "received"): the last row of a whole text says
    nothing of the queries before it. The other edits stay as they are.

    Raises:
        ValueError: for an edit that begins after the first step.
    """
    return tuple(_for_one_pass(edit, is_diffusion) for edit in edits)


def _for_one_pass(edit: Any, is_diffusion: bool) -> Intervention:
    if isinstance(edit, MaskSinks):
        changes: dict[str, Any] = {"source": "clean_pass"}
        if edit.removal != "evict":
            changes["limit"] = None
        if not is_diffusion:
            changes["selector"] = "received"
        return replace(edit, **changes)
    first = edit.step if isinstance(edit, TruncateContext) else 0
    if isinstance(edit, MaskPositions) and edit.steps is not None:
        first = edit.steps[0] or 0
    if first > 0:
        raise ValueError(
            f"a text is scored in one step, but {interventions.name_of(edit)} begins at step {first} and would change "
            "nothing; leave out its step"
        )
    return edit


def is_random(edits: Sequence[Intervention]) -> bool:
    """Whether an edit draws: then equal rows may differ."""
    return any(isinstance(edit, MaskSinks) and edit.control == "random" for edit in edits)


def check_positions(edits: Sequence[Any], lengths: Sequence[int]) -> None:
    """Raise ValueError for named positions that the shortest of texts of these lengths does not have."""
    shortest = min(lengths, default=None)
    if shortest is None:
        return
    for edit in edits:
        last = edit.stop - 1 if isinstance(edit, TruncateContext) else -1
        last = edit.positions[-1] if isinstance(edit, MaskPositions) else last
        if last >= shortest:
            raise ValueError(
                f"{interventions.name_of(edit)} names position {last}, but the shortest text to score has {shortest} "
                f"tokens; name positions below {shortest}, or leave out the short texts"
            )


@contextmanager
def edited(model: Any, edits: Sequence[Intervention], places: Sequence[Place]) -> Iterator[InterventionLog | None]:
    """The edits over one batch; None without any. What rows draw depends on their places alone, not on the batch."""
    if not edits:
        yield None
        return
    drawn = [
        _Drawn(edit, tuple(places)) if isinstance(edit, MaskSinks) and is_random([edit]) else edit for edit in edits
    ]
    # what was actually removed is not read here, and would cost a pass over the scores
    with intervene(model, *drawn, measure=False) as log:
        yield log


@dataclass(frozen=True)
class _Drawn:
    """A random control whose rows have generators of their own."""

    edit: MaskSinks
    places: tuple[Place, ...]

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        listener: Any = self.edit.handler(log, forwards_per_step)
        listener.draw = _RowDraws(self.edit.seed, self.places)
        return listener


class _RowDraws:
    """Random numbers of a shape (row, head, key), each row by a generator of its own."""

    def __init__(self, seed: int, places: tuple[Place, ...]) -> None:
        self.seed, self.places, self.drawn = seed, places, 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        _, heads, keys = shape
        rows = []
        for place in self.places:
            generator = place_generator(self.seed, *place, self.drawn)
            # key by key: padding behind a row does not move what its keys get
            rows.append(torch.rand(keys, heads, generator=generator).T)
        self.drawn += 1
        return torch.stack(rows)


MOST_LOGITS = 2**28
"""Numbers among the logits of one forward: a gigabyte in float32."""
_PIECE = 4096


@dataclass(frozen=True, eq=False)
class Job:
    """The rows of one request."""

    request: Request
    plan: Plan
    sums_N: np.ndarray
    likeliest_N: np.ndarray
    """bool: every wanted token of the row is the likeliest one of all; read of autoregressive models alone."""

    @classmethod
    def of(cls, request: Request, plan: Plan) -> Job:
        """A job that is still to be run."""
        return cls(request, plan, np.zeros(len(plan.masked_NL)), np.zeros(len(plan.masked_NL), bool))


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows start, …, stop - 1 of a job."""

    job: Job
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


class Scorer:
    """Runs a model over texts, padded on the right, with guidance and interventions.

    A diffusion model reads noisy copies; an autoregressive one the text without its last token, as nothing follows it.
    """

    def __init__(
        self, loaded: Loaded, batch: int, *, cfg_scale: float = 0.0, edits: Sequence[Intervention] = (), seed: int = 0
    ) -> None:
        self.loaded, self.model = loaded, cast(Any, loaded.model)
        self.edits, self.seed, self.cfg_scale = tuple(edits), seed, cfg_scale
        self.denoises = loaded.family == "diffusion"
        self._copies = 2 if cfg_scale else 1
        self.rows = max(1, batch // self._copies)
        # kept, as it holds what is the same for every text of a shape
        self._unpadded: Any = self.model.denoiser() if self.denoises else None

    def run(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Fill the sums of the jobs; each comes back when its last row is done."""
        blocks: list[_Block] = []
        for job in jobs:
            total, start = len(job.plan.masked_NL), 0
            if total == 0:
                yield job
            while start < total:
                room = self._room([*blocks, _Block(job, start, start + 1)])
                if room < 1 and blocks:
                    yield from self._finished(blocks)
                    blocks = []
                    continue
                stop = min(total, start + max(room, 1))
                blocks.append(_Block(job, start, stop))
                start = stop
        if blocks:
            yield from self._finished(blocks)

    def _room(self, blocks: Sequence[_Block]) -> int:
        """How many rows such as the last one fit into a forward behind those before it."""
        before = blocks[:-1]
        vocabulary = self.model.config.vocab_size * self._copies
        rows = self.rows - sum(block.stop - block.start for block in before)
        if not self.denoises:
            columns = len(_columns([block.job.request for block in blocks]))
            return min(rows, MOST_LOGITS // (columns * vocabulary) - len(before))
        most = [int(block.job.plan.wanted_NL.sum(1).max()) * vocabulary for block in blocks]
        taken = sum(each * (block.stop - block.start) for each, block in zip(most, before, strict=False))
        return min(rows, (MOST_LOGITS - taken) // most[-1])

    def _finished(self, blocks: list[_Block]) -> Iterator[Job]:
        requests = [block.job.request for block in blocks for _ in range(block.start, block.stop)]
        masked = [row_L for block in blocks for row_L in block.job.plan.masked_NL[block.rows]]
        wanted = [row_L for block in blocks for row_L in block.job.plan.wanted_NL[block.rows]]
        places = [
            (self.seed, block.job.request.group, int(number))
            for block in blocks
            for number in block.job.plan.numbers_N[block.rows]
        ]
        logits_MV, labels_M, rows_M = self.logits(requests, masked, wanted, places)
        logp_M = _log_probabilities(logits_MV, labels_M.to(logits_MV.device))
        if bool(logp_M.isnan().any()):
            raise ValueError(f"{self.loaded.name} gave NaN logits while scoring; try another dtype")
        sums_B = torch.zeros(len(requests), dtype=torch.float64).index_add(0, rows_M, logp_M.double().cpu()).numpy()
        likeliest_B = np.zeros(len(requests), bool)
        if not self.denoises:
            wrong_M = logits_MV.argmax(-1).cpu() != labels_M
            likeliest_B = (torch.zeros(len(requests)).index_add(0, rows_M, wrong_M.float()) == 0).numpy()
        begin = 0
        for block in blocks:
            end = begin + block.stop - block.start
            block.job.sums_N[block.rows], block.job.likeliest_N[block.rows] = sums_B[begin:end], likeliest_B[begin:end]
            begin = end
            if block.stop == len(block.job.sums_N):
                yield block.job

    @torch.inference_mode()
    def logits(
        self, requests: Sequence[Request], masked: Sequence[Tensor], wanted: Sequence[Tensor], places: Sequence[Place]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (M, V) at the wanted tokens of each row, on the model's device, the right tokens and the rows (M,).

        Args:
            requests: of each row.
            masked: of each row, bool (L,), tokens of the continuation that are [MASK].
            wanted: likewise, tokens whose logits are needed.
            places: of each row, for what random controls draw.
        """
        mask_id = self.model.config.mask_token_id if self.denoises else 0
        shape = len(requests), max(request.length for request in requests)
        ids_BS = torch.zeros(shape, dtype=torch.long)
        clean_BS, bare_BS = torch.zeros_like(ids_BS), torch.zeros_like(ids_BS)
        wanted_BS, real_BS = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for row, (request, masked_L, wanted_L) in enumerate(zip(requests, masked, wanted, strict=True)):
            begin, end = len(request.context), request.length
            clean_BS[row, :end] = torch.tensor(request.context + request.continuation)
            ids_BS[row, :end] = clean_BS[row, :end]
            ids_BS[row, begin:end].masked_fill_(masked_L, mask_id)
            bare_BS[row, :end] = ids_BS[row, :end]
            bare_BS[row, :begin] = mask_id
            wanted_BS[row, begin:end] = wanted_L
            real_BS[row, :end] = True
        labels_M, rows_M = clean_BS[wanted_BS], wanted_BS.nonzero()[:, 0]
        if not self.cfg_scale:
            return self._evaluate(ids_BS, real_BS, wanted_BS, places), labels_M, rows_M
        # both readings of a row in one forward
        ids_BS, real_BS, wanted_BS = (
            torch.cat(pair) for pair in ((ids_BS, bare_BS), (real_BS, real_BS), (wanted_BS, wanted_BS))
        )
        cond_MV, bare_MV = self._evaluate(ids_BS, real_BS, wanted_BS, [*places, *places]).chunk(2)
        cond_MV, bare_MV = at_least_float32(cond_MV), at_least_float32(bare_MV)
        return bare_MV + (1 + self.cfg_scale) * (cond_MV - bare_MV), labels_M, rows_M

    def _evaluate(self, ids_BS: Tensor, real_BS: Tensor, wanted_BS: Tensor, places: Sequence[Place]) -> Tensor:
        run = self._denoised if self.denoises else self._continued
        with edited(self.model, self.edits, places) as log:
            if log is not None and needs_clean_pass(self.edits):
                with log.probing():
                    run(ids_BS, real_BS, torch.zeros_like(wanted_BS))
            return run(ids_BS, real_BS, wanted_BS)

    def _denoised(self, ids_BS: Tensor, real_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        device = self.model.device
        denoiser = self._unpadded if bool(real_BS.all()) else self.model.denoiser(real_BS.long().to(device))
        return denoiser(ids_BS.to(device), wanted_BS.to(device))

    def _continued(self, ids_BS: Tensor, real_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        # the last token of each row is not read
        ids_BS, real_BS, wanted_BS = ids_BS[:, :-1], real_BS[:, 1:], wanted_BS[:, 1:]
        given: dict[str, Any] = {} if bool(real_BS.all()) else {"attention_mask": real_BS.long().to(self.model.device)}
        columns_C = wanted_BS.any(0).nonzero()[:, 0]
        keep = columns_C if len(columns_C) else 1
        logits_BCV = self.model(ids_BS.to(self.model.device), use_cache=False, logits_to_keep=keep, **given).logits
        return logits_BCV[wanted_BS[:, columns_C].to(logits_BCV.device)] if len(columns_C) else logits_BCV


def _columns(requests: Sequence[Request]) -> range:
    """Columns among which all wanted positions lie: position i predicts token i + 1."""
    return range(min(len(each.context) for each in requests) - 1, max(each.length for each in requests) - 1)


def at_least_float32(logits_MV: Tensor) -> Tensor:
    """As they are in float64, else in float32."""
    return logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()


def _log_probabilities(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Of the labels, in float32 or better; a piece at a time, so that no second copy of all logits is made."""
    pieces = zip(logits_MV.split(_PIECE), labels_M.split(_PIECE), strict=True)
    return torch.cat([-F.cross_entropy(at_least_float32(some), right, reduction="none") for some, right in pieces])


def is_greedy(scorer: Scorer, requests: Sequence[Request]) -> dict[int, bool]:
    """Whether the model, shown all tokens of a continuation as [MASK], writes exactly them, by number of the request.

    One token per forward, the one it is surest of (SMDM's and LLaDA's evaluation of LAMBADA), as decoding with the rule
    low_confidence does it: neither [MASK] nor what is no text is ever written. A request is done at its first wrong
    token.
    """
    config = scorer.model.config
    answers: dict[int, bool] = {}
    todo = [(request, torch.ones(len(request.continuation), dtype=torch.bool)) for request in requests]
    widest = max((len(request.continuation) for request in requests), default=1)
    rows = max(1, min(scorer.rows, MOST_LOGITS // (widest * scorer.model.config.vocab_size)))
    waiting = iter(todo)
    open_rows: list[tuple[Request, Tensor]] = []
    while True:
        open_rows += [item for _, item in zip(range(rows - len(open_rows)), waiting, strict=False)]
        if not open_rows:
            return answers
        masks = [masked_L for _, masked_L in open_rows]
        places = [(scorer.seed, request.group, int((~masked_L).sum())) for request, masked_L in open_rows]
        logits_MV, labels_M, rows_M = scorer.logits([request for request, _ in open_rows], masks, masks, places)
        right_M, sure_M = _proposed(logits_MV[:, : config.text_vocab_size], labels_M, config.mask_token_id)
        still = []
        for row, (request, masked_L) in enumerate(open_rows):
            here_L = (rows_M == row).nonzero()[:, 0]
            best = int(sure_M[here_L].argmax())
            masked_L[masked_L.nonzero()[best, 0]] = False
            if right_M[here_L[best]] and masked_L.any():
                still.append((request, masked_L))
            else:
                answers[request.number] = bool(right_M[here_L[best]])
        open_rows = still


def _proposed(logits_MV: Tensor, labels_M: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """Whether the proposed token is the right one, and its log-probability; on the CPU."""
    right, sure = [], []
    # SMDM's [MASK] lies behind the text
    never = torch.tensor([mask_id] if mask_id < logits_MV.shape[1] else [], dtype=torch.long, device=logits_MV.device)
    for some_MV, labels in zip(logits_MV.split(_PIECE), labels_M.split(_PIECE), strict=True):
        exact_MV = at_least_float32(some_MV)
        total = exact_MV.logsumexp(-1)
        best, tokens = exact_MV.index_fill(1, never, -torch.inf).max(-1)
        right.append(tokens.cpu() == labels)
        sure.append((best - total).cpu())
    return torch.cat(right), torch.cat(sure)
