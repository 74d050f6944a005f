"""Writing without locked tokens: a canvas of uniform noise, renoised at every step
(DiffusionGemma).

    for step in renoise(lm.model, ids_BP): …

An encoder reads the finished text, causally, into a cache; the decoder denoises a canvas of a fixed
length on top of it. There is no [MASK]: a place holds noise, unless its draw was accepted at the
step before. A «masked query» is a place that holds noise, a committed one holds an accepted draw or
a token of a finished canvas. Keys are those of all columns, the prompt's first, in
every layer: a sliding window is a mask here, while transformers' own cache drops keys, so that
column k is key k.
"""

# B batch rows, P tokens that stand already, N new ones of them, L places of a canvas, S columns = P
# + L, V vocabulary
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from sinklab.core.attention.context import decoding, running, unobserved
from sinklab.core.errors import Checked, check_tensor, limited
from sinklab.core.sinks import COMMITTED, MASKED, PROMPT
from sinklab.core.subject.loop import Step

ANNOUNCED = SimpleNamespace(open_BS=None, mask_id=None, attention_BS=None)
"""Canvas for `trace`, for statistics by state: the states of positions are announced with every
step.
"""


@dataclass(frozen=True)
class Renoising(Checked):
    """How canvases are denoised: fields and defaults as in transformers' generation config of
    DiffusionGemma.

    Raises ValueError that names the field.
    """

    max_new_tokens: int = limited(256, at_least=1)
    """Tokens to write at least, in whole canvases."""
    max_denoising_steps: int = limited(48, at_least=1)
    """Evaluations of a canvas."""
    entropy_bound: float = limited(0.1, at_least=0)
    """Places are accepted by rising entropy, as long as those before them have this much together,
    nats.
    """
    t_min: float = limited(0.4, at_least=0)
    """The temperature falls linearly, from t_max at the first step to a step short of t_min at the
    last.
    """
    t_max: float = limited(0.8, above=0)
    stability_threshold: int = limited(1, at_least=0)
    """A canvas is done when the likeliest tokens were the same in so many steps before, and"""
    confidence_threshold: float = limited(0.005, above=0)
    """the mean entropy of its places is below this, nats."""
    eos_token_id: tuple[int, ...] = ()
    """A row ends with the canvas that holds one of these; the tokens behind it become padding."""
    pad_token_id: int | None = None
    """None keeps the tokens behind an end."""
    seed: int = 0
    """Seed of the random numbers, which are drawn as transformers does and in its order."""

    @classmethod
    def of(cls, model: Any, **settings: Any) -> Renoising:
        """Settings of the checkpoint's generation config, with these over them."""
        config = model.generation_config
        said = {one.name: getattr(config, one.name, None) for one in fields(cls)}
        said["entropy_bound"] = getattr(
            getattr(config, "sampler_config", None), "entropy_bound", None
        )
        return cls(**{name: value for name, value in said.items() if value is not None} | settings)


@dataclass(frozen=True, eq=False)
class RenoisedStep(Step):
    """One evaluation of the decoder.

    `before_BS`: prompt, finished canvases and this canvas as the decoder saw it; `ids_BS`: the
    canvas after it, and at its last step the text; `total`: None, since canvases end early.
    `canvas`: None, since it is not written by filling masks; `masked_BS`: the places that held
    noise; `committed_BS`: those with an accepted draw, for the next step, which may renoise them;
    `confidence_BS`: minus the entropy of the places of the canvas, nats.
    """

    noisy_BL: Tensor = field(kw_only=True, repr=False)
    """bool, the places of the canvas that held noise."""
    best_BL: Tensor = field(kw_only=True, repr=False)
    """The likeliest tokens, int64: those of the last step are written."""
    after_BL: Tensor = field(kw_only=True, repr=False)
    """The canvas after it, int64: draws, and fresh noise."""
    done_B: Tensor = field(kw_only=True, repr=False)
    """bool, rows with a canvas that is done with this step or before; it stays as it is."""

    @cached_property
    def masked_BS(self) -> Tensor:
        """bool, the places that held noise."""
        return pad(self.noisy_BL, (self.ids_BS.shape[1] - self.noisy_BL.shape[1], 0), value=False)


class CanvasDenoiser:
    """The finished text, in a cache; called with a canvas, it gives the decoder's logits.

    A trace or an edit of the model sees the decoder. One of ``model.model.encoder`` sees the
    encoder's passes.
    """

    def __init__(self, model: Any, like_BP: Tensor) -> None:
        """`like_BP`: ids of as many rows."""
        self.model, self.cache = model, DynamicCache()
        self.ids_BP = like_BP[:, :0]
        self.state_BP = self.ids_BP.to(torch.int8)

    def read(self, ids_BN: Tensor, state_BN: Tensor) -> None:
        """Let the encoder append these ids; their states are prompt, committed, and −1 for
        padding.
        """
        past, encoder = self.ids_BP.shape[1], self.model.model.encoder
        self.ids_BP = torch.cat([self.ids_BP, ids_BN], 1)
        self.state_BP = torch.cat([self.state_BP, state_BN.to(torch.int8)], 1)
        columns_1N = torch.arange(past, self.ids_BP.shape[1], device=ids_BN.device)[None]
        real_BP = self.state_BP >= 0
        given = {
            "attention_mask": None if bool(real_BP.all()) else real_BP.long(),
            "position_ids": columns_1N,
        }
        with (
            unobserved(but_of=encoder),
            running(self.ids_BP, slice(past, self.ids_BP.shape[1]), self.state_BP),
        ):
            encoder(input_ids=ids_BN, past_key_values=self.cache, **given)

    def __call__(
        self, ids_BL: Tensor, noisy_BL: Tensor, before_BLV: Tensor | None = None
    ) -> Tensor:
        """Logits (B, L, V), float32, softcapped; `before_BLV`: those of the step before, divided by
        its temperature.
        """
        ids_BS, past = torch.cat([self.ids_BP, ids_BL], 1), self.ids_BP.shape[1]
        columns_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        state_BS = torch.cat(
            [self.state_BP, torch.where(noisy_BL, MASKED, COMMITTED).to(torch.int8)], 1
        )
        window = self.model.config.get_text_config().sliding_window
        real_BS, near_S = state_BS >= 0, columns_S >= past - (window - 1)
        masks = {"full_attention": real_BS, "sliding_attention": real_BS & near_S}
        with running(ids_BS, slice(past, ids_BS.shape[1]), state_BS):
            return self.model(
                decoder_input_ids=ids_BL,
                past_key_values=self.cache,
                self_conditioning_logits=before_BLV,
                decoder_attention_mask={
                    kind: _mask(seen_BS, ids_BL.shape[1]) for kind, seen_BS in masks.items()
                },
                decoder_position_ids=columns_S[None, past:],
            ).logits


def _mask(seen_BS: Tensor, queries: int) -> Tensor | None:
    """Visibility for every query, which all see the same keys, bool (B, 1, L, S); None if they see
    all.
    """
    return None if bool(seen_BS.all()) else seen_BS[:, None, None].expand(-1, 1, queries, -1)


def entropy(logits_BLV: Tensor) -> Tensor:
    """Entropy of the distribution at each place, nats, (B, L)."""
    log_BLV = logits_BLV.log_softmax(-1)
    return -(log_BLV.exp() * log_BLV).sum(-1)


def accepted(entropy_BL: Tensor, bound: float) -> Tensor:
    """The places with accepted draws, bool (B, L): by rising entropy, as long as those before have
    at most `bound` together (arXiv 2505.24857); at least one.
    """
    rising_BL, order_BL = entropy_BL.sort(-1)
    return torch.zeros_like(order_BL, dtype=torch.bool).scatter(
        -1, order_BL, rising_BL.cumsum(-1) - rising_BL <= bound
    )


def renoise(
    model: Any,
    ids_BP: Tensor,
    settings: Renoising | None = None,
    attention_BP: Tensor | None = None,
) -> Iterator[RenoisedStep]:
    """Write canvas after canvas behind a prompt, yielding each step; the last one's `ids_BS` is
    prompt and text.

    At each step the decoder sees the canvas and, as a mixture of embeddings, its output at the step
    before. Draws from its tempered distribution are accepted if the entropies allow it; every other
    place becomes fresh noise, those accepted before too. The text is the likeliest token of each
    place at the canvas's last step.

    Args:
        model: transformers' ``DiffusionGemmaForBlockDiffusion``.
        ids_BP: int64 token ids of the prompts.
        settings: those of the checkpoint's generation config when left out.
        attention_BP: bool, False at padding on the left.

    Raises ValueError here for ids of another shape, and for those of images.
    Source: transformers 5.23, ``models/diffusion_gemma/generation_diffusion_gemma.py``.
    """
    check_tensor("the prompts to write behind", ids_BP, (None, None), "int64", "one row a prompt")
    image = model.config.image_token_id
    if bool((ids_BP == image).any()):
        raise ValueError(
            f"a prompt must be text, but holds {image}, which stands for an image (vision); leave "
            "it out"
        )
    ids_BP = ids_BP.to(model.device)
    real_BP = torch.ones_like(ids_BP) if attention_BP is None else attention_BP
    state_BP = torch.where(real_BP.to(ids_BP.device, torch.bool), PROMPT, -1)
    return _steps(CanvasDenoiser(model, ids_BP), ids_BP, state_BP, settings or Renoising.of(model))


def _steps(
    denoiser: CanvasDenoiser, ids_BN: Tensor, state_BN: Tensor, settings: Renoising
) -> Iterator[RenoisedStep]:
    # older versions of transformers do not have it
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        StableAndConfidentStoppingCriteria,
    )

    model, steps = denoiser.model, settings.max_denoising_steps
    generator = Generator(ids_BN.device).manual_seed(settings.seed)
    rows, shape = (
        model.config.get_text_config().vocab_size,
        (len(ids_BN), model.config.canvas_length),
    )
    noise = partial(torch.randint, rows, shape, generator=generator, device=generator.device)
    over_B, index = torch.zeros_like(ids_BN[:, 0], dtype=torch.bool), 0
    for number in range(math.ceil(settings.max_new_tokens / shape[1])):
        with torch.no_grad(), decoding(denoiser):
            denoiser.read(ids_BN, state_BN)
        past = denoiser.ids_BP.shape[1]
        ids_BL, known_BLV = noise(), None
        noisy_BL = torch.ones_like(ids_BL, dtype=torch.bool)
        done_B1 = torch.zeros_like(noisy_BL[:, :1])
        stop: Any = StableAndConfidentStoppingCriteria(
            settings.stability_threshold, settings.confidence_threshold
        )
        for left in range(steps, 0, -1):
            with torch.no_grad(), decoding(denoiser):
                temperature = settings.t_min + (settings.t_max - settings.t_min) * left / steps
                logits_BLV = denoiser(ids_BL, noisy_BL, known_BLV) / temperature
                drawn_BL = torch.multinomial(
                    logits_BLV.softmax(-1).flatten(0, 1), 1, generator=generator
                ).view(shape)
                noise_BL = noise()
                if known_BLV is not None:
                    # a row that was done stays as it is
                    logits_BLV = torch.where(done_B1[..., None], known_BLV, logits_BLV)
                entropy_BL, best_BL = entropy(logits_BLV), logits_BLV.argmax(-1)
                accepted_BL = accepted(entropy_BL, settings.entropy_bound) & ~done_B1
                after_BL = torch.where(
                    done_B1, ids_BL, torch.where(accepted_BL, drawn_BL, noise_BL)
                )
                done_B = done_B1[:, 0] | stop(best_BL, logits_BLV)
            is_last = left == 1 or bool(done_B.all())
            shown_BL, filled_BL = after_BL, torch.zeros_like(noisy_BL)
            if is_last:
                shown_BL, filled_BL, over_B = _ended(best_BL, over_B, settings)
            before_BS, ids_BS = (
                torch.cat([denoiser.ids_BP, one_BL], 1) for one_BL in (ids_BL, shown_BL)
            )
            in_canvas_BS, accepted_BS, filled_BS = (
                pad(one_BL, (past, 0), value=False)
                for one_BL in (torch.ones_like(noisy_BL), accepted_BL, filled_BL)
            )
            yield RenoisedStep(
                index,
                None,
                number,
                None,  # type: ignore[arg-type]
                before_BS,
                ids_BS,
                in_canvas_BS,
                -entropy_BL.flatten(),
                accepted_BS,
                filled_BS,
                noisy_BL=noisy_BL,
                best_BL=best_BL,
                after_BL=after_BL,
                done_B=done_B,
            )
            index += 1
            if is_last:
                break
            noisy_BL = torch.where(done_B1, noisy_BL, ~accepted_BL)
            ids_BL, done_B1 = after_BL, done_B[:, None]
            # as the embedding holds numbers, which is how transformers hands them on
            known_BLV = logits_BLV.to(model.dtype)
        ids_BN, state_BN = shown_BL, torch.full_like(shown_BL, COMMITTED)
        if bool(over_B.all()):
            return


def _ended(best_BL: Tensor, over_B: Tensor, settings: Renoising) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a finished canvas, its padding, and the rows that are over with it."""
    is_end_BL = torch.isin(
        best_BL, torch.tensor(settings.eos_token_id, dtype=torch.int64, device=best_BL.device)
    )
    behind_BL = (is_end_BL.cumsum(-1) - is_end_BL.long() > 0) | over_B[:, None]
    behind_BL &= settings.pad_token_id is not None
    return (
        best_BL.masked_fill(behind_BL, settings.pad_token_id or 0),
        behind_BL,
        over_B | is_end_BL.any(-1),
    )
