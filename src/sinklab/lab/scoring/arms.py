"""The one loop over arms × texts: the loss of every text under every set of edits.

`LM.compare`, the study of costs and scripts give it arms. All arms of a text read the same masks,
so that differences are paired; another text has masks of its own, so that texts are independent
samples. One clean pass serves all edits that choose by attention.
"""

# R rows (a text under one mask), B rows of a batch, T texts, N masks of a text, S positions of a
# text, P positions that are read, M wanted positions, L layers, H heads, K keys (added sinks first)
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from sinklab.core.compat import stated
from sinklab.core.instrument import Intervention, Listener, RemovalRecord, intervene, trace
from sinklab.core.instrument.edits.dose import by_row
from sinklab.core.instrument.edits.edit import Editor
from sinklab.core.subject import Places
from sinklab.lab.analysis.movement import STRONG
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.data import pack, read_corpus
from sinklab.lab.scoring.clean_layers import CleanLayers
from sinklab.lab.scoring.requests import Place, digest, monte_carlo, placed, scoring_edits
from sinklab.lab.scoring.settings import LikelihoodSettings

BATCH = 16
DOSE = ("keys", "sinks", "held", "removed", "matched")
"""Measures of `Dose` that stand beside every loss."""


@dataclass(frozen=True)
class HeldoutRows:
    """Rows of text the model has not seen, and their number of bytes."""

    ids_RS: Tensor
    size: int
    """Bytes of UTF-8 text."""


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


class ArmLoss(NamedTuple):
    """One text under one arm."""

    arm: Any
    text: int
    position_P: np.ndarray
    """Positions whose tokens count."""
    nats_P: np.ndarray
    """Loss of the token at each."""
    about: dict[str, Any]
    """The dose (`DOSE`), nothing blocked without edits; regrown, the share of heads in which
    another key became a sink (its share of the attention is above `STRONG`, and was not without the
    edits), and grown_at, the text position of most of these keys, below 0 for an added sink, NaN
    for none; without edits also strongest, the share of the key that receives most, and strong, the
    share of heads in which that is above `STRONG`.
    """

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats_P.mean())


def arm_losses(
    loaded: Loaded,
    arms: Mapping[Any, Sequence[Intervention | str]],
    texts: Sequence[Sequence[int]],
    *,
    read: str | Sequence[int] = "all",
    samples: int = 1,
    seed: int = 0,
    first: int = 0,
    batch: int = BATCH,
    tick: Callable[[], object] | None = None,
) -> Iterator[ArmLoss]:
    """Losses of each text under each arm, text by text; an arm without edits is the model as it is.

    A diffusion model is scored by the Monte Carlo bound over random masks (LLaDA, arXiv 2502.09992,
    Eq. 6), an autoregressive one by its next-token losses (the first token is given). Edits that
    choose by attention do so in a clean pass over the same text. In both kinds of model a key is
    blocked for all queries, its own position too; a query that sees nothing else keeps it.

    Args:
        loaded: the model.
        arms: name -> edits that act together.
        texts: token ids.
        read: positions that count, see `positions_read`.
        samples: masks of a text for a diffusion model.
        seed: of masks; with the number of the text and the mask, of the draws of random controls.
        first: number of the first text.
        batch: rows per forward; texts of one length share it. It changes results by rounding alone.
        tick: called after every arm of every forward.

    Raises:
        ValueError: for anything but interventions, one that begins after the first step or does not
            fit the texts, positions that leave nothing to read, and losses that are NaN.
    """
    is_diffusion = loaded.is_diffusion
    edits = {name: scoring_edits(given, is_diffusion=is_diffusion) for name, given in arms.items()}
    how: dict[str, Any] = {"samples": samples, "seed": seed, "first": first, "batch": batch}
    for rows in together(loaded, texts, read=read, **how):
        found = _measured(edits, rows, batch, tick or (lambda: None))
        yield from (one for each in found for one in each)


@dataclass(frozen=True)
class Together:
    """Texts of one length under all their masks, a row each."""

    loaded: Loaded
    numbers: list[int]
    """Of the texts."""
    read_TS: Tensor
    """Positions that count."""
    text_R: Tensor
    """Place of a row's text among these."""
    ids_RS: Tensor
    masked_RS: Tensor
    weight_R: Tensor
    """Weight of a row's losses in those of its text."""
    places: list[Place]

    def nats(self, part: slice, *, gradient: bool = False) -> Tensor:
        """Losses of the tokens of some rows that are read, (B, S); 0 elsewhere. With a gradient the
        model is run as it is, without inference mode.
        """
        model = self.loaded.model
        ids_BS, masked_BS = self.ids_RS[part], self.masked_RS[part]
        if self.loaded.is_diffusion:
            return _denoised(model, ids_BS, masked_BS, self.read_TS[self.text_R[part]], gradient)
        return _continued(model, ids_BS)


def together(
    loaded: Loaded,
    texts: Sequence[Sequence[int]],
    *,
    read: str | Sequence[int] = "all",
    samples: int = 1,
    seed: int = 0,
    first: int = 0,
    batch: int = BATCH,
) -> Iterator[Together]:
    """The rows of texts that share forwards, as `arm_losses` reads them: texts in a row, of one
    length, and as many as fit.
    """
    most, parts = max(1, batch // samples), []
    for _, alike in groupby(range(len(texts)), key=lambda number: len(texts[number])):
        of_length = [*alike]
        parts += [of_length[at : at + most] for at in range(0, len(of_length), most)]
    for some in parts:
        read_TS = torch.stack([_read(loaded, texts[number], read) for number in some])
        masks = [_masks(loaded, texts[number], seed, samples) for number in some]
        masked_TNS, weight_TN = (torch.stack(of_texts) for of_texts in zip(*masks, strict=True))
        text_R = torch.arange(len(some)).repeat_interleave(weight_TN.shape[1])
        numbers = [first + number for number in some]
        yield Together(
            loaded,
            numbers,
            read_TS,
            text_R,
            ids_RS=torch.tensor([texts[number] for number in some])[text_R],
            masked_RS=masked_TNS.flatten(0, 1),
            weight_R=weight_TN.flatten(),
            places=[(seed, *one) for one in product(numbers, range(weight_TN.shape[1]))],
        )


def _read(loaded: Loaded, ids: Sequence[int], read: str | Sequence[int]) -> Tensor:
    """Positions of a text that count, bool (S,). Raises ValueError if there is none."""
    scored_S = scored_tokens(loaded, ids)
    read_S = positions_read(read, len(ids)) & scored_S
    if not read_S.any():
        raise ValueError(
            f"read={read!r} leaves nothing of a text of {len(ids)} tokens, of which "
            f"{int(scored_S.sum())} are scored: a first token, or [CLS] and [SEP], are given"
        )
    return read_S


class _Total:
    """Sums over the rows of some texts under one arm."""

    def __init__(self, read_TS: Tensor) -> None:
        texts = len(read_TS)
        self.nats_TS = torch.zeros(read_TS.shape, dtype=torch.float64)
        self.doses = {name: torch.zeros(2, texts, dtype=torch.float64) for name in DOSE}
        self.shares = {name: torch.zeros(texts) for name in ("regrown", "strongest", "strong")}
        self.grown_at: list[list[int]] = [[] for _ in read_TS]
        self.is_edited = False

    def add(
        self,
        nats_BS: Tensor,
        records: Sequence[RemovalRecord],
        before_BLHK: Tensor,
        text_B: Tensor,
        added: int,
    ) -> None:
        """Rows of one forward. `before_BLHK`: share of the attention of each key without edits."""
        self.nats_TS.index_add_(0, text_B, nats_BS)
        for record in records:
            found = by_row(record)
            for name in DOSE:
                self.doses[name].index_add_(1, text_B, torch.stack(found[name]).cpu())
        first_BLH = before_BLHK.amax(-1)
        self._share("strongest", first_BLH, text_B)
        self._share("strong", (first_BLH > STRONG).float(), text_B)
        if not records:
            return
        self.is_edited = True
        # the last one stands for all edits
        last = records[-1]
        own_BLHK = before_BLHK[:, list(last.layer_numbers)][:, :, list(last.heads)]
        at_BLH = last["strongest_at"].nan_to_num().long().clamp_min(0).cpu()
        was_BLH = own_BLHK.gather(-1, at_BLH[..., None])[..., 0]
        grown_BLH = (last["strongest"].cpu() > STRONG) & (was_BLH <= STRONG)
        self._share("regrown", grown_BLH.float(), text_B)
        for text, grown_LH, at_LH in zip(text_B.tolist(), grown_BLH, at_BLH, strict=True):
            self.grown_at[text] += (at_LH[grown_LH] - added).tolist()

    def _share(self, name: str, share_BLH: Tensor, text_B: Tensor) -> None:
        self.shares[name].index_add_(0, text_B, share_BLH.flatten(1).mean(1))

    def about(self, text: int, masks: int, *, is_clean: bool) -> dict[str, Any]:
        """`ArmLoss.about` of a text."""
        found: dict[str, Any] = {}
        for name, (total_T, known_T) in self.doses.items():
            found[name] = float(total_T[text] / known_T[text])
        shares = {name: float(share_T[text] / masks) for name, share_T in self.shares.items()}
        if is_clean:
            found |= dict.fromkeys(("keys", "held", "removed"), 0.0)
        else:
            shares |= dict.fromkeys(("strongest", "strong"), math.nan)
            if not self.is_edited:
                # an edit of hidden states takes no key away, and notes nothing
                shares["regrown"] = math.nan
        most = Counter(self.grown_at[text]).most_common(1)
        return found | shares | {"grown_at": float(most[0][0]) if most else math.nan}


def _measured(
    edits: Mapping[Any, tuple[Intervention, ...]],
    rows: Together,
    batch: int,
    tick: Callable[[], object],
) -> list[list[ArmLoss]]:
    """Texts of one length under all arms, read together."""
    loaded = rows.loaded
    totals = {name: _Total(rows.read_TS) for name in edits}
    for start in range(0, len(rows.places), batch):
        part = slice(start, start + batch)
        clean: list[Tensor] = []

        def run_clean(part: slice = part, clean: list[Tensor] = clean) -> Tensor:
            with trace(loaded.model, ("received",)) as recording:
                nats_BS = rows.nats(part)
            clean.append(recording.received[0].float().cpu() / rows.ids_RS.shape[1])
            return nats_BS

        with torch.inference_mode():
            run = partial(rows.nats, part)
            found = under_arms(loaded.model, [*edits.values()], rows.places[part], run, run_clean)
            for name, (nats_BS, records) in zip(edits, found, strict=True):
                weighted_BS = nats_BS.double() * rows.weight_R[part, None]
                text_B = rows.text_R[part]
                totals[name].add(weighted_BS, records, clean[0], text_B, loaded.added_sinks)
                tick()
    for name, total in totals.items():
        if total.nats_TS.isnan().any():
            raise ValueError(
                f"{loaded.name} gave NaN logits under the arm {name!r}; try another dtype"
            )
    masks = len(rows.places) // len(rows.numbers)
    return [
        [
            ArmLoss(
                name,
                number,
                read_S.nonzero()[:, 0].numpy(),
                total.nats_TS[text][read_S].numpy(),
                total.about(text, masks, is_clean=not edits[name]),
            )
            for name, total in totals.items()
        ]
        for text, (number, read_S) in enumerate(zip(rows.numbers, rows.read_TS, strict=True))
    ]


def under_arms(
    model: Any,
    arms: Sequence[Sequence[Intervention]],
    places: Sequence[Place],
    run: Callable[[], Any],
    run_clean: Callable[[], Any],
) -> Iterator[tuple[Any, tuple[RemovalRecord, ...]]]:
    """Results of a forward of one batch under each set of edits, and what these removed.

    One clean pass serves all edits that choose by attention; it is the result of an empty set. A
    set that edits no lower layer takes the outputs of these from it (`CleanLayers`).

    Args:
        model: the model.
        arms: sets of edits, as `scoring_edits` makes them.
        places: of the rows of the batch, for the draws of random controls.
        run: the forward.
        run_clean: the forward of the clean pass.
    """
    given = [edit for edits in arms for edit in edits]
    layers = CleanLayers(model)
    with intervene(model, *(edit for some in arms for edit in placed(some, places))) as log:
        start = len(log.tap.listeners) - len(given)
        others, handlers = log.tap.listeners[:start], iter(log.tap.listeners[start:])
        # a trace around this is to see every layer
        begin_later = len(others) == 1 and any(stated(edit, "layers") for edit in given)
        with log.probing(), layers.kept(begin_later):
            clean = run_clean()
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


def without_closing(model: Any, ids: Sequence[int]) -> Sequence[int]:
    """Ids of a text without the ones that the model sees behind every text, if they end it."""
    closing = getattr(model.config, "closing_ids", ())
    if closing and [*ids[-len(closing) :]] == [*closing]:
        return ids[: -len(closing)]
    return ids


def positions_read(read: str | Sequence[int], length: int) -> Tensor:
    """Positions whose tokens count, bool (S,).

    Args:
        read: "all", "from32" (from position 32 on), or numbers of positions.
        length: of the text.

    Raises:
        ValueError: for other words, and for positions that leave nothing to read.
    """
    position_S = torch.arange(length)
    if isinstance(read, str):
        first = {"all": "0"}.get(read, read.removeprefix("from"))
        if not first.isdecimal():
            raise ValueError(f"read is all, from and a number, or positions, got {read!r}")
        read_S = position_S >= int(first)
    else:
        read_S = torch.isin(position_S, torch.tensor([*read]))
    if not read_S.any():
        raise ValueError(f"read={read!r} leaves nothing of a text of {length} tokens")
    return read_S


def scored_tokens(loaded: Loaded, ids: Sequence[int]) -> Tensor:
    """Tokens of a text that have a loss, bool (S,): all but the first of a causal model, or a start
    token and the closing of a text, which are given.
    """
    scored_S = torch.ones(len(ids), dtype=torch.bool)
    scored_S[len(without_closing(loaded.model, ids)) :] = False
    if not loaded.is_diffusion or ids[0] == loaded.special.bos:
        scored_S[0] = False
    return scored_S


def _masks(loaded: Loaded, ids: Sequence[int], seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Random masks of a text (N, S) and their weights (N,), so that the weighted losses of masked
    tokens add up to the bound; of an autoregressive model one without masks.
    """
    if not loaded.is_diffusion:
        return torch.zeros(1, len(ids), dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    scored_S = scored_tokens(loaded, ids)
    # the group of `rolling`, so that the masks are those of `LM.loss`
    group = digest(without_closing(loaded.model, ids), (0,))
    settings = LikelihoodSettings(samples=samples, seed=seed)
    plan = monte_carlo(int(scored_S.sum()), group, settings, merge=False)
    masked_NS = torch.zeros(samples, len(ids), dtype=torch.bool)
    masked_NS[:, scored_S] = plan.masked_NL
    return masked_NS, torch.as_tensor(plan.weights_n) / samples


def _denoised(
    model: Any, ids_BS: Tensor, masked_BS: Tensor, read_BS: Tensor, gradient: bool
) -> Tensor:
    """Losses of the masked tokens that are read, (B, S); 0 elsewhere."""
    noisy_BS = ids_BS.masked_fill(masked_BS, model.config.mask_token_id)
    wanted_BS = masked_BS & read_BS
    noisy, wanted, clean = (x.to(model.device) for x in (noisy_BS, wanted_BS, ids_BS))
    denoiser = model.denoiser()
    if gradient:
        logits_MV = denoiser.full_pass(noisy, Places.of(wanted))
    else:
        logits_MV = denoiser.scored(noisy, wanted, clean)
    nats_BS = torch.zeros(masked_BS.shape)
    nats_BS[wanted_BS] = cross_entropy(logits_MV.float().cpu(), ids_BS[wanted_BS], reduction="none")
    return nats_BS


def _continued(model: Any, ids_BS: Tensor) -> Tensor:
    """Next-token losses, (B, S), at the position of the token; 0 at the first."""
    logits_BSV = model(ids_BS.to(model.device), use_cache=False).logits
    # row by row: float32 logits of the whole batch would double the memory
    nats = [
        cross_entropy(logits_SV[:-1].float().cpu(), ids_S[1:], reduction="none")
        for logits_SV, ids_S in zip(logits_BSV, ids_BS, strict=True)
    ]
    return pad(torch.stack(nats), (1, 0))
