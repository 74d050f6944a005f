"""Layers below an edit are not computed anew, and no number changes by that."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from sinklab.core.attention.context import is_observed
from sinklab.core.instrument import BlockKeys, TopKeys, trace
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.measures import MaskPositions, MaskSinks, Random, WindowAttention
from sinklab.lab.scoring.arms import arm_losses
from sinklab.lab.scoring.clean_layers import CleanLayers
from tiny_diffusion import END, MASK, PAD, tiny_backbone, tiny_loaded
from tiny_llama import tiny_llama

ARMS = [
    [],
    *([MaskSinks(k=2, layers=(layer,))] for layer in range(4)),
    [BlockKeys(Random(TopKeys(1)), layers=(-1,), heads=(1,))],
    [MaskSinks(k=1, layers=(3,)), WindowAttention(radius=4, layers=(2,))],
    [MaskPositions((0, 5), layers=("layers.3",))],
    [MaskSinks(k=1)],
]
LEFT_OUT = 0 + 1 + 2 + 3 + 3 + 2 + 3
"""Layers that these arms leave out."""


def deep(family):
    """A tiny model with four layers."""
    torch.manual_seed(1)
    config = tiny_backbone(pad_token_id=PAD, eos_token_id=END, num_hidden_layers=4)
    if family == "autoregressive":
        return replace(tiny_llama(), model=LlamaForCausalLM(config).eval())
    sink = {"sink_kind": "token", "sink_count": 1} if family == "sink" else {}
    if family == "blocks":
        sink = {"block_length": 8}
    model = DiffusionLM(DiffusionLMConfig(config, mask_token_id=MASK, **sink))
    return replace(tiny_loaded(), model=model.eval())


def layers_run(loaded, ids_RS):
    """Layers that were computed for all arms, and the losses."""
    ran, model = [], loaded.model
    hooks = [
        layer.mlp.register_forward_hook(lambda *_: ran.append(1) if is_observed(model) else None)
        for layer in model.model.layers
    ]
    found = [*arm_losses(loaded, dict(enumerate(ARMS)), ids_RS.tolist(), seed=3, batch=4)]
    for hook in hooks:
        hook.remove()
    return len(ran), found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sink", "blocks", "autoregressive"])
def test_layers_below_the_first_edit_are_those_of_the_clean_pass_bit_for_bit(family, monkeypatch):
    loaded, ids_RS = deep(family), torch.randint(3, 280, (6, 24))
    forwards = [vars(module).get("forward") for module in loaded.model.modules()]
    ran, found = layers_run(loaded, ids_RS)
    monkeypatch.setattr(CleanLayers, "without", lambda *_: nullcontext())
    ran_plainly, plain = layers_run(loaded, ids_RS)
    assert ran_plainly == 2 * 4 * len(ARMS) and ran == ran_plainly - 2 * LEFT_OUT
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one.nats_P, other.nats_P)
        np.testing.assert_array_equal([*one.about.values()], [*other.about.values()])
    assert [vars(module).get("forward") for module in loaded.model.modules()] == forwards


def test_a_trace_around_it_sees_every_layer():
    loaded, ids_RS = deep("diffusion"), torch.randint(3, 280, (2, 24))
    with trace(loaded.model, ("received",)) as recording:
        list(arm_losses(loaded, {"a": [MaskSinks(k=1, layers=(3,))]}, ids_RS.tolist()))
    assert [step.shape[1] for step in recording.received] == [4]


class Adds(torch.nn.Module):
    """A layer that changes its input."""

    def forward(self, x_BSD):
        return x_BSD.add_(1)


class Shares(torch.nn.Module):
    """Layers that share keys by a dictionary: all must run."""

    def forward(self, x_BSD, *, shared):
        return x_BSD + shared.setdefault("keys", x_BSD)


@pytest.mark.parametrize(
    "layer, order, first", [(Adds, (0, 1, 2), 2), (Adds, (0, 0, 1, 2), 1), (Shares, (0, 1), 1)]
)
def test_a_layer_that_changes_its_input_runs_twice_or_shares_is_no_trap(layer, order, first):
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer() for _ in range(3)])

    def run():
        given = {"shared": {}} if layer is Shares else {}
        x_BSD = torch.ones(1, 2, 3)
        for number in order:
            x_BSD = model.layers[number](x_BSD, **given)
        return x_BSD

    layers, calls = CleanLayers(model), [f"layers.{number}.attention" for number in range(3)]
    with layers.kept(True):
        clean_BSD = run()
    for _ in range(2):
        with layers.without(calls, first):
            assert torch.equal(run(), clean_BSD)
