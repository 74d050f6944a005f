"""The sink token as a key/value prefix: it sees only itself, so its state in every layer does not depend on the
text.
"""

# B batch, H key/value heads, S keys of the text, N sinks, D head dim, L layers
# L layers, N sinks, G key/value heads, D head dim
# B batch, S text, N sinks, K = N + S, G key/value heads, D head dim, A attention width (query heads × D), E hidden size
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.context import is_watched, unobserved


@dataclass(frozen=True)
class SinkPrefix:
    """Keys and values of the sinks in every layer; in an attention layer it stands where a key/value cache stands.

    ``keys`` and ``values`` hold one tensor a layer, of shape (1 or B, H, N, D); rotary positions are already applied.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """Number of sinks N."""
        return self.keys[0].shape[2]

    def update(self, k_BHSD: Tensor, v_BHSD: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Put the sinks in front of this layer's keys and values (the method a transformers attention calls on its
        cache).
        """
        batch = k_BHSD.shape[0]
        sink_k = self.keys[layer_idx].to(k_BHSD.dtype).expand(batch, -1, -1, -1)
        sink_v = self.values[layer_idx].to(v_BHSD.dtype).expand(batch, -1, -1, -1)
        return torch.cat([sink_k, k_BHSD], dim=2), torch.cat([sink_v, v_BHSD], dim=2)


class _Recorder:
    """A cache that keeps what one pass of isolated sinks puts into it, with values zeroed where asked."""

    def __init__(self, zero_values: bool) -> None:
        self.zero_values = zero_values
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        v = torch.zeros_like(v) if self.zero_values else v
        self.keys.append(k)
        self.values.append(v)
        return k, v


@contextmanager
def _no_checkpointing(decoder: Any) -> Iterator[None]:
    """The sinks' own pass writes what it computes into a recorder; a replay in the backward pass must not do it
    again.
    """
    flags = [getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers]
    for layer in decoder.layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer, flag in zip(decoder.layers, flags, strict=True):
            layer.gradient_checkpointing = flag


def positions(model: Any, length: int, lengths_B: Tensor | None) -> Tensor:
    """Position of each sink, (1 or B, N), for texts of this length, or of these where rows differ."""
    start_U1 = torch.zeros(1, 1, dtype=torch.long, device=model.sink_embeddings.device)
    if model.config.sink_side == "end":
        start_U1 = start_U1 + length if lengths_B is None else lengths_B[:, None]
    return start_U1 + torch.arange(model.config.sink_count, device=start_U1.device)


def compute(decoder: PreTrainedModel, sinks_ND: Tensor, positions_UN: Tensor, *, zero_values: bool) -> SinkPrefix:
    """Run the sinks alone, each as a sequence of length 1, and keep their keys and values.

    Args:
        decoder: the backbone without its head.
        sinks_ND: embeddings of the N sinks.
        positions_UN: position of each sink, for U different rows.
        zero_values: force the value states to zero in every layer (Table 5).

    Returns:
        a prefix with U rows. Gradients flow through it.
    """
    rows, count = positions_UN.shape
    recorder = _Recorder(zero_values)
    with unobserved(), _no_checkpointing(decoder):
        # .forward: a compiled decoder would trace the recorder
        decoder.forward(
            inputs_embeds=sinks_ND.repeat(rows, 1)[:, None],
            position_ids=positions_UN.reshape(-1, 1),
            attention_mask=None,
            use_cache=False,
            sink_prefix=recorder,
            is_causal=False,
        )

    def rowwise(states: Tensor) -> Tensor:
        return states.view(rows, count, states.shape[1], states.shape[3]).transpose(1, 2)

    return SinkPrefix(tuple(map(rowwise, recorder.keys)), tuple(map(rowwise, recorder.values)))


def prefix(decoder: Any, keys_LNGD: Tensor, values_LNGD: Tensor) -> SinkPrefix:
    """The sinks as attention takes them: one row, each layer's part where the layer is. Gradients flow through it.

    Keys are not rotated, so that they mean the same at every distance.
    """
    places = [layer.input_layernorm.weight.device for layer in decoder.layers]

    def placed(states_LNGD: Tensor) -> tuple[Tensor, ...]:
        rows = (states_NGD.transpose(0, 1)[None] for states_NGD in states_LNGD.unbind())
        # the weights of an offloaded layer are on no device until it runs
        return tuple(row if at.type == "meta" else row.to(at) for row, at in zip(rows, places, strict=True))

    return SinkPrefix(placed(keys_LNGD), placed(values_LNGD))


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
