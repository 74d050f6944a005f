"""`generate` for diffusion language models, with the signature Hugging Face users expect."""

# B batch, S canvas, P prompt
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.sampling import Canvas, Denoiser, Rule, denoise, guided

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
        steps: int | None = None,
        block_length: int | None = None,
        rule: Rule | str | None = None,
        temperature: float = 0.0,
        cfg_scale: float = 0.0,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
    ) -> Tensor:
        """Write text by denoising.

        With ``max_new_tokens`` that many [MASK] tokens follow each prompt; without it, the masks inside ``input_ids``
        are filled (infilling).

        Args:
            input_ids: prompts (B, P), padded to the left where they differ in length.
            attention_mask: 1 for text, 0 for padding (B, P); None means no padding.
            max_new_tokens: length of the completion; None fills the masks of ``input_ids``.
            steps: number of model evaluations; None commits one token a step.
            block_length: write block after block of this many tokens (semi-autoregressive); None is one block.
            rule: which proposals to commit first, a rule or its name; ``low_confidence`` by default.
            temperature: 0 takes the most probable token, otherwise Gumbel noise samples at this temperature.
            cfg_scale: classifier-free guidance, un + (scale + 1)·(cond − un); 0 turns it off.
            seed: seed of the noise and of random orders; None draws from the global generator.
            streamer: a ``TextDiffusionStreamer`` shows drafts while they change (batch of one).

        Returns:
            token ids (B, P + max_new_tokens), or (B, P) when infilling.

        Raises:
            ValueError: if the model has no mask token, or for settings that make no sense (see
                :func:`sinklab.sampling.denoise`).
        """
        mask_id = self.config.mask_token_id
        if mask_id is None:
            raise ValueError("this model has no mask token, so it cannot denoise; set config.mask_token_id")
        input_ids = input_ids.to(self.device)
        canvas = self._canvas(input_ids, attention_mask, max_new_tokens)
        real_BS = None if bool(canvas.attention_BS.all()) else canvas.attention_BS
        denoiser = self.denoiser(real_BS)
        if cfg_scale:
            denoiser = guided(denoiser, cfg_scale, canvas.prompt_BS, mask_id)
        drawn = int(torch.randint(2**62, ())) if seed is None else seed
        generator = torch.Generator(self.device).manual_seed(drawn)
        decoding = denoise(
            denoiser,
            canvas,
            rule=rule,
            steps=steps,
            block_length=block_length,
            temperature=temperature,
            generator=generator,
        )
        # what a streamer shows as prompt stays on the screen: nothing of a text that is still to be filled
        shown = input_ids.shape[1] if max_new_tokens else 0
        if streamer is not None:
            streamer.put(input_ids[:, :shown].cpu())
        ids_BS = canvas.ids_BS
        for step in decoding:
            ids_BS = step.ids_BS
            if streamer is not None and hasattr(streamer, "put_draft"):
                streamer.put_draft(ids_BS[:, shown:])
        if streamer is not None:
            streamer.put(ids_BS[0, shown:].cpu())
            streamer.end()
        return ids_BS

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
