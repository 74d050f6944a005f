"""The loss of held-out rows while edits change attention: one clean pass serves all that choose by
it.
"""

# R rows, B batch, L layers, H query heads, S sequence, M masked positions, V vocabulary
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab.core.compat import stated
from sinklab.core.instrument import Dose, Intervention, Listener, RemovalRecord, intervene
from sinklab.core.instrument.edits.edit import Editor
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.data import pack, read_corpus, row_start
from sinklab.lab.data.noise import corrupt, masked_token_loss, sample_times
from sinklab.lab.scoring.clean_layers import CleanLayers
from sinklab.lab.scoring.requests import Place, placed, scoring_edits
from sinklab.lab.scoring.writing import needs_clean_pass

BATCH = 16


@dataclass(frozen=True)
class EditedLosses:
    """Losses of rows of text under some edits, and the removals by these."""

    losses_R: Tensor
    """Nats per token, float32."""
    removals: tuple[tuple[RemovalRecord, ...], ...]
    """Removals of every batch of rows, in order; empty if nothing was edited."""

    @property
    def dose(self) -> Dose:
        """Dose of the edits, over all rows."""
        return Dose.of(one for batch in self.removals for one in batch)

    def doses_by_row(self) -> dict[str, Tensor]:
        """Dose of every row, by name as in `Dose` (keys, sinks, held, removed, matched), each
        (R,); NaN if nothing was removed.
        """
        names = ("keys", "sinks", "held", "removed", "matched")
        if not any(self.removals):
            return dict.fromkeys(names, torch.full_like(self.losses_R, math.nan))

        def of_rows(name: str) -> Tensor:
            batches = ([one.numbers[name].flatten(1) for one in batch] for batch in self.removals)
            return torch.cat([torch.cat(parts, 1).nanmean(1) for parts in batches])

        doses = {name: of_rows(name) for name in names}
        return doses | {"sinks": doses["sinks"] / of_rows("chosen")}


@torch.inference_mode()
def edited_losses(
    loaded: Loaded,
    ids_RS: Tensor,
    arms: Sequence[Sequence[Intervention | str]],
    *,
    seed: int = 0,
    batch: int = BATCH,
    only: range | None = None,
    progress: Callable[[], object] | None = None,
) -> list[EditedLosses]:
    """Loss of each row under each of some sets of edits; an empty one is the model as it is.

    A diffusion model is scored by its bound (arXiv 2601.19657, Eq. 3–4) under noise that depends on
    the seed alone, an autoregressive one by the mean of its next-token losses (the first token of a
    row is given). Edits that choose by attention do so in a clean pass over the same row, one for
    all arms (`scoring_edits`). In both kinds of model a key is blocked for all queries, its own
    position too; a query that sees nothing else keeps it (the first of a causal model).

    Args:
        loaded: the model.
        ids_RS: rows of text, all of one length.
        arms: sets of edits; those of a set act together.
        seed: of the noise, and with the number of the row, of the draws of random controls.
        batch: rows per forward; it changes results by rounding alone.
        only: numbers of the rows to score; all when left out. Noise and draws of a row are those
            that it has among all of them.
        progress: called after every scored batch of every arm.

    Raises:
        ValueError: for anything but interventions, one that begins after the first step or does not
            fit the rows.
    """
    is_diffusion = loaded.is_diffusion
    wanted = [scoring_edits(edits, is_diffusion=is_diffusion) for edits in arms]
    if is_diffusion:
        score = _bound_of(loaded, ids_RS, seed)
    else:
        score = _next_token_loss_of(loaded, ids_RS)
    batches = []
    some_rows = only
    if some_rows is None:
        some_rows = range(len(ids_RS))
    for start in range(some_rows.start, some_rows.stop, batch):
        part = slice(start, min(start + batch, some_rows.stop))
        places = [(seed, row) for row in range(part.start, part.stop)]
        found = []
        for scored in under_arms(loaded.model, wanted, places, partial(score, part)):
            found.append(scored)
            if progress is not None:
                progress()
        batches.append(found)
    return [
        EditedLosses(torch.cat([loss_B for loss_B, _ in arm]), tuple(gone for _, gone in arm))
        for arm in zip(*batches, strict=True)
    ]


def under_arms(
    model: Any,
    arms: Sequence[Sequence[Intervention]],
    places: Sequence[Place],
    run: Callable[[], Any],
    run_clean: Callable[[], Any] | None = None,
) -> Iterator[tuple[Any, tuple[RemovalRecord, ...]]]:
    """Results of a forward of one batch under each set of edits, and what these removed.

    One clean pass serves all edits that choose by attention; it is the result of an empty set. A
    set that edits no lower layer takes the outputs of these from it (`CleanLayers`).

    Args:
        model: the model.
        arms: sets of edits, as `scoring_edits` makes them.
        places: of the rows of the batch, for the draws of random controls.
        run: the forward.
        run_clean: the forward of the clean pass, if it is to be traced.
    """
    given = [edit for edits in arms for edit in edits]
    layers = CleanLayers(model)
    with intervene(model, *(edit for some in arms for edit in placed(some, places))) as log:
        start = len(log.tap.listeners) - len(given)
        others, handlers = log.tap.listeners[:start], iter(log.tap.listeners[start:])
        if needs_clean_pass(given) or not all(arms):
            # a trace around this is to see every layer
            begin_later = len(others) == 1 and any(stated(edit, "layers") for edit in given)
            with log.probing(), layers.kept(begin_later):
                clean = (run_clean or run)()
        for some in arms:
            found = clean
            if some:
                # the handlers of other sets do not hear of this forward
                own = [*islice(handlers, len(some))]
                log.tap.listeners = others + own
                calls = [*log.tap.layers]
                with layers.without(calls, min(_first_edited(one, calls) for one in own)):
                    found = run()
            yield found, tuple(log.removals)
            log.removals.clear()


def _first_edited(handler: Listener, calls: Sequence[str]) -> int:
    """Number of the first of these attention calls that an edit may change."""
    if not isinstance(handler, Editor):
        return 0
    has_layer = handler.scope.has_layer
    return next((number for number, path in enumerate(calls) if has_layer(number, path)), 0)


def _bound_of(loaded: Loaded, ids_RS: Tensor, seed: int) -> Callable[[slice], Tensor]:
    """A function that gives the masked-token bound of each of some rows."""
    model: Any = loaded.model
    generator = torch.Generator().manual_seed(seed)
    t_R = sample_times(ids_RS.shape[0], sampler="low_discrepancy", generator=generator)
    # the start token of a row is given, as it was in training
    start = 0
    if loaded.tokenizer:
        start = len(row_start(loaded.tokenizer))
    maskable_RS = (torch.arange(ids_RS.shape[1]) >= start).expand(ids_RS.shape)
    noisy_RS, masked_RS = corrupt(
        ids_RS,
        t_R,
        mask_id=model.config.mask_token_id,
        maskable_BS=maskable_RS,
        generator=generator,
    )
    denoiser = model.denoiser()

    def score(part: slice) -> Tensor:
        given = [rows_RS[part].to(model.device) for rows_RS in (noisy_RS, masked_RS, ids_RS)]
        logits_MV = denoiser.scored(*given)
        return masked_token_loss(
            logits_MV.cpu(),
            ids_RS[part],
            masked_RS[part],
            t_R[part],
            maskable_BS=maskable_RS[part],
            reduction="row",
        )

    return score


def _next_token_loss_of(loaded: Loaded, ids_RS: Tensor) -> Callable[[slice], Tensor]:
    """A function for a causal model: the mean next-token loss of each row."""
    model = loaded.model

    def score(part: slice) -> Tensor:
        ids_BS = ids_RS[part].to(model.device)
        logits_BSV = model(ids_BS, use_cache=False).logits
        # row by row: float32 logits of the whole batch would double the memory
        rows = zip(logits_BSV, ids_BS, strict=True)
        return torch.stack(
            [cross_entropy(row_SV[:-1].float(), ids_S[1:]) for row_SV, ids_S in rows]
        ).cpu()

    return score


@dataclass(frozen=True)
class HeldoutRows:
    """Rows of text the model has not seen, and their number of bytes."""

    ids_RS: Tensor
    size: int
    """Bytes of UTF-8 text."""

    def __len__(self) -> int:
        return len(self.ids_RS)


def heldout_rows(
    loaded: Loaded, source: str | Path, *, rows: int = 48, length: int = 256
) -> HeldoutRows:
    """The first rows of a corpus, packed with the model's tokenizer.

    Raises:
        ValueError: if the corpus cannot be read or does not fill one row.
    """
    ids_RS = pack(read_corpus(source), loaded.needed_tokenizer(), length)[:rows].long()
    texts = loaded.needed_tokenizer().batch_decode(ids_RS.tolist(), skip_special_tokens=True)
    return HeldoutRows(ids_RS, sum(len(text.encode()) for text in texts))


def row_losses(
    loaded: Loaded,
    ids_RS: Tensor,
    *,
    edits: Sequence[Intervention | str] = (),
    seed: int = 0,
    batch: int = BATCH,
) -> Tensor:
    """Loss of each row, nats per token, (R,) float32, under the same noise whatever the edits; see
    `edited_losses`.
    """
    return edited_losses(loaded, ids_RS, [edits], seed=seed, batch=batch)[0].losses_R
