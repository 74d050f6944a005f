"""How MDLM and BD3-LM (`checkpoints/dit.py`) are scored and decoded by their authors.

The samplers draw every masked position anew at every update, which no unmasking rule can say: they
are generators of the same steps as :func:`sinklab.core.sampling.denoise`. In distribution the rule
``random`` at temperature 1, with one token a step, is BD3-LM's first hitting; ``origin`` with the
schedule ``timed`` is MDLM's sampler up to its last evaluation.
"""

# B batch, S sequence, N blocks, W columns of a block, M masked positions (row-major), V vocabulary
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.attention.context import decoding
from sinklab.core.errors import check_count
from sinklab.core.sampling import Canvas, Denoiser, Step
from sinklab.lab.scoring.likelihood import at_least_float32


def published_noise(
    config: Any,
    ids_BS: Tensor,
    *,
    times: tuple[float, float] = (1e-3, 1.0),
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """The noise of the losses of MDLM, or with attention in blocks of BD3-LM.

    Times are spread evenly over the rows (BD3-LM: the blocks of all rows), each drawn within its
    share. A token is masked with probability (1 - 0.001) t (BD3-LM: t, and never the first one).
    Draws are those of the original from the same seed; masks fall on padding too.

    Args:
        config: of the model.
        ids_BS: clean text; for BD3-LM whole blocks.
        times: the least and the greatest time.

    Returns:
        noisy_BS, masked_BS (bool) and the times t_BS.

    Raises:
        ValueError: for a text that is no whole number of blocks.
    """
    (rows, length), block_length = ids_BS.shape, config.block_length
    if block_length is not None and length % block_length:
        raise ValueError(
            f"a text is scored in whole blocks of {block_length} tokens, but has {length}; cut or "
            "fill it"
        )
    count = 1 if block_length is None else length // block_length
    drawn: dict[str, Any] = {"generator": generator, "device": generator.device}
    share_BN = torch.arange(rows * count, device=generator.device).view(rows, count) / (
        rows * count
    )
    even_BN = (torch.rand(rows, count, **drawn) / (rows * count) + share_BN) % 1
    t_BS = (even_BN * (times[1] - times[0]) + times[0]).repeat_interleave(length // count, 1)
    chance_BS = torch.rand(rows, length, **drawn)
    masked_BS = chance_BS < (1 - 1e-3) * t_BS if block_length is None else chance_BS <= t_BS
    if block_length is not None:
        masked_BS[:, 0] = False
    masked_BS = masked_BS.to(ids_BS.device)
    return ids_BS.masked_fill(masked_BS, config.mask_token_id), masked_BS, t_BS.to(ids_BS.device)


def published_loss(
    model: Any, ids_BS: Tensor, real_BS: Tensor | None = None, **noise: Any
) -> Tensor:
    """The validation loss of MDLM, or with attention in blocks of BD3-LM, in nats per token (a
    scalar).

    Each masked token has the weight 1/t; BD3-LM reads the clean text beside the noisy one, and its
    first token does not count.

    Args:
        model: one of them, from `load`.
        ids_BS: clean text; for BD3-LM whole blocks.
        real_BS: True or 1 if a token counts; None counts all. The model sees the others too.
        noise: as of `published_noise`.

    Raises:
        ValueError: as `published_noise` does.

    Source: Sahoo et al. 2024 (2406.07524), Arriola et al. 2025 (2503.09573); ``_loss`` in
    `diffusion.py` of kuleshov-group/mdlm and kuleshov-group/bd3lms.
    """
    noisy_BS, masked_BS, t_BS = published_noise(model.config, ids_BS, **noise)
    counted_BS = torch.ones_like(t_BS) if real_BS is None else real_BS.to(t_BS)
    clean = {}
    if model.config.block_length is not None:
        clean = {"clean": ids_BS}
        counted_BS = counted_BS.index_fill(
            1, torch.zeros(1, dtype=torch.int64, device=ids_BS.device), 0.0
        )
    logits_MV = model(noisy_BS, logits_to_keep=masked_BS, **clean).logits
    nats_M = (
        F.cross_entropy(at_least_float32(logits_MV), ids_BS[masked_BS], reduction="none")
        / t_BS[masked_BS]
    )
    return (nats_M * counted_BS[masked_BS]).sum() / counted_BS.sum()


def ddpm_cache(
    denoiser: Denoiser, canvas: Canvas, *, steps: int, eps: float = 1e-5, generator: torch.Generator
) -> Iterator[Step]:
    """MDLM's sampler: every mask is filled with probability 1 - s/t, from t to s, ``steps`` times
    from 1 to ``eps``.

    The model is asked again if an update changed something in any row, and once more at the end,
    for the most probable tokens of the remaining masks: one step each. Draws are those of the
    original from the same seed.

    Args:
        denoiser: ``model.denoiser()``.
        canvas: without padding.
        steps: updates.

    Raises:
        ValueError: for padding, or ``steps`` below 1.

    Source: ``_ddpm_caching_update`` and ``_sample`` in `diffusion.py` of kuleshov-group/mdlm.
    """
    check_count("steps", steps, "it counts updates")
    run = _Run(denoiser, canvas, generator, torch.float32)
    t_T = torch.linspace(1, eps, steps + 1)[:-1]
    (block,) = run.windows(canvas.ids_BS.shape[1])
    yield from run.updates(block, ((t_T - (1 - eps) / steps) / t_T).tolist())
    masked_BW = run.masked(block)
    p_MV = run.probabilities(block, masked_BW)
    best_M, token_M = p_MV.max(-1)
    yield run.step(block, masked_BW, masked_BW, token_M, best_M)


def semi_ar(
    denoiser: Denoiser,
    canvas: Canvas,
    *,
    block_length: int,
    steps: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator,
) -> Iterator[Step]:
    """BD3-LM's sampler: blocks of columns from left to right.

    Without ``steps`` it is first hitting: at every evaluation one mask of the block, drawn evenly,
    takes its draw. With ``steps`` each block has so many updates like those of `ddpm_cache`, from 1
    to 0; the last one fills the rest (the original divides by 0 there). Draws are those of the
    original from the same seed. The original starts from a first token that is given: put it on the
    canvas.

    Args:
        denoiser: ``model.denoiser()``.
        canvas: without padding.
        block_length: of the model, counted from the first column.
        steps: updates of each block; None for first hitting.
        top_p: draw from the most probable tokens with a total that does not exceed it, and the best
            one.

    Raises:
        ValueError: for padding, or numbers below 1.

    Source: ``_semi_ar_sampler`` in `diffusion.py` of kuleshov-group/bd3lms.
    """
    check_count("block_length", block_length, "it counts columns")
    check_count("steps", steps, "leave it out for first hitting")
    run = _Run(denoiser, canvas, generator, torch.float64, top_p)
    t_T = torch.linspace(1, 0, steps or 0)
    stays = (
        None if steps is None else [max(0.0, 1 - 1 / steps / t) if t else 0.0 for t in t_T.tolist()]
    )
    for block in run.windows(block_length):
        yield from run.updates(block, stays)


@dataclass(eq=False)
class _Run:
    """One canvas that is decoded."""

    denoiser: Denoiser
    canvas: Canvas
    generator: torch.Generator
    dtype: torch.dtype
    """Type of probabilities and draws."""
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not bool(self.canvas.attention_BS.all()):
            raise ValueError(
                "this sampler of its authors knows no padding; decode rows of unequal length one "
                "by one"
            )
        self.ids_BS, self.index = self.canvas.ids_BS, 0

    def windows(self, width: int) -> list[slice]:
        """All columns of every row, in blocks of so many."""
        length = self.ids_BS.shape[1]
        return [slice(at, min(at + width, length)) for at in range(0, length, width)]

    def masked(self, block: slice) -> Tensor:
        """Positions of the block that are still masked, bool (B, W)."""
        return (self.canvas.open_BS & (self.ids_BS == self.canvas.mask_id))[:, block]

    def placed(self, values_BW: Tensor, block: slice) -> Tensor:
        """Flags of the columns of a block as those of the canvas, bool (B, S)."""
        flags_BS = torch.zeros_like(self.canvas.open_BS)
        flags_BS[:, block] = values_BW
        return flags_BS

    @torch.no_grad()
    def probabilities(self, block: slice, masked_BW: Tensor) -> Tensor:
        """(M, V) of the tokens at the masks, from one evaluation; outside the nucleus they are
        0.
        """
        wanted_BS = self.placed(masked_BW, block)
        with decoding(self):
            p_MV = (
                at_least_float32(self.denoiser(self.ids_BS, wanted_BS))
                .log_softmax(-1)
                .to(self.dtype)
                .exp()
            )
        if self.top_p < 1:
            sorted_MV, order_MV = p_MV.sort(-1, descending=True)
            kept_MV = sorted_MV.cumsum(-1) <= self.top_p
            kept_MV[:, 0] = True
            p_MV = torch.zeros_like(p_MV).scatter(-1, order_MV, sorted_MV * kept_MV)
            p_MV = p_MV / p_MV.sum(-1, keepdim=True)
        return p_MV

    def updates(self, block: slice, stays: Sequence[float] | None) -> Iterator[Step]:
        """Update the block until it has no mask: with these chances that a mask stays, or by first
        hitting.
        """
        p_MV: Any = None
        for stay in [None] * self.ids_BS[:, block].numel() if stays is None else stays:
            masked_BW = self.masked(block)
            if not bool(masked_BW.any()):
                break
            p_MV = self.probabilities(block, masked_BW) if p_MV is None else p_MV
            token_M = self._drawn(p_MV, masked_BW, stay or 0.0)
            chosen_BW = self._picked(masked_BW) if stay is None else masked_BW.clone()
            if stay is not None:
                chosen_BW[masked_BW] = token_M != self.canvas.mask_id
            if bool(chosen_BW.any()):
                yield self.step(
                    block, masked_BW, chosen_BW, token_M, p_MV.gather(1, token_M[:, None])[:, 0]
                )
                p_MV = None
        if p_MV is not None:
            # an evaluation of which nothing came
            score_M = p_MV.amax(-1)
            yield self.step(block, masked_BW, torch.zeros_like(masked_BW), token_M, score_M)

    def _drawn(self, p_MV: Tensor, masked_BW: Tensor, stay: float) -> Tensor:
        """A token for every mask, [MASK] itself with the chance to stay; drawn for the whole block,
        as theirs are.
        """
        drawn: dict[str, Any] = {
            "generator": self.generator,
            "device": self.generator.device,
            "dtype": self.dtype,
        }
        uniform_BWV = torch.rand(*masked_BW.shape, p_MV.shape[1], **drawn).to(p_MV.device)
        noise_MV = 1e-10 - (uniform_BWV[masked_BW] + 1e-10).log()
        q_MV = p_MV * (1 - stay)
        q_MV[:, self.canvas.mask_id] = stay
        return (q_MV / noise_MV).argmax(-1)

    def _picked(self, masked_BW: Tensor) -> Tensor:
        """One mask of every row that has any."""
        chosen_BW = torch.zeros_like(masked_BW)
        for row, masked_W in enumerate(masked_BW):
            places = masked_W.nonzero()[:, 0]
            if len(places):
                place = torch.randint(
                    0, len(places), (1,), generator=self.generator, device=self.generator.device
                )
                chosen_BW[row, places[int(place)]] = True
        return chosen_BW

    def step(
        self, block: slice, masked_BW: Tensor, chosen_BW: Tensor, token_M: Tensor, score_M: Tensor
    ) -> Step:
        """Commit the chosen ones of the tokens at the masks."""
        before_BS, self.ids_BS = self.ids_BS, self.ids_BS.clone()
        chosen_BS = self.placed(chosen_BW, block)
        self.ids_BS[chosen_BS] = token_M[chosen_BW[masked_BW]]
        self.index += 1
        return Step(
            self.index - 1,
            None,
            (block.start or 0) // (block.stop - block.start),
            self.canvas,
            before_BS,
            self.ids_BS,
            self.placed(masked_BW, block),
            score_M,
            chosen_BS,
            torch.zeros_like(self.canvas.open_BS),
        )
