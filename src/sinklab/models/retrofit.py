"""Training a part of a model: its sink alone, or adapters; the backbone keeps every bit."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from sinklab.models.config import SINK_NAMES
from sinklab.models.gate import Gate

PARTS = ("all", "sink", "lora")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of an attention that LoRA adapts."""


def trainable_parameters(model: nn.Module, train_only: str = "all") -> list[str]:
    """Names of the parameters that this choice trains.

    Args:
        model: a :class:`~sinklab.models.DiffusionLM`, or a causal model for ``all`` and ``lora``.
        train_only: ``all``; ``sink``, the sink's tensors; ``lora``, the adapters that :func:`freeze` puts in, and the
            sink's tensors.

    Raises:
        ValueError: for another word, or ``sink`` for a model that has none.
    """
    if train_only not in PARTS:
        near = difflib.get_close_matches(str(train_only), PARTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"train_only must be one of {', '.join(PARTS)}, but is {train_only!r}{hint}")
    names = [name for name, _ in model.named_parameters()]
    if train_only == "all":
        return names
    chosen = [name for name in names if name in SINK_NAMES or (train_only == "lora" and ".lora_" in name)]
    if train_only == "sink" and not chosen:
        raise ValueError(
            "train_only='sink' needs a model with a sink, but this one has none; give it one with sink_kind='token' "
            "or 'kv' and sink_count=1"
        )
    return chosen


def freeze(model: Any, train_only: str, lora_rank: int = 8) -> list[str]:
    """Leave only a part of the model trainable; for ``lora`` put adapters beside the attention's projections.

    Adapters start as nothing (Hu et al. 2021, §4.1): the model's outputs stay as they are. Their random half is drawn
    from torch's global generator. :func:`merge_lora` makes a plain model of it again, to be saved.

    Args:
        model: as for :func:`trainable_parameters`; changed in place.
        train_only: ``all``, ``sink`` or ``lora``.
        lora_rank: rank of the adapters; they are scaled by 2.

    Returns:
        the names of the trained parameters.

    Raises:
        ValueError: as :func:`trainable_parameters`, for a rank below 1, where ``peft`` is not installed, and for a
            model that has adapters already.
    """
    trainable_parameters(model, train_only if train_only != "lora" else "all")
    if train_only == "lora":
        _add_adapters(model, lora_rank)
    trained = trainable_parameters(model, train_only)
    chosen = set(trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return trained


def _add_adapters(model: Any, rank: int) -> None:
    if type(rank) is not int or rank < 1:
        raise ValueError(f"lora_rank must be a whole number of at least 1, but is {rank!r}")
    if _adapters(model):
        raise ValueError("this model has adapters already; merge them first, with merge_lora(model)")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("train_only='lora' needs peft, which is not installed; run pip install peft") from error
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(PROJECTIONS)), model.model
    )
    for adapter in _adapters(model).values():
        _move_gate(adapter.get_base_layer(), adapter)


def merge_lora(model: Any) -> None:
    """Add the adapters to the weights they stand beside and take them out, in place; every parameter is trainable
    again. A model without adapters stays as it is.
    """
    for name, adapter in _adapters(model).items():
        adapter.merge()
        base = adapter.get_base_layer()
        _move_gate(adapter, base)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, base)
    # left by peft, which would warn of it at the next adapters
    vars(model.model).pop("peft_config", None)
    model.requires_grad_(True)


def _adapters(model: nn.Module) -> dict[str, Any]:
    """Adapted layers by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _move_gate(source: nn.Module, target: nn.Module) -> None:
    """A gate multiplies what enters the output projection: the adapter beside it must see the same."""
    for key, hook in list(source._forward_pre_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), Gate):
            del source._forward_pre_hooks[key]
            target.register_forward_pre_hook(hook)
