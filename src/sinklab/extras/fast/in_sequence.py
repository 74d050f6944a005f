"""Sink tokens that run with the text in training: the fast form of the prefix, which spares a GPU
many small kernels.

The embedding of a sink changes at every step of training, so its keys and values cannot be kept.
Here the sinks stand in the sequence, in front of the text, and the output of each is overwritten by
its own value: the result of attention to itself alone. The slow twin is
`prefix`.
"""

# B batch, S text, N sinks, K = N + S, G key/value heads, D head dim, A attention width (query heads
# × D), E hidden size
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinklab.core.attention.context import is_watched
from sinklab.core.compat import attention_of
from sinklab.core.errors import one_of
from sinklab.core.registry import fast_sinks
from sinklab.core.subject import masks
from sinklab.core.subject.prefix import positions
from sinklab.extras.fast.compat import forward_hooks

FORMS = ("auto", "prefix", "sequence")


class Isolation:
    """Hooks of one attention layer that keep the sinks to themselves; bound methods, so that a
    copied model uses the copy's own.
    """

    def __init__(self) -> None:
        self.sinks: InSequence | None = None
        self.own_BGND: Tensor | None = None
        """Values of the sinks, for the output projection that comes next; None when it has had
        them.
        """

    def __getstate__(self) -> dict[str, Any]:
        # tensors of an interrupted call belong to its graph and cannot be copied
        return {"sinks": None, "own_BGND": None}

    def enter(self, attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before attention: stand in for the sinks that were given in place of a key/value
        cache.
        """
        self.own_BGND = None
        sinks = kwargs.get("past_key_values")
        if isinstance(sinks, InSequence):
            self.sinks = sinks
            kwargs["past_key_values"] = self
        return args, kwargs

    def update(
        self, k_BGKD: Tensor, v_BGKD: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Keep the values of the sinks (the method that an attention calls on its cache)."""
        assert self.sinks is not None
        own_BGND, text_BGSD = v_BGKD.split(
            [self.sinks.count, v_BGKD.shape[2] - self.sinks.count], dim=2
        )
        self.own_BGND = self.sinks.values(own_BGND)
        if self.own_BGND is not own_BGND:
            v_BGKD = torch.cat([self.own_BGND, text_BGSD], dim=2)
        return k_BGKD, v_BGKD

    def overwrite(self, projection: nn.Module, args: tuple) -> tuple | None:
        """Before the output projection: the output of each sink becomes its own value, once."""
        if self.own_BGND is None:
            return None
        (x_BKA, *rest), own_BGND, self.own_BGND = args, self.own_BGND, None
        queries_a_key = x_BKA.shape[-1] // (own_BGND.shape[1] * own_BGND.shape[-1])
        own_BNA = own_BGND.repeat_interleave(queries_a_key, dim=1).transpose(1, 2).flatten(2)
        return (torch.cat([own_BNA.to(x_BKA.dtype), x_BKA[:, own_BNA.shape[1] :]], dim=1), *rest)


@fast_sinks.register("in_sequence")
@dataclass(frozen=True)
class InSequence:
    """The form for one call; given in place of a sink prefix, it says that the first ``count``
    tokens are the sinks.
    """

    count: int
    values: Callable[[Tensor], Tensor]
    """`Sink.values` of the kind."""

    @staticmethod
    def attach(decoder: Any) -> None:
        """Put the hooks of a new model into its attention layers, behind the one that takes a
        prefix.
        """
        for attention in (layer.self_attn for layer in decoder.layers):
            isolation = Isolation()
            attention.register_forward_pre_hook(isolation.enter, with_kwargs=True)
            attention.o_proj.register_forward_pre_hook(isolation.overwrite)

    @classmethod
    def serving(cls, model: Any) -> InSequence | None:
        """This form, if the ``sink_form`` of a `DiffusionLM` says so,
        gradients are on, and the model is not watched: a trace would see the sinks as text.

        Raises:
            ValueError: for an unknown ``sink_form``.
        """
        one_of("sink_form", model.sink_form, FORMS)
        is_chosen = model.sink_form == "sequence" or (
            model.sink_form == "auto" and model.device.type == "cuda"
        )
        serves = (
            is_chosen
            and model.config.sink_positions > 0
            and model.config.block_length is None
            and model.config.attention == "full"
            and model.training
            and torch.is_grad_enabled()
            and not is_watched(model)
            and _is_attached(model.model)
        )
        return cls(model.config.sink_count, model.config.sink.values) if serves else None

    def states(
        self,
        model: Any,
        input_ids: Tensor,
        real_BS: Tensor | None,
        causal: bool,
        visible: Tensor | None,
    ) -> Tensor:
        """Final normed states (B, S, E) of the text, as :meth:`DiffusionLM.hidden_states` gives
        them.
        """
        config, length, backend = model.config, input_ids.shape[1], attention_of(model.model.config)
        sinks_NE, text_BSE = config.sink.embeddings(model), model.model.embed_tokens(input_ids)
        sink_ids = positions(
            config, length, None if real_BS is None else real_BS.sum(dim=1), sinks_NE.device
        )
        text_ids = masks.position_ids(
            real_BS, length, start=config.text_start, device=input_ids.device
        )
        rows, mask = max(len(sink_ids), len(text_ids)), None
        # transformers takes positions that start anew for a second text, which a causal pass would
        # keep apart
        if real_BS is None and causal and config.sink_side == "end":
            real_BS = torch.ones(1, length, dtype=torch.bool, device=input_ids.device)
        if real_BS is not None or visible is not None or backend == "eager":
            mask = masks.attention_mask(
                real_BS,
                length,
                sinks=self.count,
                causal=causal,
                backend=backend,
                like=text_BSE,
                visible=visible,
            )
        if mask is not None and mask.shape[2] > 1:
            # the sinks are queries too; their outputs are thrown away
            mask = F.pad(mask, (0, 0, self.count, 0), value=mask.dtype == torch.bool)
        states_BKE = model.decoder_states(
            torch.cat([sinks_NE.to(text_BSE.dtype).expand(len(text_BSE), -1, -1), text_BSE], dim=1),
            mask,
            torch.cat([sink_ids.expand(rows, -1), text_ids.expand(rows, -1)], dim=1),
            self,
            is_causal=causal,
        )
        return states_BKE[:, self.count :]


def _is_attached(decoder: Any) -> bool:
    """Whether every output projection still has its hook; one that adapters were wrapped around has
    not.
    """
    return all(
        any(
            isinstance(getattr(hook, "__self__", None), Isolation)
            for hook in forward_hooks(projection)[0].values()
        )
        for projection in (layer.self_attn.o_proj for layer in decoder.layers)
    )
