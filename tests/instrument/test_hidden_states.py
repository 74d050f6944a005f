"""Massive activations and clipped channels against explicit hooks, and keys told apart by the state
of positions.
"""

# B batch, L layers, H heads, Q queries, S positions, D width, K keys (sink columns first), R ranks
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from refusals import refusing
from sinklab.core.attention import is_observed
from sinklab.core.instrument import intervene, trace
from sinklab.lab.measures.statistics import MassiveActivations, sorted_median
from sinklab.lab.scoring import ClipChannel, state_records
from tiny_diffusion import tiny_model
from tiny_models import HandWritten, llama

VALUE, CHANNEL, POSITION, RATIO = range(len(MassiveActivations.columns))


def layers_of(model):
    inner = getattr(model, "model", model)
    return getattr(inner, "layers", None) or model.blocks


def hooked(model, run, change=lambda number, states_BSD: states_BSD):
    """What `run()` gives, and the states after each layer, by hooks written out; `change` is what a
    layer gives.
    """
    seen = {}

    def after(number, output):
        if not is_observed():
            # added sinks run through the layers alone
            return output
        seen[number] = change(number, output[0] if isinstance(output, tuple) else output)
        return (seen[number], *output[1:]) if isinstance(output, tuple) else seen[number]

    with ExitStack() as stack, torch.no_grad():
        for number, layer in enumerate(layers_of(model)):
            hook = layer.register_forward_hook(
                lambda _, __, output, number=number: after(number, output)
            )
            stack.callback(hook.remove)
        return run(), [seen[number] for number in sorted(seen)]


def distinct(seed):
    """Ids (2, 9), none twice in a row: magnitudes without ties."""
    return torch.stack(
        [
            torch.randperm(26, generator=torch.Generator().manual_seed(seed + row))[:9] + 3
            for row in (0, 9)
        ]
    )


def greatest(states_SD, top=3, real_S=None):
    """(R, 4) of one row, in numpy."""
    states = states_SD.numpy().astype(np.float64)
    places = np.arange(len(states)) if real_S is None else np.flatnonzero(real_S)
    flat = sorted(
        ((abs(states[s, d]), states[s, d], d, s) for s in places for d in range(states.shape[1])),
        reverse=True,
    )
    median = sorted(size for size, *_ in flat)[(len(flat) - 1) // 2]
    return np.array(
        [(value, channel, position, size / median) for size, value, channel, position in flat[:top]]
    )


class Pair(torch.nn.Module):
    """A block in the form of LLaDA's: its states, and a cache."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x_BSD):
        return self.block(x_BSD), None


class Pairs(HandWritten):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(map(Pair, self.blocks))

    def forward(self, ids_BS):
        x_BSD = self.embed(ids_BS)
        for block in self.blocks:
            x_BSD, _ = block(x_BSD)
        return x_BSD @ self.embed.weight.T


LEFT = torch.ones(2, 9, dtype=torch.long)
LEFT[1, :5] = 0


@pytest.mark.parametrize(
    "model, given",
    [
        (Pairs(), {}),
        (llama(causal=True, kind="qwen2"), {}),
        (tiny_model(), {"attention_mask": LEFT}),
        (tiny_model(2, logit_shift=True), {}),
    ],
)
def test_massive_activations_are_those_of_the_hooks(model, given):
    ids = distinct(1)
    _, states = hooked(model, lambda: model(ids, **given))
    name = "massive_activations:top=5"
    with torch.no_grad(), trace(model, (name, "received")) as recording:
        model(ids, **given)
    found = recording.array(name)
    assert recording.dims(name) == ("step", "batch", "layer", "rank", "number")
    for layer, states_BSD in enumerate(states):
        for row in range(2):
            # padding is neither great nor in the median
            real_S = given["attention_mask"][row].numpy() if given else None
            expected = greatest(states_BSD[row], 5, real_S)
            assert_allclose(found[0, row, layer], expected, rtol=1e-5)


class Bare(torch.nn.Module):
    """Attends outside of any list of layers."""

    def forward(self, x_BHSD):
        return torch.nn.functional.scaled_dot_product_attention(x_BHSD, x_BHSD, x_BHSD)


class Flat(torch.nn.Module):
    """Gives its states without an axis of rows."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Bare()])

    def forward(self, x_BHSD):
        return self.layers[0](x_BHSD)


@pytest.mark.parametrize("model, message", [(Bare(), "outside"), (Flat(), r"layers\.0")])
def test_a_layer_that_gives_no_states_is_refused(model, message):
    x = torch.randn(1, 2, 4, 8)
    with trace(model) as recording:
        model(x)
    assert len(recording.received) == 1
    for watch in (
        trace(model, ("massive_activations",)),
        intervene(model, ClipChannel(channels=0, limit=1.0)),
    ):
        with refusing(message), watch:
            model(x)


@pytest.mark.parametrize(
    "model, edit",
    [
        (llama(), ClipChannel(channels=(3, 7), limit=0.2, layers=0)),
        (Pairs(), ClipChannel(channels=5, limit=0.0, layers=1)),
        (tiny_model(2), ClipChannel(channels=2, limit=0.2)),
    ],
)
def test_a_clip_is_that_of_the_hooks(model, edit):
    channels, count = list(edit.channels), len(layers_of(model))
    where = range(count) if edit.layers is None else [edit.layers[0] % count]
    raw = {}

    def change(number, states_BSD):
        if number in where:
            raw[number], states_BSD = states_BSD, states_BSD.clone()
            states_BSD[..., channels] = raw[number][..., channels].clamp(-edit.limit, edit.limit)
        return states_BSD

    ids = distinct(3)

    def run():
        out = model(ids)
        return getattr(out, "logits", out)

    expected, states = hooked(model, run, change)
    with (
        torch.no_grad(),
        intervene(model, edit) as log,
        trace(model, ("massive_activations",)) as recording,
    ):
        assert_close(run(), expected)
    # a trace sees what the next layer reads
    assert_allclose(
        recording.array("massive_activations")[0, 0, -1], greatest(states[-1][0]), rtol=1e-5
    )
    found = state_records(log)
    assert [one[:4] for one in found] == [
        ("clip_channel", 0, number, row) for number in where for row in range(2)
    ]
    for record in found:
        before, after = (seen[record.layer][record.row][..., channels] for seen in (raw, states))
        assert (record.before, record.after) == pytest.approx(
            (float(before.abs().max()), float(after.abs().max()))
        )
        assert record.changed == pytest.approx(float((before != after).float().mean()))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"channels": 32}, "0 to 31, got 32"),
        ({"channels": ()}, "got none"),
        ({"channels": (-1,)}, "-1"),
        ({"channels": 0, "limit": -1.0}, "limit"),
    ],
)
def test_wrong_channels_are_refused(fields, message):
    model = llama()
    with refusing(message), intervene(model, ClipChannel(**{"limit": 0.5, **fields})):
        model(torch.tensor([[4, 5, 6]]))


@pytest.mark.parametrize("size", [1, 10, 1001])
def test_the_median_of_sorted_rows_is_the_median(size):
    size_BN = (torch.randn(4, size) * 50).abs()
    size_BN[1, torch.rand(size) > 0.5] = torch.nan
    size_BN[2], size_BN[3] = size_BN[2].round(), torch.nan
    expected_B1 = size_BN.nanmedian(1, True).values
    assert_close(sorted_median(size_BN), expected_B1, rtol=0, atol=0, equal_nan=True)
