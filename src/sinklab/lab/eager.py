"""Eager attention of transformers: the one function that every model brings itself.

The core knows SDPA. A class under the name of another attention function says what a trace reads of
its calls and how an edited call is made; a function that no class is registered for is refused.
"""

# H query heads, K key heads, Q queries, S keys
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.compat import stated
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.keys import dense_mask
from sinklab.core.registry import attention_functions

# what changes the attention of keys in a way that no mask can express
_BESIDE = ("softcap", "s_aux", "position_bias", "sinks")


@attention_functions.register("eager")
class Eager:
    """`eager_attention_forward` of a model's own source."""

    @staticmethod
    @cache
    def function_of(kind: type[nn.Module]) -> Callable[..., Any] | None:
        """The function that the source of these modules calls eager attention."""
        sources = (sys.modules[base.__module__] for base in kind.__mro__)
        return next(filter(None, (stated(one, "eager_attention_forward") for one in sources)), None)

    @staticmethod
    def read(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> dict[str, Any]:
        """The arguments of a call, by the names of `scaled_dot_product_attention`.

        Raises ValueError for a cap on scores, a bias beside the mask, and learned sink logits.
        """
        # some functions read sink logits from the module itself
        given = {"sinks": stated(module, "sinks"), **options}
        for name in _BESIDE:
            if given.get(name) is not None:
                raise ValueError(
                    f"{type(module).__name__} gives its attention function (eager) {name!r}, which "
                    "changes what keys get in a way that traces do not read: there is no recording "
                    "of this model"
                )
        if mask is not None:
            _check_mask(module)
            # a static cache has room behind the keys
            mask = mask[..., : k.shape[2]]
        more = {"scale": options.get("scaling"), "dropout_p": options.get("dropout", 0.0)}
        return {"query": q, "key": k, "value": v, "attn_mask": mask, **more}

    @staticmethod
    def write(
        call: Call,
        edited: Call,
        module: nn.Module,
        *given: Any,
        **options: Any,
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of an edited call: module, queries, keys, values and mask, and options by
        name.
        """
        q, k, v, mask = edited.q_BHQD, edited.k_BKSD, edited.v_BKSD, given[3]
        if edited.mask is not call.mask or edited.is_causal != call.is_causal:
            _check_mask(module)
            mask = dense_mask(edited)
            if mask.dtype == torch.bool:
                hidden = torch.zeros_like(mask, dtype=q.dtype)
                mask = hidden.masked_fill(~mask, torch.finfo(q.dtype).min)
        maker: Any = module
        if k.shape[1] != call.k_BKSD.shape[1]:
            maker = _Ungrouped(module)
        return (maker, q, k, v, mask), options | {"scaling": edited.scale}


def _check_mask(module: nn.Module) -> None:
    """Raises ValueError if the eager attention of this module never looks at its mask."""
    kind: Any = type(module)
    function = Eager.function_of(kind)
    if function is not None and inspect.getsource(function).count("attention_mask") == 1:
        raise ValueError(
            f"the eager attention of {type(module).__name__} ignores its mask, so that keys cannot "
            'be blocked: call model.set_attn_implementation("sdpa")'
        )


class _Ungrouped:
    """A module to an attention function that repeats keys by groups of its heads: there is one key
    head a head.
    """

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
