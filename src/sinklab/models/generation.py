"""`generate` for diffusion language models, with the signature Hugging Face users expect."""

# B batch, S canvas, P prompt
from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.sampling import Cache, Canvas, DecodingSettings, Denoiser, Rule, Schedule, Step

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class GenerateByDenoising:
    """Mixin: writes by denoising a canvas of [MASK] tokens. The class it is mixed into has a ``config`` and a
    ``denoiser``.
    """

    config: Any
    device: torch.device

    def denoiser(self, attention_mask: Tensor | None = None) -> Denoiser:
        """The model as a function from (ids, wanted positions) to logits."""
        raise NotImplementedError

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        rule: Rule | str | None = None,
        schedule: Schedule | str | None = None,
        cache: Cache | str | None = None,
        settings: DecodingSettings | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Tensor:
        """Write text by denoising.

        With ``max_new_tokens`` that many [MASK] tokens follow each prompt; without it, the masks inside ``input_ids``
        are filled (infilling).

        Args:
            input_ids: prompts (B, P), padded to the left where they differ in length.
            attention_mask: 1 for text, 0 for padding (B, P); None means no padding.
            max_new_tokens: length of the completion; None fills the masks of ``input_ids``.
            rule: which proposals to commit first, a rule or its name; ``low_confidence`` by default.
            schedule: how many of them at each evaluation, a schedule or its name; ``even`` by default.
            cache: what to remember between evaluations, a cache or its name; nothing by default.
            settings: all options in one record; those given by keyword replace its fields.
            streamer: a ``TextDiffusionStreamer`` shows drafts while they change (batch of one).
            options: fields of :class:`~sinklab.sampling.DecodingSettings`: ``steps``, ``block_length``,
                ``temperature``, ``top_p``, ``top_k``, ``alg_temp``, ``threshold``, ``factor``, ``cfg_scale``,
                ``stop_at_eos``, ``seed`` and the others.

        Returns:
            token ids (B, P + max_new_tokens), or (B, P) when infilling.

        Raises:
            ValueError: if the model has no mask token, or for settings that make no sense (see
                :func:`sinklab.sampling.denoise`).
            TypeError: for an option that does not exist.
        """
        mask_id = self.config.mask_token_id
        if mask_id is None:
            raise ValueError("this model has no mask token, so it cannot denoise; set config.mask_token_id")
        chosen = {"rule": rule, "schedule": schedule, "cache": cache}
        names = {kind: value for kind, value in chosen.items() if isinstance(value, str)}
        objects = {kind: value for kind, value in chosen.items() if value is not None and kind not in names}
        settings = _with_options(settings or DecodingSettings(), {**names, **options})
        input_ids = input_ids.to(self.device)
        canvas = self._canvas(input_ids, attention_mask, max_new_tokens)
        decoding = self.denoise(canvas, settings, **objects)
        # what a streamer shows as prompt stays on the screen: nothing of a text that is still to be filled
        return _shown(decoding, canvas, input_ids.shape[1] if max_new_tokens else 0, streamer)

    def denoise(self, canvas: Canvas, settings: DecodingSettings | None = None, **objects: Any) -> Iterator[Step]:
        """The steps of :meth:`generate` over a canvas, one model evaluation each; the last one holds the result.

        Args:
            canvas: what stands and what is to be written.
            settings: all options in one record.
            objects: ``rule``, ``schedule`` or ``cache`` objects in place of the names in ``settings``.

        Raises:
            ValueError: for settings that make no sense, or that this canvas cannot have.
        """
        config = self.config
        ends = [config.eos_token_id, getattr(config, "eot_token_id", None)]
        return (settings or DecodingSettings()).decode(
            self.denoiser(None if bool(canvas.attention_BS.all()) else canvas.attention_BS),
            canvas,
            eos_ids=[one for end in ends if end is not None for one in ([end] if isinstance(end, int) else end)],
            text_vocabulary=getattr(config, "text_vocab_size", None),
            **objects,
        )

    def _canvas(self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int | None) -> Canvas:
        config = self.config
        context = config.backbone.max_position_embeddings - config.sink_count
        real_BP = None if attention_mask is None else attention_mask.to(input_ids.device).bool()
        if max_new_tokens is None:
            return Canvas.infill(input_ids, mask_id=config.mask_token_id, attention_BS=real_BP, context=context)
        if max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, but is {max_new_tokens}; leave it out to fill masks in the prompt"
            )
        return Canvas.from_prompts(
            input_ids,
            new_tokens=max_new_tokens,
            mask_id=config.mask_token_id,
            context=context,
            attention_BP=real_BP,
        )


def _with_options(settings: DecodingSettings, options: dict[str, Any]) -> DecodingSettings:
    known = [field.name for field in fields(DecodingSettings)]
    if unknown := [name for name in options if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"options are {', '.join(known)}."
        raise TypeError(f"generate has no option {unknown[0]!r}; {hint}")
    return replace(settings, **options)


def _shown(decoding: Iterator[Step], canvas: Canvas, prompt: int, streamer: BaseStreamer | None) -> Tensor:
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
