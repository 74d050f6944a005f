"""Several statistics in one pass against their dense twins, for some heads, and in long rows."""

# B batch, H query heads, K key heads, Q queries, S keys, D head dim

import torch
from dense import (
    ALL,
    dense_attention,
    float32_precision,
    received_attention,
)
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from refusals import refused
from sinklab.core.attention import Scores, attention_statistics
from sinklab.extras.fast import arithmetic


def test_a_linear_layer_by_the_fast_product_stands_in_inference_alone(monkeypatch):
    calls = []

    def product(x, weight, bias, *_):
        calls.append(x.shape)
        return F.linear(x, weight, bias)

    monkeypatch.setattr(arithmetic, "_onednn", lambda: product)
    layer, x = torch.nn.Linear(512, 256), torch.randn(2, 3, 512)
    linear = arithmetic.linear_for(layer.weight, layer.bias)
    assert linear(x).requires_grad and not calls
    with torch.inference_mode():
        expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
        assert calls == [x.shape]
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        with float32_precision("high"):
            linear(x)
        # a weight so small that it is not worth it, and one of another dtype
        arithmetic.linear_for(layer.weight[1:], None)(x)
        arithmetic.linear_for(layer.weight.double(), None)(x.double())
    assert len(calls) == 1


class Products(TorchDispatchMode):
    """Counts the products of queries and keys."""

    def __init__(self, keys):
        super().__init__()
        self.keys, self.count = keys, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "bmm":
            self.count += out.shape[-1] == self.keys and out.shape[-2] > 1
        return out


def test_half_precision_is_widened_and_is_exact():
    q, k = torch.randn(1, 2, 520, 8).bfloat16(), torch.randn(1, 1, 520, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = received_attention(q, k)
    assert found.dtype == torch.float32
    assert torch.equal(found, received_attention(q.float(), k.float()))
    assert_close(found.double(), dense_attention(q, k).sum(-2), rtol=1e-5, atol=1e-5)


def test_everything_costs_one_pass_over_the_scores():
    q, k, v = (torch.randn(1, 2, 300, 4) for _ in range(3))
    groups = torch.ones(1, 1, 300)
    with Products(300) as one:
        received_attention(q, k)
    with Products(300) as several:
        attention_statistics(Scores.of(q, k), ALL, v_BKSD=v, groups_BGQ=groups)
    assert 0 < one.count == several.count


def test_wrong_use_is_refused_by_name():
    q, k = torch.randn(1, 4, 5, 4), torch.randn(1, 2, 5, 4)
    refused("query heads are 0 … 3, got 4", Scores.of, q, k, heads=(0, 4))
    refused("did you mean 'row_entropy'", attention_statistics, Scores.of(q, k), ("row_entropie",))
    refused("none were given: pass v_BKSD", attention_statistics, Scores.of(q, k), ("noop_bound",))
