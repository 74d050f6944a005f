"""Requests as scoring takes them: the masked tokens of a continuation, the edits, and the parts of
its score.

Monte Carlo as in LLaDA (2502.09992, Eq. 6 and Alg. 3) and SMDM (2410.18514): both are means with
the expectation Σ_M log p(x_M | rest) · (l−1)! (L−l)! / L! over all masks M of l of the L tokens.
"""

# N different masks (rows to run), n samples, L tokens of the continuation
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.core.compat import stated
from sinklab.core.instrument import BlockKeys, Intervention, InterventionLog, Listener
from sinklab.core.instrument.edits.intervention import as_edits
from sinklab.core.registry import interventions
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.data.rows import place_generator
from sinklab.lab.scoring.settings import LikelihoodSettings
from sinklab.lab.scoring.writing import is_random

Ids = Sequence[int]


@dataclass(frozen=True)
class Request:
    """A continuation to score."""

    number: int
    """Its index among the requests."""
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    group: int
    """Requests of one group share random numbers."""
    dropped: int = 0
    """Tokens cut from the left of the context."""

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.context) + len(self.continuation)


def needs_mask(loaded: Loaded, what: str) -> None:
    """Raise ValueError for a diffusion model without a mask token, naming the feature that needs
    one.
    """
    config = loaded.config
    if loaded.is_diffusion and stated(config, "mask_token_id") is None:
        raise ValueError(
            f"{what} needs a model with a mask token, but {loaded.name} has mask_token_id None; "
            "set it in its config, or write with lm.generate where the model knows noise in "
            "its place (DiffusionGemma)"
        )


def limit_of(loaded: Loaded) -> int:
    """The most tokens of a text: the limit stated by the authors, else that of the positions."""
    needs_mask(loaded, "a text to be read")
    config = loaded.config
    if not loaded.is_diffusion:
        return min(loaded.context or config.max_position_embeddings, config.max_position_embeddings)
    positions = config.text_positions
    return min(loaded.context or positions, positions) - len(stated(config, "closing_ids", ()))


def read_requests(
    loaded: Loaded, requests: Sequence[tuple[Ids, Ids]], groups: Sequence[int] | None
) -> list[Request]:
    """Requests in the order given; without groups those of the same context share one.

    Raises:
        ValueError: for requests that cannot be scored.
    """
    if groups is not None and len(groups) != len(requests):
        raise ValueError(
            f"groups name the group of every request, got {len(groups)} for {len(requests)} "
            "requests"
        )
    is_diffusion = loaded.is_diffusion
    limit = limit_of(loaded)
    found = []
    for number, (given, wanted) in enumerate(requests):
        context = tuple(map(int, given))
        continuation = tuple(map(int, wanted))
        if not continuation:
            raise ValueError(
                f"request {number} has an empty continuation, and there is nothing to score; leave "
                "it out"
            )
        if len(continuation) > limit:
            raise ValueError(
                f"the continuation of request {number} has {len(continuation)} tokens, but the "
                f"context of {loaded.name} is {limit}; shorten it, or score it in chunks with "
                "rolling"
            )
        check_ids(loaded, f"request {number}", context, continuation)
        if groups is not None:
            group = int(groups[number])
        elif context:
            group = digest(context, ())
        else:
            group = digest((), continuation)
        if not is_diffusion:
            context = context or (start_token(loaded, "a context", "give a context"),)
        # an autoregressive model does not read the last token
        dropped = max(0, len(context) + len(continuation) - limit - (not is_diffusion))
        found.append(Request(number, context[dropped:], continuation, group, dropped))
    return found


def check_ids(loaded: Loaded, name: str, given: Ids, scored: Ids) -> None:
    """Raise ValueError for ids that the model does not know, and for a [MASK] that is to be scored;
    `name` is that of the text.
    """
    config = loaded.config
    wrong = [token for token in (*given, *scored) if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(
            f"{name} holds the id {wrong[0]}, but {loaded.name} knows 0 to "
            f"{config.vocab_size - 1}; encode the text with its own tokenizer"
        )
    if loaded.is_diffusion and config.mask_token_id in scored:
        raise ValueError(
            f"{name} holds [MASK] (id {config.mask_token_id}), which marks what is to be "
            "predicted and cannot be scored; remove it"
        )


def start_token(loaded: Loaded, empty: str, remedy: str) -> int:
    """Token that an autoregressive model reads before a text: its beginning, else its end of text.

    Raises:
        ValueError: if it has neither: names the empty text, and the remedy.
    """
    special = loaded.special
    start = special.bos
    if start is None:
        start = special.eos
    if start is None:
        raise ValueError(
            f"{loaded.name} is autoregressive and needs a token to start from, but {empty} is "
            f"empty and the model names no beginning or end of text; {remedy}"
        )
    return start


def digest(ids: Ids, more: Ids) -> int:
    """A number of these ids that is the same in every process."""
    text = ",".join(map(str, (*ids, "|", *more)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


_TIMES = 0
_MASKS = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows to run for one continuation, and the meaning of their sums Σ log p over the wanted
    tokens together.
    """

    masked_NL: Tensor
    """bool, tokens that the model sees as [MASK]."""
    wanted_NL: Tensor
    """bool, tokens with log-probabilities to add up; among the masked ones."""
    rows_n: np.ndarray | None = None
    """int64, the row of each sample, of which the score is the mean; -1 for one that masks nothing.
    None: the score is the sum over rows.
    """
    weights_n: np.ndarray | float = 1.0
    """float64, of each sample's sum."""

    def result(self, sums_N: np.ndarray) -> tuple[float, float]:
        """Score and standard error."""
        if self.rows_n is None:
            return float((sums_N * self.weights_n).sum()), 0.0
        # behind the last row stands that of samples that mask nothing, number -1
        values_n = np.append(sums_N, 0.0)[self.rows_n] * self.weights_n
        stderr = math.nan
        if len(values_n) > 1:
            stderr = float(values_n.std(ddof=1)) / math.sqrt(len(values_n))
        return float(values_n.mean()), stderr


def monte_carlo(
    tokens: int, group: int, settings: LikelihoodSettings, *, merge: bool = True
) -> Plan:
    """Random masks of a continuation of L tokens.

    Drawn from streams that belong to (seed, group): continuations of one group share the times, and
    the random numbers at the positions they both have. Equal masks run once (`merge`), which
    changes no estimate: of one token there is only one mask.
    """
    samples = settings.samples
    offset = torch.rand(
        (), generator=place_generator(settings.seed, _TIMES, group), dtype=torch.float64
    )
    t_n = (offset + torch.arange(samples, dtype=torch.float64) / samples) % 1.0
    # position by position, so that a longer continuation continues a shorter one
    masks = place_generator(settings.seed, _MASKS, group)
    u_Ln = torch.rand(tokens, samples, generator=masks, dtype=torch.float64)
    if settings.noise == "llada":
        count_n = (t_n * tokens).long().clamp(max=tokens - 1) + 1
        masked_nL = (u_Ln.argsort(0).argsort(0) < count_n).T
        weights_n = tokens / count_n.double()
    else:
        masked_nL = (u_Ln < t_n).T
        # nothing is masked at t = 0
        weights_n = torch.where(t_n > 0, 1 / t_n, 0.0)
    some_n = masked_nL.any(1)
    masked_NL = masked_nL[some_n]
    rows_N = torch.arange(len(masked_NL))
    if merge:
        masked_NL, rows_N = masked_NL.unique(dim=0, return_inverse=True)
    rows_n = np.full(samples, -1)
    rows_n[some_n.numpy()] = rows_N
    return Plan(masked_NL, masked_NL, rows_n, weights_n.numpy())


def chain_rule(tokens: int) -> Plan:
    """Row j predicts token j alone: the tokens before it are visible, it and all later ones are
    masked.
    """
    return Plan(torch.ones(tokens, tokens).triu().bool(), torch.eye(tokens).bool())


def whole(tokens: int) -> Plan:
    """The continuation as it is, for a model that reads from left to right."""
    return Plan(torch.zeros(1, tokens).bool(), torch.ones(1, tokens).bool())


Place = tuple[int, ...]
"""Key of the draws of a row's random control: (seed, group, number)."""


def by_last_query(edits: Sequence[Intervention]) -> tuple[Intervention, ...]:
    """The edits as an autoregressive model writes under them: keys are chosen by the last query's
    row, if nothing else is said.
    """
    found = []
    for edit in edits:
        if isinstance(edit, BlockKeys) and edit.scores is None:
            edit = replace(edit, scores="last_row")
        found.append(edit)
    return tuple(found)


def scoring_edits(
    edits: Sequence[Intervention | str], *, is_diffusion: bool, over_steps: bool = False
) -> tuple[Intervention, ...]:
    """The edits as scoring carries them out: `BlockKeys` that leaves open when keys are chosen
    chooses in a clean pass over the same row, by the attention of all queries if the model is
    causal.

    Args:
        edits: interventions.
        is_diffusion: whether the model denoises.
        over_steps: those that choose by a step before also choose in a clean pass; they are
            refused otherwise.

    Raises:
        ValueError: for an edit that begins after the first step, or chooses by one before.
    """
    found = []
    for edit in as_edits(edits):
        if isinstance(edit, BlockKeys):
            when = edit.when or "clean"
            if when in ("previous", "kept"):
                if not over_steps:
                    raise ValueError(
                        f"a text is scored in one step, so when={when!r} has no step before it to "
                        "choose in; leave it out, and a clean pass over the same text chooses"
                    )
                edit, when = replace(edit, limit=None), "clean"
            edit = replace(edit, when=when)
            if not is_diffusion:
                # the last row of a whole text says nothing of the queries before it
                edit = replace(edit, scores=None)
        first = extent_of(edit)[0]
        if first > 0:
            raise ValueError(
                f"a text is scored in one step, but {interventions.name_of(edit)} begins at step "
                f"{first} and would change nothing; leave out its step"
            )
        found.append(edit)
    return tuple(found)


def extent_of(edit: Intervention) -> tuple[int, int]:
    """The first step in which an edit acts, and the last position that it names; -1 if it names
    none.
    """
    return stated(edit, "extent", (0, -1))


def check_positions(edits: Sequence[Intervention], lengths: Sequence[int]) -> None:
    """Raise ValueError for named positions that the shortest of texts of these lengths does not
    have.
    """
    shortest = min(lengths, default=math.inf)
    for edit in edits:
        last = extent_of(edit)[1]
        if last >= shortest:
            raise ValueError(
                f"{interventions.name_of(edit)} names position {last}, but the shortest text to "
                f"score has {shortest} "
                f"tokens; name positions below {shortest}, or leave out the short texts"
            )


def placed(edits: Sequence[Intervention], places: Sequence[Place]) -> list[Intervention]:
    """The edits over one batch: the draws of its rows depend on their places alone, not on the
    batch.
    """
    found = []
    for edit in edits:
        if is_random([edit]):
            edit = _Drawn(edit, tuple(places))
        found.append(edit)
    return found


@dataclass(frozen=True)
class _Drawn:
    """A random control with a generator for each row."""

    edit: Any
    places: tuple[Place, ...]

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        listener = self.edit.handler(log, forwards_per_step)
        drawn = itertools.count()

        def draw(shape: Sequence[int]) -> Tensor:
            """Numbers of a shape (row, head, key), each row by a generator of its own."""
            _, heads, keys = shape
            number = next(drawn)
            generators = [place_generator(self.edit.seed, *place, number) for place in self.places]
            # key by key: padding behind a row does not change the draws of its keys
            return torch.stack(
                [torch.rand(keys, heads, generator=generator).T for generator in generators]
            )

        listener.draw = draw
        return listener
