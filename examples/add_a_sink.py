"""An added sink in one file: keys without values. ``sinklab train --corpus TEXT --plugin FILE
--sink-kind keys --sink-count 1`` trains it, ``sinklab check FILE`` says whether it can be trained
and saved.
"""

import torch

from sinklab.core.registry import sinks
from sinklab.core.subject import Sink
from sinklab.lab.added_sinks import per_layer
from sinklab.lab.cli import main


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
            config.backbone.num_key_value_heads,
            config.head_dim,
        )

    def prefix(self, model, length, lengths_B=None):
        return per_layer(model.sink_keys, torch.zeros_like(model.sink_keys))


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
