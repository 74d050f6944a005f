"""Sinks that stand in the sequence, in front of the text, and still see themselves alone, without a mask.

The text attends to everything, as in the prefix form; what attention gives the sinks is thrown away, and each gets its
own value instead: a softmax over one key is 1. This form pays for the sinks in every row of the batch, but a layer runs
once a step: no second set of small kernels, of gradients as large as the weights, or of gathered shards.
"""

# B batch, S text, N sinks, K = N + S, G key/value heads, D head dim, A attention width (query heads × D), E hidden size
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention import is_watched

FORMS = ("auto", "prefix", "sequence")


@dataclass(frozen=True)
class InSequence:
    """Stands where a sink prefix stands, and says that the first ``count`` tokens are the sinks themselves."""

    count: int
    zero_values: bool


class Isolation:
    """One attention layer's part in it; its bound methods are hooks, so that a copied model uses the copy's own."""

    def __init__(self) -> None:
        self.sinks: InSequence | None = None
        self.own_BGND: Tensor | None = None
        """Values that the output projection is owed; None when none are."""

    def __getstate__(self) -> dict[str, Any]:
        # what an interrupted call left behind belongs to its graph and cannot be copied
        return {"sinks": None, "own_BGND": None}

    def enter(self, attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before attention: put the prefix, or this, where a key/value cache stands."""
        sinks = kwargs.pop("sink_prefix", None)
        self.own_BGND = None
        if isinstance(sinks, InSequence):
            self.sinks = sinks
            kwargs["past_key_values"] = self
        elif sinks is not None:
            kwargs["past_key_values"] = sinks
        return args, kwargs

    def update(self, k_BGKD: Tensor, v_BGKD: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep the values of the sinks, zeroed where asked (the method that an attention calls on its cache)."""
        assert self.sinks is not None
        own_BGND, text_BGSD = v_BGKD.split([self.sinks.count, v_BGKD.shape[2] - self.sinks.count], dim=2)
        if self.sinks.zero_values:
            own_BGND = torch.zeros_like(own_BGND)
            v_BGKD = torch.cat([own_BGND, text_BGSD], dim=2)
        self.own_BGND = own_BGND
        return k_BGKD, v_BGKD

    def overwrite(self, projection: nn.Module, args: tuple) -> tuple | None:
        """Before the output projection: each sink gets its own value, once; when none is owed, all stays as it is."""
        if self.own_BGND is None:
            return None
        (x_BKA, *rest), own_BGND, self.own_BGND = args, self.own_BGND, None
        queries_a_key = x_BKA.shape[-1] // (own_BGND.shape[1] * own_BGND.shape[-1])
        own_BNA = own_BGND.repeat_interleave(queries_a_key, dim=1).transpose(1, 2).flatten(2)
        return (torch.cat([own_BNA.to(x_BKA.dtype), x_BKA[:, own_BNA.shape[1] :]], dim=1), *rest)


def in_front(sinks: Tensor, text: Tensor) -> Tensor:
    """Sinks (N, E) or (1 or B, N) in front of the text (B, S, E) or (1 or B, S), along the sequence."""
    if sinks.ndim < text.ndim:
        return torch.cat([sinks.to(text.dtype).expand(text.shape[0], -1, -1), text], dim=1)
    rows = max(len(sinks), len(text))
    return torch.cat([sinks.expand(rows, -1), text.expand(rows, -1)], dim=1)


def attach(decoder: Any) -> None:
    """Let every attention layer of a transformers decoder take a ``sink_prefix`` keyword.

    It travels as a plain keyword and not as ``past_key_values`` because transformers drops caches under gradient
    checkpointing, which would make the sink vanish with no more than a warning.
    """
    for attention in (layer.self_attn for layer in decoder.layers):
        isolation = Isolation()
        attention.register_forward_pre_hook(isolation.enter, with_kwargs=True)
        attention.o_proj.register_forward_pre_hook(isolation.overwrite)


def takes_part(model: Any) -> bool:
    """Whether the sinks of a :class:`~sinklab.models.DiffusionLM` run with the text in a call made now: where its
    ``sink_form`` says so, gradients are wanted, and the model is not watched: a trace would see them as text.

    Raises:
        ValueError: for an unknown ``sink_form``.
    """
    if model.sink_form not in FORMS:
        raise ValueError(f"sink_form must be one of {', '.join(FORMS)}, but is {model.sink_form!r}")
    wanted = model.sink_form == "sequence" or (model.sink_form == "auto" and model.device.type == "cuda")
    return (
        wanted
        and model.config.sink_kind in ("token", "zero")
        and model.training
        and torch.is_grad_enabled()
        and not is_watched(model)
        and _is_attached(model.model)
    )


def _is_attached(decoder: Any) -> bool:
    """Whether every output projection still has its hook; one that adapters were wrapped around has not."""
    return all(
        any(isinstance(getattr(hook, "__self__", None), Isolation) for hook in projection._forward_pre_hooks.values())
        for projection in (layer.self_attn.o_proj for layer in decoder.layers)
    )
