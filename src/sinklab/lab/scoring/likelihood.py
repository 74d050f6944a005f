"""How likely a model finds a continuation: Monte Carlo or chain rule for diffusion models, exact
for autoregressive ones; with interventions and guidance.
"""

# B rows of a forward, N rows of a job, S positions of a text, L tokens of a continuation, M wanted
# positions, C columns, V vocabulary
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from sinklab.core.instrument import Dose, Intervention, intervene
from sinklab.core.subject import DecodingSettings
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring import requests as asked
from sinklab.lab.scoring.requests import Ids, Plan, Request, placed, scoring_edits
from sinklab.lab.scoring.settings import LikelihoodSettings, Scored
from sinklab.lab.scoring.writing import (
    Writing,
    WritingRequest,
    is_random,
    needs_clean_pass,
    taken,
    totals,
)

MOST_LOGITS = 2**28
"""Numbers among the logits of one forward: a gigabyte in float32."""


@dataclass(eq=False)
class Job:
    """A request, the rows to run for it, and what came of them."""

    request: Request
    plan: Plan

    def __post_init__(self) -> None:
        self.sums_N = np.zeros(len(self.plan.masked_NL))
        self.is_likeliest = True
        """Whether every wanted token is the likeliest one of all; read of autoregressive models
        alone.
        """
        self.taken_N2: Any = 0
        """Removals by edits from its rows; see `taken`."""


def run(
    loaded: Loaded,
    jobs: Iterable[Job],
    settings: LikelihoodSettings,
    edits: Sequence[Intervention] = (),
    *,
    measure: bool = True,
) -> Iterator[Job]:
    """Fill the sums of the jobs; rows of texts of one length that follow each other share forwards,
    of an autoregressive model without edits any rows: what stands behind a text is not seen.

    A diffusion model reads noisy copies; an autoregressive one the text without its last token, as
    nothing follows it.
    """
    copies = 1 + bool(settings.cfg_scale)
    forward = _continued(loaded)
    if loaded.is_diffusion:
        forward = _denoised(loaded)

    def shape(job: Job) -> Any:
        if loaded.is_diffusion or edits:
            return job.request.length, _closing(loaded, job.request)
        return None

    for _, alike in groupby(jobs, key=shape):
        some = [*alike]
        wanted = copies * max(len(job.request.continuation) for job in some)
        most = MOST_LOGITS // (wanted * loaded.config.vocab_size)
        size = max(1, min(settings.batch // copies, most))
        rows = [(job, number) for job in some for number in range(len(job.sums_N))]
        for start in range(0, len(rows), size):
            _fill(loaded, rows[start : start + size], forward, settings, edits, measure)
        yield from some


def _closing(loaded: Loaded, request: Request) -> tuple[int, ...]:
    """Ids behind a text: [SEP] of a masked language model."""
    if not loaded.is_diffusion:
        return ()
    return loaded.config.closing_of(request.context)


@torch.inference_mode()
def _fill(
    loaded: Loaded,
    batch: Sequence[tuple[Job, int]],
    forward: Callable[..., Tensor],
    settings: LikelihoodSettings,
    edits: Sequence[Intervention],
    measure: bool,
) -> None:
    """Sums of some rows, each a job and its number."""
    requests = [job.request for job, _ in batch]
    closing = _closing(loaded, requests[0])
    texts = [[*one.context, *one.continuation, *closing] for one in requests]
    ids_BS = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    flags_2BS = torch.zeros(2, *ids_BS.shape, dtype=torch.bool)
    bare_BS = torch.zeros_like(flags_2BS[0])
    for row, (job, number) in enumerate(batch):
        start, end = len(job.request.context), job.request.length
        flags_2BS[0, row, start:end] = job.plan.masked_NL[number]
        flags_2BS[1, row, start:end] = job.plan.wanted_NL[number]
        bare_BS[row, :start] = True
    masked_BS, wanted_BS = flags_2BS
    places = [(settings.seed, job.request.group, number) for job, number in batch]
    labels_M, rows_M = ids_BS[wanted_BS], wanted_BS.nonzero()[:, 0]
    if settings.cfg_scale:
        # both readings of a row in one forward; without the context it stays masked for later
        # blocks too
        mask_id = loaded.config.mask_token_id
        ids_BS = torch.cat([ids_BS, ids_BS.masked_fill(bare_BS, mask_id)])
        masked_BS, wanted_BS, places = masked_BS.repeat(2, 1), wanted_BS.repeat(2, 1), places * 2
    taken_BN2: Any = 0
    if edits:
        with intervene(loaded.model, *placed(edits, places), measure=measure) as log:
            if needs_clean_pass(edits):
                with log.probing():
                    forward(ids_BS, masked_BS, wanted_BS)
            logits_MV = forward(ids_BS, masked_BS, wanted_BS)
        taken_BN2 = taken(log)
    else:
        logits_MV = forward(ids_BS, masked_BS, wanted_BS)
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    if settings.cfg_scale:
        cond_MV, bare_MV = logits_MV.chunk(2)
        logits_MV = bare_MV + (1 + settings.cfg_scale) * (cond_MV - bare_MV)
    nats_M = cross_entropy(logits_MV, labels_M.to(logits_MV.device), reduction="none").cpu()
    if bool(nats_M.isnan().any()):
        raise ValueError(f"{loaded.name} gave NaN logits while scoring; try another dtype")
    nats_B = torch.zeros(len(batch), dtype=torch.float64).index_add(0, rows_M, nats_M.double())
    wrong: set[int] = set()
    if not loaded.is_diffusion:
        wrong = {*rows_M[logits_MV.argmax(-1).cpu() != labels_M].tolist()}
    for row, (job, number) in enumerate(batch):
        job.sums_N[number] = -nats_B[row]
        job.is_likeliest &= row not in wrong
        if isinstance(taken_BN2, Tensor):
            # guidance reads each row twice
            job.taken_N2 = job.taken_N2 + taken_BN2[row :: len(batch)].sum(0)


def _denoised(loaded: Loaded) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Logits of the wanted tokens of texts of which some are masked."""
    model: Any = loaded.model
    # kept, as it holds tensors that are the same for every text of a shape
    denoiser = model.denoiser()

    def forward(ids_BS: Tensor, masked_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        noisy_BS = ids_BS.masked_fill(masked_BS, loaded.config.mask_token_id)
        return denoiser.scored(*(x.to(model.device) for x in (noisy_BS, wanted_BS, ids_BS)))

    return forward


def _continued(loaded: Loaded) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Logits of the wanted tokens of texts, of which the last is not read."""
    model: Any = loaded.model

    def forward(ids_BS: Tensor, _: Tensor, wanted_BS: Tensor) -> Tensor:
        columns_C = wanted_BS[:, 1:].any(0).nonzero()[:, 0]
        ids = ids_BS[:, :-1].to(model.device)
        logits_BCV = model(ids, use_cache=False, logits_to_keep=columns_C).logits
        return logits_BCV[wanted_BS[:, 1:][:, columns_C].to(logits_BCV.device)]

    return forward


def greedily_written(
    loaded: Loaded,
    requests: Sequence[Request],
    settings: LikelihoodSettings,
    edits: Sequence[Intervention],
) -> dict[int, bool]:
    """Whether greedy decoding writes exactly the continuation, by number of the request: one token
    a step, the one the model is surest of (SMDM's and LLaDA's evaluation of LAMBADA).
    """
    decoding = DecodingSettings(
        rule="low_confidence", cfg_scale=settings.cfg_scale, seed=settings.seed, stop_at_eos=False
    )
    found = {}
    by_length = sorted(requests, key=lambda one: len(one.continuation))
    for length, alike in groupby(by_length, lambda one: len(one.continuation)):
        some = [*alike]
        most = MOST_LOGITS // (length * loaded.config.vocab_size)
        size = max(1, min(settings.batch // (1 + bool(settings.cfg_scale)), most))
        if is_random(edits):
            size = 1
        for start in range(0, len(some), size):
            batch = some[start : start + size]
            asked_of = [WritingRequest(request.context) for request in batch]
            texts = Writing(loaded, asked_of, decoding, length, edits, ends=False)
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
    asked.needs_mask(loaded, "a score")
    is_diffusion = loaded.is_diffusion
    if settings.cfg_scale and not is_diffusion:
        raise ValueError(
            "guidance masks the context, which only a diffusion model can read, but "
            f"{loaded.name} is {loaded.family}; leave out cfg_scale"
        )
    made = scoring_edits(edits, is_diffusion=is_diffusion)
    todo = sorted(asked.read_requests(loaded, requests, groups), key=lambda each: -each.length)
    asked.check_positions(made, [each.length - (not is_diffusion) for each in todo])
    written = {}
    if greedy and is_diffusion:
        written = greedily_written(loaded, todo, settings, made)

    def plan(request: Request) -> Plan:
        tokens = len(request.continuation)
        if not is_diffusion:
            return asked.whole(tokens)
        if settings.estimator == "chain_rule":
            return asked.chain_rule(tokens)
        # under a random control equal masks meet different columns
        return asked.monte_carlo(tokens, request.group, settings, merge=not is_random(made))

    results = {}
    jobs = (Job(request, plan(request)) for request in todo)
    for job in run(loaded, jobs, settings, made, measure=measure):
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
