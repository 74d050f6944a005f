"""A trace on an accelerator: no number is read before a forward ends, and little is copied to the
device.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sinklab.core.attention import running
from sinklab.core.instrument import recording, trace
from sinklab.core.registry import statistics

B, H, K, S, D, LAYERS = 2, 4, 2, 9, 8, 3


class Layer(nn.Module):
    """Attention over states (B, Q, H·D), with a memory of as many keys as the mask says."""

    def forward(self, x_BQE, mask, keys):
        heads_BQHD = x_BQE.unflatten(-1, (H, D))
        k_BSKD = heads_BQHD[:, :1, :K].expand(-1, keys, -1, -1)
        q_BHQD, k_BKSD = heads_BQHD.transpose(1, 2), k_BSKD.transpose(1, 2)
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD, k_BKSD, k_BKSD, attn_mask=mask, enable_gqa=True
        )
        return out_BHQD.transpose(1, 2).flatten(2)


class Model(nn.ModuleList):
    """Layers one after another."""

    def forward(self, x_BQE, mask=None, keys=S):
        for layer in self:
            x_BQE = layer(x_BQE, mask, keys)
        return x_BQE


def layers():
    return Model(Layer() for _ in range(LAYERS))


class FromHost(TorchDispatchMode):
    """Counts what goes to the device: a tensor there cannot be read, so what comes from it
    raises.
    """

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, Tensor)]
        if func.overloadpacket.__name__ in ("_to_copy", "copy_", "lift_fresh"):
            self.count += any(one.device.type == "cpu" for one in given[-1:]) and (
                out.device.type == "meta" or func.overloadpacket.__name__ == "lift_fresh"
            )
        return out


@pytest.fixture
def departures(monkeypatch):
    """Shapes of what has left the device so far; zeros stand for it."""
    left = []

    def to_host(tensor):
        left.append(tensor.shape)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(recording, "to_host", to_host)
    # there is none on the device that stands for one here
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())
    # the median of an accelerator would be refused
    torch.use_deterministic_algorithms(False)
    yield left
    torch.use_deterministic_algorithms(True)


def canvas_of(length):
    open_BS = (torch.arange(length) > 3).expand(B, -1)
    return SimpleNamespace(open_BS=open_BS, attention_BS=torch.ones_like(open_BS), mask_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind, heads", [("padding", (3, 0)), ("by_query", None)])
def test_nothing_is_read_before_a_forward_ends(departures, kind, heads):
    model, x_BQE = layers(), torch.empty(B, S, H * D, device="meta")
    shape = {"padding": (B, 1, 1, S), "by_query": (B, 1, S, S)}[kind]
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    ids_BS, counts = torch.empty(B, S, dtype=torch.int64, device="meta"), []
    during = []
    model[-1].register_forward_hook(lambda *_: during.append(len(departures)))
    with trace(model, tuple(statistics), canvas=canvas_of(S), heads=heads) as seen:
        for _ in range(3):
            before = len(departures)
            with FromHost() as host, running(ids_BS):
                model(x_BQE, mask)
            assert during[-1] == before, "something left the device while layers were still to come"
            counts.append(host.count)
    # once a forward: which positions are open, and which are real
    assert counts[1:] == [2, 2] and counts[0] <= 6
    # what layers share leaves once: statistics, columns, queries that see a key, states of queries
    # and of positions
    assert len(departures) == 3 * (len(statistics) + 4)
    assert seen.received[0].shape == (B, LAYERS, 2 if heads else H, S)


@pytest.mark.ring("lab")
def test_columns_of_a_cached_step_stay_on_the_device(departures):
    model, x_BQE = layers(), torch.empty(B, 4, H * D, device="meta")
    ids_BS, columns = (
        torch.empty(B, S, dtype=torch.int64, device="meta"),
        torch.empty(4, dtype=torch.int64),
    )
    names = ("received_from_masked", "massive_activations", "received")
    with trace(model, names, canvas=canvas_of(S)) as seen:
        for given in (slice(5, 9), columns.to("meta")):
            with FromHost() as host, running(ids_BS, given):
                model(x_BQE, None, S + 1)
            assert host.count == 2
    assert seen.prefix == 1 and [frame.shape for frame in seen.columns] == [(4,), (4,)]
