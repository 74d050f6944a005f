"""What the training benchmarks share: variants, noisy batches, loops with their losses, and what a
step keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import LlamaConfig

from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.data.noise import corrupt, sample_times

# the twin is the tests' own, so that what is timed here is what is compared there
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from masked_twin import masked_form

# B batch, S sequence, V vocabulary

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink_kind": "token", "sink_count": 1},
    "zero": {"sink_kind": "zero", "sink_count": 1},
    "2-sinks": {"sink_kind": "token", "sink_count": 2},
    "4-sinks": {"sink_kind": "token", "sink_count": 4},
    "end": {"sink_kind": "token", "sink_count": 1, "sink_side": "end"},
    "gate": {"gate": "elementwise"},
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama backbone and of a micro-batch."""

    layers: int
    width: int
    heads: int
    mlp: int
    vocab: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class Batch:
    """One noisy micro-batch; labels are −100 where nothing is asked."""

    noisy_BS: Tensor
    labels_BS: Tensor
    weights_BS: Tensor
    masked_share: float


def build(shape: Shape, variant: str, device: str) -> DiffusionLM:
    """A fresh model of this variant in training mode, float32; the same seed for all of them."""
    backbone = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.length + 8,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = DiffusionLM(
            DiffusionLMConfig(backbone, mask_token_id=shape.vocab - 1, **VARIANTS[variant])
        )
    assert model.model.config._attn_implementation == "sdpa"
    return model.to(device).train()


def noisy_batch(shape: Shape, device: str) -> Batch:
    """Random ids under the noise that training draws: evenly spread times, about half of all tokens
    masked.
    """
    generator = torch.Generator().manual_seed(0)
    t_B = sample_times(shape.batch, sampler="low_discrepancy", generator=generator)
    ids_BS = torch.randint(0, shape.vocab - 1, (shape.batch, shape.length), generator=generator)
    noisy_BS, masked_BS = corrupt(ids_BS, t_B, mask_id=shape.vocab - 1, generator=generator)
    weights_BS = (1 / t_B / shape.tokens)[:, None].expand_as(ids_BS).contiguous()
    labels_BS = ids_BS.masked_fill(~masked_BS, -100)
    share = masked_BS.float().mean().item()
    return Batch(noisy_BS.to(device), labels_BS.to(device), weights_BS.to(device), share)


@contextmanager
def precision(dtype: str, device: str) -> Iterator[None]:
    """bfloat16 autocast, or nothing for float32; the default device is for the twin, which makes
    its own mask.
    """
    with torch.device(device), torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        yield


def ours(model: DiffusionLM, batch: Batch, chunk: int = 4096) -> Tensor:
    """The loss as sinklab trains: the head at masks alone, in chunks."""
    return model(
        batch.noisy_BS,
        labels=batch.labels_BS,
        label_weights=batch.weights_BS,
        head_chunk=chunk,
    ).loss


def of_logits(logits_BSV: Tensor, batch: Batch) -> Tensor:
    """The same loss from all logits, as a plain loop computes it."""
    losses_BS = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), batch.labels_BS.flatten(), reduction="none"
    )
    return losses_BS @ batch.weights_BS.flatten()


def straightforward(model: DiffusionLM, batch: Batch) -> Tensor:
    """Sinks under an (L + 1)² mask, logits of all positions."""
    return of_logits(masked_form(model, batch.noisy_BS), batch)


def step(
    model: DiffusionLM, loss: Callable[[], Tensor], dtype: str, device: str
) -> Callable[[], None]:
    """One forward and backward, without an optimizer."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with precision(dtype, device):
            value = loss()
        value.backward()

    return run


def kept_mb(model: DiffusionLM, loss: Callable[[], Tensor], dtype: str, device: str) -> float:
    """What the forward pass keeps for the backward one, weights apart, in MB: exact, whatever the
    allocator does.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), precision(dtype, device):
        # alive until the count is done: a storage that is freed gives its address away
        value = loss()
    total = sum(kept.values()) / 1e6
    del value
    return total


def ratio(timing: dict[str, dict], over: str, under: str) -> dict[str, float]:
    """How much longer ``over`` takes than ``under``, by each clock."""
    return {
        key: round(timing[over][f"{key}_s"] / timing[under][f"{key}_s"], 3)
        for key in ("min_wall", "median_wall", "min_cpu")
    }
