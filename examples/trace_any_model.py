"""Where the attention of an autoregressive Llama goes: `trace` works on any model that calls
torch's attention.

The weights here are random, so what shows is the causal mask alone: more queries see the first
positions than the last.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import Excess, find_sinks, trace

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="sdpa",
)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, config.vocab_size, (1, 48))

with torch.no_grad(), trace(model) as recording:
    model(ids)

received = recording.array(
    "received"
)  # (step, row, layer, head, key); this one forward is one step
visible = recording.array(
    "visible"
)  # (step, row, key): in a causal model the last key is seen by one query only
sinks = find_sinks(received, Excess(), seen_by=visible[:, :, None, None])
for layer, path in enumerate(recording.layers):
    share = sinks[0, 0, layer].mean()
    first = received[0, 0, layer, :, 0].mean()
    print(
        f"{path}: {share:.1%} of positions are sinks; the first position receives {first:.1f} of "
        "48 queries' attention"
    )
