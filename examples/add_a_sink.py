"""An added sink in one file: keys without values. ``sinklab train --plugin FILE --sink-kind keys
--sink-count 1``
"""

import tempfile

import torch
from transformers import LlamaConfig

import sinklab
from sinklab.core.models import DiffusionLM, DiffusionLMConfig, Sink
from sinklab.core.models.prefix import per_layer
from sinklab.core.registry import sinks


@sinks.register("keys")
class KeySink(Sink):
    """Learned keys of each layer; their values are zero, so what a query gives to them is added to
    nothing.
    """

    tensors = ("sink_keys",)
    positions = 0

    def shape(self, config, name):
        return (
            config.backbone.num_hidden_layers,
            config.sink_count,
            config.kv_heads,
            config.head_dim,
        )

    def prefix(self, model, length, lengths_B=None):
        return per_layer(model.sink_keys, torch.zeros_like(model.sink_keys))


if __name__ == "__main__":
    backbone = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_attention_heads=4
    )
    model = DiffusionLM(
        DiffusionLMConfig(backbone, sink_kind="keys", sink_count=1, mask_token_id=59)
    ).train()
    noisy, ids = torch.full((1, 8), 59), torch.arange(8)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(noisy, labels=ids).loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        model.eval().save_pretrained(folder)
        again = sinklab.load(folder).model
    assert torch.equal(again(noisy).logits, model(noisy).logits)
    print(again.generate(ids, max_new_tokens=8, block_length=4, cache="dual"))
