"""Tiny random models for the tap's tests: transformers decoders, and a module that calls SDPA
itself.
"""

# B batch, H heads, S sequence, D width
import math

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Wide weights make attention uneven enough for rankings to be clear.
    "initializer_range": 0.3,
}
"""Fields of a tiny decoder of transformers, but for its vocabulary."""
NO_ENDS = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}


def llama(*, causal=False, kv_heads=2, kind="llama", attention="sdpa"):
    """A two-layer decoder with four query heads; kv_heads < 4 makes transformers use enable_gqa."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    given = {"vocab_size": 50, "num_key_value_heads": kv_heads, "attn_implementation": attention}
    config = config_class(**SIZES | NO_ENDS | given)
    config.is_causal = causal
    torch.manual_seed(3)
    return model_class(config).eval()


def by_itself(model):
    """A model of transformers whose first attention was changed: nothing says that it asks for its
    function still.
    """
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward
    return model


def checkpointed(model, use_reentrant=False):
    """In training mode with gradient checkpointing; transformers renamed the switch in 5.2x."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": use_reentrant})
    return model.train()


class Attends(nn.Module):
    """One attention call as it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


class Block(nn.Module):
    def __init__(self, width, heads, style):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.heads, self.style = heads, style

    def forward(self, x_BSD):
        q, k, v = (
            part
            if self.style == "headless"
            else part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x_BSD).chunk(3, -1)
        )
        length = x_BSD.shape[1]
        if self.style == "causal":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.style == "additive":
            bias = -torch.arange(length).sub(torch.arange(length)[:, None]).abs() * 0.1
            out = F.scaled_dot_product_attention(
                q, k, v, bias.expand(q.shape[0], self.heads, length, length)
            )
        elif self.style == "bool_2d":
            out = F.scaled_dot_product_attention(
                query=q, key=k, value=v, attn_mask=torch.ones(length, length).bool().tril(2)
            )
        else:
            out = F.scaled_dot_product_attention(q, k, v, scale=1.5 / math.sqrt(q.shape[-1]))
        return x_BSD + (out if self.style == "headless" else out.transpose(1, 2).flatten(2))


STYLES = ("plain", "causal", "additive", "bool_2d", "headless")


class HandWritten(nn.Module):
    """Not from transformers: calls F.scaled_dot_product_attention itself, positionally and by
    keyword.
    """

    def __init__(
        self,
        style="plain",
        width=16,
        heads=2,
        layers=2,
        vocab=30,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, style) for _ in range(layers))

    def forward(self, ids_BS):
        x_BSD = self.embed(ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return x_BSD @ self.embed.weight.T


class Prefixed(HandWritten):
    """Two learned sink columns in front of the keys of every layer."""

    def forward(self, ids_BS):
        x_BSD = self.embed(ids_BS)
        for block in self.blocks:
            q, k, v = block.qkv(x_BSD).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
            sink = torch.ones(q.shape[0], block.heads, 2, q.shape[-1])
            out = F.scaled_dot_product_attention(
                q, torch.cat([sink, k], 2), torch.cat([0 * sink, v], 2)
            )
            x_BSD = x_BSD + out.transpose(1, 2).flatten(2)
        return x_BSD @ self.embed.weight.T
