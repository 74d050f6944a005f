"""The masked-diffusion objective on `transformers.Trainer`."""

# B batch, S sequence, M masked positions, V vocabulary
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from sinklab.diffusion import corrupt, masked_token_loss, sample_times
from sinklab.models import DiffusionLM


def step_generator(seed: int, *place: int) -> torch.Generator:
    """A CPU generator for one place in a run (step, rank, …): noise does not depend on what was drawn before, so
    resuming is exact.
    """
    mixed = seed
    for part in place:
        # any odd multiplier spreads neighbouring places; the generator scrambles the rest
        mixed = (mixed * 0x9E3779B97F4A7C15 + part + 1) & (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


def diffusion_loss(
    model: DiffusionLM, ids_BS: Tensor, *, generator: torch.Generator, time_sampler: Any = "iid"
) -> Tensor:
    """Masked-token loss (nats per token, Eq. 3–4) of one batch under freshly drawn times and masks; the head runs at
    masks alone.
    """
    t_B = sample_times(ids_BS.shape[0], sampler=time_sampler, generator=generator)
    noisy_BS, masked_BS = corrupt(ids_BS.cpu(), t_B, mask_id=model_config(model).mask_token_id, generator=generator)
    noisy_BS, masked_BS = noisy_BS.to(ids_BS.device), masked_BS.to(ids_BS.device)
    logits_MV = model(noisy_BS, logits_to_keep=masked_BS).logits
    return masked_token_loss(logits_MV, ids_BS, masked_BS, t_B)


def causal_loss(model: DiffusionLM, ids_BS: Tensor) -> Tensor:
    """Next-token loss (nats per token) with each position seeing its left only: the warm start."""
    logits_BSV = model(ids_BS, causal=True).logits
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())


def model_config(model: Any) -> Any:
    """The config of a model that may be wrapped (DDP, compile)."""
    return getattr(model, "module", model).config


class DiffusionTrainer(Trainer):
    """`transformers.Trainer` whose loss is the masked-diffusion objective; everything else is the Trainer's own."""

    def __init__(self, *args: Any, noise_seed: int, time_sampler: str, causal_steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise_seed = noise_seed
        self.time_sampler = time_sampler
        self.causal_steps = causal_steps
        self._eval_batch = 0
        self._micro = (-1, 0)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one micro-batch; its noise depends on (seed, step, micro-batch, rank) and is new on every rank."""
        ids_BS = inputs["input_ids"]
        if not model.training:
            self._eval_batch += 1
            # the same noise at every evaluation, so that curves of different runs compare
            place = self._eval_batch * self.args.world_size + self.args.process_index
            loss = diffusion_loss(model, ids_BS, generator=step_generator(0, place), time_sampler="low_discrepancy")
            return (loss, {"logits": None}) if return_outputs else loss
        step = self.state.global_step
        if step < self.causal_steps:
            return causal_loss(model, ids_BS)
        before, micro = self._micro
        micro = micro + 1 if before == step else 0
        self._micro = (step, micro)
        generator = step_generator(self.noise_seed, step, micro, self.args.process_index)
        return diffusion_loss(model, ids_BS, generator=generator, time_sampler=self.time_sampler)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Held-out loss under fixed noise."""
        self._eval_batch = 0
        return super().evaluate(*args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """The loss alone; logits of a whole batch are never kept."""
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None
