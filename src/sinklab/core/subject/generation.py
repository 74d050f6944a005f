"""`generate` for diffusion language models, with the signature Hugging Face users expect."""

# B batch, S canvas, P prompt
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.core.errors import near
from sinklab.core.subject.canvas import Canvas, token_rows
from sinklab.core.subject.denoisers import Cache, DenoisingModel
from sinklab.core.subject.loop import Step
from sinklab.core.subject.rules import UnmaskingRule
from sinklab.core.subject.schedules import Schedule
from sinklab.core.subject.settings import DecodingSettings

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class GenerateByDenoising(DenoisingModel):
    """Mixin: writes by denoising a canvas of [MASK] tokens."""

    config: Any
    device: torch.device

    def generate(
        self,
        input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
        attention_mask: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        max_new_tokens: int | None = None,
        rule: UnmaskingRule | str | None = None,
        schedule: Schedule | str | None = None,
        cache: Cache | str | None = None,
        settings: DecodingSettings | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Tensor:
        """Write text by denoising.

        Args:
            input_ids: prompts (B, P), padded on the left, or one (P,).
            attention_mask: 1 for text, 0 for padding (B, P); None means no padding.
            max_new_tokens: length of the completion; None fills the masks inside ``input_ids``.
            rule: which proposals to commit first, by default ``low_confidence``.
            schedule: how many at each evaluation, by default ``even``.
            cache: memory between evaluations, by default one that changes no result.
            settings: all options in one record; keywords replace its fields.
            streamer: a ``TextDiffusionStreamer`` shows drafts (batch of one).
            options: other fields of `DecodingSettings`, such as ``steps`` or ``seed``.

        Returns:
            token ids (B, P + max_new_tokens), or (B, P) when infilling; a masked language model
                ends them with its [SEP].

        Raises:
            ValueError: for a model without mask token, unknown ids and wrong settings.
            TypeError: for an option that does not exist.
        """
        mask_id = self.config.mask_token_id
        if mask_id is None:
            raise ValueError(
                "this model has no mask token, so it cannot denoise; set config.mask_token_id"
            )
        settings = _with_options(settings or DecodingSettings(), options)
        # saves a sixth of the loop's own time; the copy is an ordinary tensor again
        with torch.inference_mode():
            ids_BP = token_rows("input_ids", input_ids).to(self.device)
            real_BP = None
            if attention_mask is not None:
                real_BP = token_rows("attention_mask", attention_mask)
            limits: dict[str, Any] = {"mask_id": mask_id, "context": self.config.text_positions}
            start = 0
            if max_new_tokens is None:
                canvas = Canvas.infill(ids_BP, attention_BS=real_BP, **limits)
            else:
                canvas = Canvas.from_prompts(
                    ids_BP,
                    new_tokens=max_new_tokens,
                    attention_BP=real_BP,
                    multiple=self.config.block_columns,
                    closing=self.config.closing_of(_first_text(ids_BP, real_BP)),
                    **limits,
                )
                start = int(canvas.open_BS[0].byte().argmax())
            decoding = self.denoise(canvas, settings, rule=rule, schedule=schedule, cache=cache)
            written_BS = _shown(decoding, canvas, start, streamer)
        return written_BS[:, max(start - ids_BP.shape[-1], 0) :].clone()

    def denoise(
        self,
        canvas: Canvas,
        settings: DecodingSettings | None = None,
        *,
        rule: UnmaskingRule | str | None = None,
        schedule: Schedule | str | None = None,
        cache: Cache | str | None = None,
    ) -> Iterator[Step]:
        """The steps of :meth:`generate` over a canvas, one evaluation each; the last one holds the
        result. ``rule``, ``schedule`` and ``cache`` replace those of ``settings``.

        Raises ValueError for ids outside the vocabulary, and for wrong settings.
        """
        config = self.config
        ids_BS = canvas.ids_BS
        wrong_BS = (ids_BS < 0) | (ids_BS >= config.vocab_size)
        if bool(wrong_BS.any()):
            row, position = wrong_BS.nonzero()[0].tolist()
            raise ValueError(
                f"token ids must lie in the vocabulary, 0 to {config.vocab_size - 1}, but row "
                f"{row} position {position} holds {int(ids_BS[row, position])}; check the "
                "tokenizer (padding needs an id too; -100 is for labels alone)."
            )
        return (settings or DecodingSettings()).decode(
            self.denoiser(canvas.attention_mask),
            canvas,
            rule=rule,
            schedule=schedule,
            cache=cache,
            **config.decoding,
        )


_INSTEAD = {
    "max_length": "give max_new_tokens, the length of the completion alone.",
    "do_sample": "give a temperature: above 0 tokens are drawn, at 0 (the default) the most "
    "probable one is taken.",
    "num_beams": "denoising has no beam search; more steps, or another rule or schedule, trade "
    "time for quality.",
    "num_return_sequences": "repeat the rows of input_ids.",
    "generation_config": "give settings=DecodingSettings(…), or its fields by keyword.",
    "eos_token_id": "give stop_ids, or stop_at_eos=True for the model's own.",
    "use_cache": "give the name of a cache; without it everything is computed afresh.",
}
"""Advice for options of transformers' `generate` that mean nothing here."""


def _with_options(settings: DecodingSettings, options: dict[str, Any]) -> DecodingSettings:
    known = [field.name for field in fields(DecodingSettings)]
    for name in options.keys() - known:
        hint = _INSTEAD.get(name) or near(name, known) or f"options are {', '.join(known)}."
        raise TypeError(f"generate has no option {name!r}; {hint}")
    return replace(settings, **options)


def _first_text(ids_BP: Tensor, real_BP: Tensor | None) -> list[int]:
    """The ids of the first row without its padding."""
    ids = ids_BP[:1].flatten().tolist()
    if real_BP is None:
        return ids
    return [*compress(ids, real_BP[:1].flatten().tolist())]


def _shown(
    decoding: Iterator[Step], canvas: Canvas, prompt: int, streamer: BaseStreamer | None
) -> Tensor:
    """The ids of the last step; a streamer sees the prompt, every draft and the text."""
    if streamer is not None:
        streamer.put(canvas.ids_BS[:, :prompt].cpu())
    ids_BS = canvas.ids_BS
    for step in decoding:
        ids_BS = step.ids_BS
        if streamer is not None and hasattr(streamer, "put_draft"):
            streamer.put_draft(ids_BS[:, prompt:])
    if streamer is not None:
        streamer.put(ids_BS[0, prompt:].cpu())
        streamer.end()
    return ids_BS
