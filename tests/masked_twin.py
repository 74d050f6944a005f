"""The specification of the sink: the (L + N)² masked form of Eq. 6, with every sink seeing itself
alone.
"""

from contextlib import ExitStack

import torch

# B batch, L text, N sinks, K = N + L, G key/value heads, D head dim, A = G × D


def masked_form(model, ids_BL, mask_BL=None):
    """Logits (B, L, V) with sinks and text in one sequence under an explicit mask."""
    config, count = model.config, model.config.sink_count
    batch, length = ids_BL.shape
    real_BL = torch.ones_like(ids_BL) if mask_BL is None else mask_BL
    embeds = model.model.embed_tokens(ids_BL)
    if count:
        sinks_ND = config.sink.embeddings(model)
        embeds = torch.cat([sinks_ND.expand(batch, -1, -1), embeds], dim=1)
    seen_BKK = torch.zeros(batch, count + length, count + length, dtype=torch.bool)
    seen_BKK[:, count:, :count] = True
    seen_BKK[:, count:, count:] = real_BL[:, None, :] > 0
    seen_BKK[:, range(count), range(count)] = True
    text = (real_BL.cumsum(1) - 1).clamp(min=0)
    start = real_BL.sum(1, keepdim=True)
    if config.sink_side == "front":
        text += count
        start = torch.zeros_like(start)
    mask = seen_BKK[:, None]
    if model.model.config._attn_implementation == "eager":
        lowest = torch.finfo(embeds.dtype).min
        mask = torch.zeros(mask.shape, dtype=embeds.dtype).masked_fill(~mask, lowest)

    def change(projection, args, states_BKA):
        own_BNGD = states_BKA[:, :count].unflatten(
            -1, (config.backbone.num_key_value_heads, config.head_dim)
        )
        if config.sink_kind == "zero":
            own_BNGD = torch.zeros_like(own_BNGD)
        else:
            own_BNGD = config.sink.values(own_BNGD.transpose(1, 2)).transpose(1, 2)
        return torch.cat([own_BNGD.flatten(2), states_BKA[:, count:]], dim=1)

    with ExitStack() as hooks:
        for layer in model.model.layers if config.sink_kind not in ("none", "token") else ():
            hooks.callback(layer.self_attn.v_proj.register_forward_hook(change).remove)
        out = model.model(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=torch.cat([start + torch.arange(count), text], dim=1),
            use_cache=False,
            is_causal=False,
        )
    return model.lm_head(out.last_hidden_state[:, count:])
