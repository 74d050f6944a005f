"""The fused pass on a GPU against the dense float64 map and the loop over chunks, and traces by
it.
"""

# B batch, H query heads, K key heads, Q queries, S keys, D head dim, G query groups
import types

import pytest
import torch
import torch.nn.functional as F
from dense import (
    ALL,
    KINDS,
    dense_attention,
    float32_precision,
    mask_of,
    received_attention,
    twins,
)
from torch import nn
from torch.testing import assert_close

from sinklab.core.attention import Scores, attention_statistics
from sinklab.core.instrument import trace
from sinklab.extras.fast.score_pass import Fused, fused_pass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def any_algorithm():
    """cuBLAS and cuDNN refuse to run, or are not chosen, where only deterministic algorithms
    may.
    """
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def factors(heads, kv, queries, keys, dim, dtype):
    """q, k, v laid out as transformers does: (batch, position, head, dim), turned."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((queries, heads), (keys, kv), (keys, kv))
    drawn = (
        torch.randn(2, length, n, dim, device="cuda", generator=generator) for length, n in sizes
    )
    q, k, v = (x.to(dtype).transpose(1, 2) for x in drawn)
    return q, k, v


def masked(kind, shape, dtype):
    """A mask of this kind on the GPU, and whether the call is causal."""
    heads, _, queries, keys, *_ = shape
    return mask_of(kind, 2, heads, queries, keys, dtype, "cuda")


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [
        (4, 4, 300, 300, 128),
        (6, 2, 130, 333, 64),
        (2, 1, 1, 65, 80),
        (2, 2, 33, 70, 20),
        (2, 2, 99, 300, 256),
    ],
)
def test_every_statistic_is_that_of_the_dense_map(shape, kind, dtype):
    q, k, v = factors(*shape, dtype)
    mask, is_causal = masked(kind, shape, dtype)
    groups = torch.rand(2, 4, shape[2], device="cuda")
    scores = Scores.of(q, k, mask, is_causal)
    assert Fused.serving(scores, ALL) is fused_pass
    found = attention_statistics(scores, ALL, v_BKSD=v, groups_BGQ=groups)
    expected = twins(q, k, v, mask, is_causal, groups)
    seen = expected["row_logsumexp"] > -1e30
    for name, twin in expected.items():
        assert found[name].dtype == torch.float32
        if name == "row_logsumexp":
            assert (found[name][~seen] < -1e30).all()
            found[name], twin = found[name][seen], twin[seen]
        # a row that sees nothing is even; beside -65504 the scores of such a row are known to two
        # digits
        wide = 5e-3 if kind == "least" and dtype == torch.float16 else 2e-5
        assert_close(found[name].double(), twin, rtol=wide, atol=wide)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("heads", [None, (5,), (3, 0)])
def test_groups_and_heads(count, heads):
    q, k, v = factors(6, 2, 700, 715, 128, torch.bfloat16)
    mask, _ = masked("padding", (6, 2, 700, 715), torch.bfloat16)
    groups = torch.rand(2, count, 700, device="cuda") if count else None
    scores = Scores.of(q, k, mask, heads=heads)
    for names in (ALL, ("received",), ("row_logsumexp",)):
        found = attention_statistics(scores, names, v_BKSD=v, groups_BGQ=groups)
        looped = attention_statistics(scores, names, v_BKSD=v, groups_BGQ=groups, chunk=128)
        for name in names:
            assert_close(found[name], looped[name], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_sharp_rows(size):
    q, k, v = factors(2, 2, 400, 400, 64, torch.bfloat16)
    dense = twins(q * size, k, v, None, False, torch.ones(2, 1, 400, device="cuda"))
    found = attention_statistics(Scores.of(q * size, k), ALL, v_BKSD=v)
    for name, twin in dense.items():
        twin = twin[:, 0] if name == "received" else twin
        assert_close(found[name].double(), twin, rtol=2e-6 * size, atol=2e-6 * size)
    assert (found["row_entropy"] >= 0).all()


def test_float32_is_never_rounded_to_tf32():
    q, k, _ = factors(2, 2, 256, 256, 128, torch.float32)
    with float32_precision("medium"):
        twin = dense_attention(q * 4, k).sum(-2)
        assert_close(received_attention(q * 4, k).double(), twin, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_over_chunks_is_as_exact(kind, dtype):
    q, k, v = factors(6, 2, 130, 333, 64, dtype)
    mask, is_causal = masked(kind, (6, 2, 130, 333), dtype)
    groups = torch.rand(2, 3, 130, device="cuda")
    with float32_precision("high"):
        scores = Scores.of(q, k, mask, is_causal, heads=(5, 0, 1))
        found = attention_statistics(scores, ALL, v_BKSD=v, groups_BGQ=groups, chunk=50)
        assert torch.get_float32_matmul_precision() == "high"
    wide = 5e-3 if kind == "least" and dtype == torch.float16 else 2e-5
    for name, twin in twins(q, k, v, mask, is_causal, groups).items():
        twin = twin[:, :, [5, 0, 1]] if name == "received" else twin[:, [5, 0, 1]]
        if name != "row_logsumexp":
            assert_close(found[name].double(), twin, rtol=wide, atol=wide)


def test_what_the_kernels_do_not_serve_goes_by_chunks():
    q, k, _ = factors(2, 2, 40, 40, 16, torch.float64)
    assert Fused.serving(Scores.of(q, k), ALL) is None
    twin = dense_attention(q, k).sum(-2)
    assert_close(received_attention(q, k), twin, rtol=1e-12, atol=1e-12)
    assert Fused.serving(Scores.of(q.float().cpu(), k.float().cpu()), ALL) is None


class Attention(nn.Module):
    """One layer of attention over its argument, which holds q, k and v."""

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )


TRACED = pytest.mark.parametrize("shape", [(8, 8, 640, 640, 128), (8, 2, 64, 700, 128)])


def traced(shape, kind):
    """A model of one attention, and what it is given."""
    model = nn.Sequential(Attention())
    model.forward = types.MethodType(lambda self, *given: self[0](*given), model)
    return model, *factors(*shape, torch.bfloat16), masked(kind, shape, torch.bfloat16)[0]


@pytest.mark.parametrize("kind", ["none", "padding", "least"])
@TRACED
def test_a_trace_changes_no_bit_and_gives_what_the_chunks_give(shape, kind):
    model, q, k, v, mask = traced(shape, kind)
    with torch.inference_mode():
        plain = model(q, k, v, mask)
        with trace(
            model, ("received", "row_entropy", "row_logsumexp", "noop_bound", "value_norm")
        ) as recording:
            out = model(q, k, v, mask)
    assert torch.equal(out, plain)
    real = torch.ones(2, 1, shape[2], device="cuda")
    if kind == "padding" and shape[2] == shape[3]:
        real[0, :, :5] = 0
    looped = attention_statistics(Scores.of(q, k, mask), ALL, v_BKSD=v, groups_BGQ=real, chunk=64)
    for name, expected in looped.items():
        expected = expected[:, 0] if name == "received" else expected
        assert_close(recording.values(name)[0][:, 0], expected.cpu(), rtol=5e-5, atol=5e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@TRACED
@pytest.mark.parametrize("kind", ["none", "padding"])
def test_a_traced_forward_does_not_wait(shape, kind):
    model, *call = traced(shape, kind)
    with (
        torch.inference_mode(),
        trace(model, ("received", "row_entropy", "value_norm", "output_norm")) as recording,
    ):
        # the first compiles the kernels
        model(*call)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(*call)
            model(*call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(recording.received) == 3
    assert (
        torch.equal(recording.received[0], recording.received[2])
        and not recording.received[2].is_pinned()
    )
