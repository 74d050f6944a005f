"""From the arguments of scaled_dot_product_attention to a `Call`."""

# B batch, H query heads, Q queries, S keys, D head dim
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from sinklab.core.attention.context import running_canvas
from sinklab.core.attention.visibility import Visibility
from sinklab.core.compat import config_value, stated
from sinklab.core.instrument.call import Call

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def read_call(
    layer: str,
    module: nn.Module,
    given: dict[str, Any],
    known: dict[tuple, Any],
    tap: Any = None,
) -> Call:
    """The call that a module makes with these arguments, by name; `known` keeps a forward's
    findings about shared masks. Raises ValueError for axes that are not (batch, [head,] position,
    dim).
    """
    query, key, value = given["query"], given["key"], given["value"]
    mask = given.get("attn_mask")
    output_shape = query.shape[:-1]
    if query.dim() == 3 and key.dim() == 3:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
    elif query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"{layer or 'the model'} calls scaled_dot_product_attention with query "
            f"{tuple(query.shape)}: traces read (batch, head, position, dim) or (batch, "
            "position, dim); reshape before the call"
        )
    elif _is_folded(query, key, module):
        query = query.flatten(1, 2).unsqueeze(2)
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask.flatten(1, 2).unsqueeze(2)
    is_causal = bool(given.get("is_causal", False))
    # by the mask object that all layers share, not by a view of it
    shape = (query.shape[0], query.shape[2], key.shape[2])
    visibility = _shared(known, Visibility(mask, shape, is_causal, None, query.device))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    return Call(
        layer=layer,
        q_BHQD=query,
        k_BKSD=key,
        v_BKSD=value,
        mask=mask,
        is_causal=is_causal,
        scale=given.get("scale"),
        dropout_p=given.get("dropout_p", 0.0),
        visibility=visibility,
        output_shape=output_shape,
        tap=tap,
    )


def _shared(known: dict[tuple, Any], found: Visibility) -> Visibility:
    """The visibility of this mask, shape and causality, which layers share."""
    running = running_canvas()
    batch, queries, keys = found.shape
    key = (id(found.mask), id(running), *found.shape, found.is_causal, found.device)
    if key not in known:
        # the canvas may be announced to another model
        if (
            running is not None
            and len(running.ids_BS) == batch
            and running.ids_BS.shape[1] <= keys
            and len(running.columns_Q) == queries
        ):
            found = replace(found, running=running)
        # kept beside it, so that its id stays its own
        known[key] = running, found
    return known[key][1]


def _is_folded(query: Tensor, key: Tensor, module: nn.Module) -> bool:
    """Whether the query axis holds the heads of a key head, as transformers decodes a token."""
    groups = stated(module, "num_key_value_groups", 1)
    folded = groups > 1 and query.shape[1] == key.shape[1] and query.shape[2] == groups
    return folded and config_value(module, "num_attention_heads") == query.shape[1] * groups
