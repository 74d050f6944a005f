"""The specification of the sink: the (L + N)² masked form of Eq. 6, with every sink seeing itself
alone.
"""

import contextlib

import torch

# B batch, L text, N sinks, K = N + L


def masked_form(model, input_ids, attention_mask=None):
    """Logits (B, L, V) with sinks and text in one sequence under an explicit mask."""
    config = model.config
    batch, length = input_ids.shape
    count = config.sink_count
    real_BL = (
        torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is None
        else attention_mask.bool()
    )
    embeds = model.model.embed_tokens(input_ids)
    if count:
        embeds = torch.cat([model.sink_embeddings.expand(batch, -1, -1), embeds], dim=1)
    allowed_BKK = torch.zeros(batch, count + length, count + length, dtype=torch.bool)
    allowed_BKK[:, count:, :count] = True
    allowed_BKK[:, count:, count:] = real_BL[:, None, :]
    allowed_BKK[:, range(count), range(count)] = True
    front = config.sink_side == "front"
    text_positions = (real_BL.long().cumsum(1) - 1).clamp(min=0) + (count if front else 0)
    sink_start = torch.zeros(batch, 1, dtype=torch.long) if front else real_BL.sum(1, keepdim=True)
    positions = torch.cat([sink_start + torch.arange(count), text_positions], dim=1)
    mask = allowed_BKK[:, None]
    if model.model.config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape, dtype=embeds.dtype).masked_fill(
            ~mask, torch.finfo(embeds.dtype).min
        )
    with _zeroed_values(model.model, count if config.sink_kind == "zero" else 0):
        out = model.model(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            is_causal=False,
        )
    return model.lm_head(out.last_hidden_state[:, count:])


@contextlib.contextmanager
def _zeroed_values(decoder, count):
    def zero(module, args, output):
        keep = torch.arange(output.shape[1])[None, :, None] >= count
        return output * keep

    handles = (
        [layer.self_attn.v_proj.register_forward_hook(zero) for layer in decoder.layers]
        if count
        else []
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
