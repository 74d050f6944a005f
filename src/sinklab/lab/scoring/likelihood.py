"""How likely a model finds a continuation: Monte Carlo or chain rule for diffusion models, exact
for autoregressive ones; with interventions and guidance.
"""

# B rows of a forward, N rows of a job, S the longest text, L tokens of a continuation, M wanted
# positions, C columns V vocabulary
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from sinklab.core.instrument import Dose, Intervention, intervene
from sinklab.core.subject import DecodingSettings
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring import requests as asked
from sinklab.lab.scoring.requests import Ids, Place, Plan, Request, placed, scoring_edits
from sinklab.lab.scoring.settings import LikelihoodSettings, Scored
from sinklab.lab.scoring.writing import (
    Writing,
    WritingRequest,
    is_random,
    needs_clean_pass,
    taken,
    totals,
)

__all__ = ["LikelihoodSettings", "Scored", "rolling", "score", "scoring_edits"]

MOST_LOGITS = 2**28
"""Numbers among the logits of one forward: a gigabyte in float32."""
_PIECE = 4096


@dataclass(eq=False)
class Job:
    """The rows of one request."""

    request: Request
    plan: Plan

    def __post_init__(self) -> None:
        self.sums_N = np.zeros(len(self.plan.masked_NL))
        self.is_likeliest = True
        """Whether every wanted token so far is the likeliest one of all; read of autoregressive
        models alone.
        """
        self.taken_N2: Any = 0
        """Removals by edits from its rows; see `taken`."""
        self.widest = max(self.plan.wanted_NL.sum(1).tolist(), default=0)
        """The most wanted tokens of a row."""


Row = tuple[Job, int]
"""A row of a job, by its number."""


class Scorer:
    """Runs a model over texts, padded on the right, with guidance and interventions.

    A diffusion model reads noisy copies; an autoregressive one the text without its last token, as
    nothing follows it.
    """

    measure = True
    """Whether to measure the share that edits really remove, at the cost of a pass over queries and
    keys a layer.
    """
    taken_BN2: Any = 0
    """Removals by edits in the last forward."""

    def __init__(
        self, loaded: Loaded, settings: LikelihoodSettings, edits: Sequence[Intervention | str] = ()
    ) -> None:
        """Raises ValueError for a model, guidance or edits that cannot score."""
        asked.needs_mask(loaded, "a score")
        if settings.cfg_scale and not loaded.is_diffusion:
            raise ValueError(
                "guidance masks the context, which only a diffusion model can read, but "
                f"{loaded.name} is {loaded.family}; leave out cfg_scale"
            )
        self.loaded = loaded
        self.model = cast(Any, loaded.model)
        self.denoises = loaded.is_diffusion
        self.edits = scoring_edits(edits, is_diffusion=self.denoises)
        self.seed = settings.seed
        self.cfg_scale = settings.cfg_scale
        self._copies = 1 + bool(self.cfg_scale)
        self.rows = max(1, settings.batch // self._copies)
        self._unpadded: Any = None
        if self.denoises:
            # kept, as it holds tensors that are the same for every text of a shape
            self._unpadded = self.model.denoiser()

    def read(
        self, requests: Sequence[tuple[Ids, Ids]], groups: Sequence[int] | None = None
    ) -> list[Request]:
        """Read the requests with `read_requests`. Raises ValueError also for an edit that names
        positions which a text does not have.
        """
        found = asked.read_requests(self.loaded, requests, groups)
        asked.check_positions(self.edits, [each.length - (not self.denoises) for each in found])
        return found

    def run(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Fill the sums of the jobs; each comes back when its last row is done."""
        batch: list[Row] = []
        for job in jobs:
            if not len(job.sums_N):
                yield job
            for row in ((job, number) for number in range(len(job.sums_N))):
                if batch and not self._fits([*batch, row]):
                    yield from self._finished(batch)
                    batch = []
                batch.append(row)
        if batch:
            yield from self._finished(batch)

    def _fits(self, batch: Sequence[Row]) -> bool:
        """Whether these rows may ride in one forward."""
        if self.denoises:
            wanted = sum(job.widest for job, _ in batch)
        else:
            # of all rows the columns among which the wanted positions of any lie
            texts = [job.request for job, _ in batch]
            columns = max(text.length for text in texts) - min(len(text.context) for text in texts)
            wanted = columns * len(batch)
        return (
            len(batch) <= self.rows
            and wanted * self.model.config.vocab_size * self._copies <= MOST_LOGITS
        )

    def _finished(self, batch: Sequence[Row]) -> Iterator[Job]:
        masked = [job.plan.masked_NL[number] for job, number in batch]
        wanted = [job.plan.wanted_NL[number] for job, number in batch]
        places = [
            (self.seed, job.request.group, int(job.plan.numbers_N[number])) for job, number in batch
        ]
        logits_MV, labels_M, rows_M = self.logits(
            [job.request for job, _ in batch], masked, wanted, places
        )
        taken_BN2 = self.taken_BN2
        # a piece at a time, so that no second copy of all logits is made
        labels = labels_M.to(logits_MV.device).split(_PIECE)
        pieces = zip(logits_MV.split(_PIECE), labels, strict=True)
        logp_M = torch.cat(
            [
                -F.cross_entropy(at_least_float32(some_MV), right_M, reduction="none")
                for some_MV, right_M in pieces
            ]
        )
        if bool(logp_M.isnan().any()):
            raise ValueError(f"{self.loaded.name} gave NaN logits while scoring; try another dtype")
        sums_B = (
            torch.zeros(len(batch), dtype=torch.float64)
            .index_add(0, rows_M, logp_M.double().cpu())
            .tolist()
        )
        wrong = set()
        if not self.denoises:
            wrong = {*rows_M[logits_MV.argmax(-1).cpu() != labels_M].tolist()}
        for row, (job, number) in enumerate(batch):
            job.sums_N[number] = sums_B[row]
            job.is_likeliest &= row not in wrong
            if isinstance(taken_BN2, Tensor):
                # guidance reads each row twice
                job.taken_N2 = job.taken_N2 + taken_BN2[row :: len(batch)].sum(0)
            if number + 1 == len(job.sums_N):
                yield job

    @torch.inference_mode()
    def logits(
        self,
        requests: Sequence[Request],
        masked: Sequence[Tensor],
        wanted: Sequence[Tensor],
        places: Sequence[Place],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (M, V) at the wanted tokens of each row, on the model's device, the right tokens
        and the rows (M,).

        Args:
            requests: of each row.
            masked: of each row, bool (L,), tokens of the continuation that are [MASK].
            wanted: of each row, bool (L,), tokens with logits that are needed.
            places: of each row, for the draws of random controls.
        """
        mask_id = 0
        closings = [() for _ in requests]
        if self.denoises:
            mask_id = self.model.config.mask_token_id
            closings = [self.model.config.closing_of(each.context) for each in requests]
        texts = [
            torch.tensor(each.context + each.continuation + closing)
            for each, closing in zip(requests, closings, strict=True)
        ]
        clean_BS = pad_sequence(texts, True)
        begins = [len(request.context) for request in requests]
        ends = [len(closing) for closing in closings]
        masked_BS, wanted_BS = (
            pad_sequence(
                [
                    F.pad(flags_L, around)
                    for *around, flags_L in zip(begins, ends, some, strict=True)
                ],
                True,
            )
            for some in (masked, wanted)
        )
        real_BS = torch.arange(clean_BS.shape[1]) < torch.tensor(
            [[len(text_S)] for text_S in texts]
        )
        ids_BS = clean_BS.masked_fill(masked_BS, mask_id)
        labels_M = clean_BS[wanted_BS]
        rows_M = wanted_BS.nonzero()[:, 0]
        if not self.cfg_scale:
            return self._evaluate(ids_BS, real_BS, wanted_BS, clean_BS, places), labels_M, rows_M
        # both readings of a row in one forward
        bare_BS = ids_BS.masked_fill(
            torch.arange(clean_BS.shape[1]) < torch.tensor(begins)[:, None], mask_id
        )
        # without the context it stays hidden from later blocks too
        bare_clean_BS = torch.where(bare_BS == ids_BS, clean_BS, bare_BS)
        flags = real_BS.repeat(2, 1), wanted_BS.repeat(2, 1)
        twice = (
            torch.cat([ids_BS, bare_BS]),
            *flags,
            torch.cat([clean_BS, bare_clean_BS]),
            [*places, *places],
        )
        cond_MV, bare_MV = map(at_least_float32, self._evaluate(*twice).chunk(2))
        return bare_MV + (1 + self.cfg_scale) * (cond_MV - bare_MV), labels_M, rows_M

    def _evaluate(
        self,
        ids_BS: Tensor,
        real_BS: Tensor,
        wanted_BS: Tensor,
        clean_BS: Tensor,
        places: Sequence[Place],
    ) -> Tensor:
        run: Any = self._continued
        if self.denoises:
            run = self._denoised
        under: Any = nullcontext()
        if self.edits:
            under = intervene(self.model, *placed(self.edits, places), measure=self.measure)
        with under as log:
            if log is not None and needs_clean_pass(self.edits):
                with log.probing():
                    run(ids_BS, real_BS, torch.zeros_like(wanted_BS), clean_BS)
            logits_MV = run(ids_BS, real_BS, wanted_BS, clean_BS)
        self.taken_BN2 = 0
        if log is not None:
            self.taken_BN2 = taken(log)
        return logits_MV

    def _denoised(
        self, ids_BS: Tensor, real_BS: Tensor, wanted_BS: Tensor, clean_BS: Tensor
    ) -> Tensor:
        device = self.model.device
        denoiser = self._unpadded
        if not bool(real_BS.all()):
            denoiser = self.model.denoiser(real_BS.long().to(device))
        return denoiser.scored(ids_BS.to(device), wanted_BS.to(device), clean_BS.to(device))

    def _continued(self, ids_BS: Tensor, real_BS: Tensor, wanted_BS: Tensor, _: Tensor) -> Tensor:
        # the last token of each row is not read
        ids_BS = ids_BS[:, :-1]
        real_BS = real_BS[:, 1:]
        wanted_BS = wanted_BS[:, 1:]
        given: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
        if not bool(real_BS.all()):
            given["attention_mask"] = real_BS.long().to(self.model.device)
        columns_C = wanted_BS.any(0).nonzero()[:, 0]
        if len(columns_C):
            given["logits_to_keep"] = columns_C
        logits_BCV = self.model(ids_BS.to(self.model.device), **given).logits
        if not len(columns_C):
            return logits_BCV
        return logits_BCV[wanted_BS[:, columns_C].to(logits_BCV.device)]


def at_least_float32(logits_MV: Tensor) -> Tensor:
    """Logits in float32, or in float64 if they are."""
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))


def greedily_written(
    scorer: Scorer, requests: Sequence[Request], settings: LikelihoodSettings
) -> dict[int, bool]:
    """Whether greedy decoding writes exactly the continuation, by number of the request: one token
    a step, the one the model is surest of (SMDM's and LLaDA's evaluation of LAMBADA).
    """
    decoding = DecodingSettings(
        rule="low_confidence", cfg_scale=settings.cfg_scale, seed=settings.seed, stop_at_eos=False
    )
    found = {}
    by_length = sorted(requests, key=lambda one: len(one.continuation))
    for length, alike in itertools.groupby(by_length, lambda one: len(one.continuation)):
        some = [*alike]
        size = max(1, min(scorer.rows, MOST_LOGITS // (length * scorer.model.config.vocab_size)))
        if is_random(scorer.edits):
            size = 1
        for start in range(0, len(some), size):
            batch = some[start : start + size]
            asked_of = [WritingRequest(request.context) for request in batch]
            texts = Writing(scorer.loaded, asked_of, decoding, length, scorer.edits, ends=False)
            with torch.inference_mode(), texts.begin(measure=False) as writer:
                for _ in writer.steps():
                    writer.log.removals.clear()
            for row, request in enumerate(batch):
                written = writer.row(row)[:length]
                found[request.number] = written == [*request.continuation]
    return found


def score(
    loaded: Loaded,
    requests: Sequence[tuple[Ids, Ids]],
    settings: LikelihoodSettings | None = None,
    *,
    groups: Sequence[int] | None = None,
    edits: Sequence[Intervention | str] = (),
    greedy: bool = False,
    measure: bool = True,
    progress: Callable[[], object] | None = None,
) -> list[Scored]:
    """log p(continuation | context) of each request, in nats.

    Rows of different requests and samples ride in the same forward, longest first. A result depends
    on its own request, the settings and its group, and on nothing else that is scored with it (up
    to rounding).

    Rows that run, per request of L tokens: Monte Carlo `samples`, fewer if masks repeat (one for L
    = 1); chain rule L; autoregressive 1; `greedy` up to L more for diffusion models. Guidance
    doubles them, and so do edits that choose in a clean pass. These edits see the continuation, so
    that the scores of a model under them are no longer logarithms of one distribution over texts.

    Args:
        loaded: the model.
        requests: (context ids, continuation ids). A context that is too long loses its left end
            (`Scored.dropped`). An empty one is fine for diffusion models; for others the beginning
            (or else end) of text takes its place.
        settings: Monte Carlo as LLaDA does it when left out.
        groups: requests of the same number share their random masks, so that choices of one
            question are compared under the same noise. Left out: requests of the same context do.
        edits: interventions, as :func:`scoring_edits` makes them fit for texts that are read once.
        greedy: also find out whether greedy decoding writes the continuation.
        measure: also find out the share that the edits really remove (`Scored.dose`), for a pass
            over queries and keys each.
        progress: called when a request is done.

    Raises:
        ValueError: for an empty continuation, one longer than the model's context, ids that the
            model does not have, a diffusion model without mask token, guidance of an autoregressive
            model, and edits that do not fit.
    """
    settings = settings or LikelihoodSettings()
    is_diffusion = loaded.is_diffusion
    scorer = Scorer(loaded, settings, edits)
    scorer.measure = measure
    todo = sorted(scorer.read(requests, groups), key=lambda each: -each.length)
    written = {}
    if greedy and is_diffusion:
        written = greedily_written(scorer, todo, settings)

    def plan(request: Request) -> Plan:
        tokens = len(request.continuation)
        if not is_diffusion:
            return asked.whole(tokens)
        if settings.estimator == "chain_rule":
            return asked.chain_rule(tokens)
        # under a random control equal masks meet different columns
        return asked.monte_carlo(tokens, request.group, settings, merge=not is_random(edits))

    results = {}
    for job in scorer.run(Job(request, plan(request)) for request in todo):
        request = job.request
        logprob, stderr = job.plan.result(job.sums_N)
        is_written = greedy and job.is_likeliest
        if is_diffusion:
            is_written = written.get(request.number, False)
        dose = None
        if edits:
            dose = Dose(totals(job.taken_N2))
        tokens = len(request.continuation)
        results[request.number] = Scored(logprob, stderr, is_written, tokens, request.dropped, dose)
        if progress is not None:
            progress()
    return [results[number] for number in range(len(todo))]


def rolling(
    loaded: Loaded,
    ids: Ids,
    settings: LikelihoodSettings | None = None,
    *,
    edits: Sequence[Intervention | str] = (),
    measure: bool = True,
) -> Scored:
    """The score of a text of any length: the sum over chunks of the model's context.

    A diffusion model reads each chunk given nothing (with Monte Carlo a bound of each chunk). An
    autoregressive model reads it given the token before it, the first one given the beginning (or
    else end) of text.

    Raises:
        ValueError: for an empty text, and as :func:`score` does.
    """
    if not len(ids):
        raise ValueError("a text to score must have at least one token, but has none; leave it out")
    limit = asked.limit_of(loaded)
    chunks: list[tuple[Ids, Ids]] = []
    for start in range(0, len(ids), limit):
        before: Ids = ()
        if not loaded.is_diffusion:
            before = ids[max(start - 1, 0) : start]
        chunks.append((before, ids[start : start + limit]))
    # chunks of one text must not share their noise: their errors would add up
    groups = [asked.digest(ids, (number,)) for number in range(len(chunks))]
    parts = score(loaded, chunks, settings, groups=groups, edits=edits, measure=measure)
    stderr = math.sqrt(sum(part.stderr**2 for part in parts))
    dose = None
    if edits:
        dose = Dose.pooled(part.dose for part in parts if part.dose)
    return Scored(sum(part.logprob for part in parts), stderr, tokens=len(ids), dose=dose)
