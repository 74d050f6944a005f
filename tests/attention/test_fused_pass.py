"""The fused pass where there is no GPU: its kernels under Triton's interpreter, and what is chosen
and asked of it.
"""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from sinklab.core.attention import Scores, attention_statistics, received, row_logsumexp
from sinklab.core.instrument import intervene, routes, trace
from sinklab.core.instrument.arguments import read_call
from sinklab.extras.fast import compat, score_pass
from sinklab.extras.fast.compat import attend_with_logsumexp
from sinklab.extras.fast.score_pass import Fused
from sinklab.lab.measures import MaskPositions

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is made for Linux alone")
def test_the_kernels_give_what_the_loop_and_the_dense_map_give():
    script = Path(__file__).with_name("interpreted.py")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "13 calls compared\n"


def test_a_cpu_is_not_served_and_kernels_stay_unloaded():
    scores = Scores.of(torch.randn(1, 2, 600, 8), torch.randn(1, 1, 600, 8))
    assert Fused.serving(scores, ("received",)) is None
    attention_statistics(scores, ("received",))
    assert "sinklab.extras.fast.triton_kernels" not in sys.modules


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("shared", [1, 2])
def test_an_attention_call_is_heard_and_unchanged(mode, shared, monkeypatch):
    monkeypatch.setattr(compat, "_known", {})
    calls = []

    def attention(*given, **options):
        calls.append(1)
        return F.scaled_dot_product_attention(*given, **options)

    with mode():
        q, k, v = (
            torch.randn(2, 33, 4 // part, 16).transpose(1, 2) for part in (1, shared, shared)
        )
        mask = torch.rand(2, 1, 33, 33) > 0.3
        for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": mask}):
            named = {"enable_gqa": shared > 1, **options}
            of_loop = {name.removeprefix("attn_"): one for name, one in options.items()}
            by_loop = row_logsumexp(q, k, chunk=8, **of_loop)
            plain = F.scaled_dot_product_attention(q, k, v, **named)
            for turn in range(3):
                calls.clear()
                by_name = {"value": v, "query": q, "key": k, **named}
                given = ((), by_name) if turn == 2 else ((q, k, v), named)
                out, logsumexp = attend_with_logsumexp(attention, *given)
                assert torch.equal(out, plain) and out.stride() == plain.stride()
                assert_close(logsumexp, by_loop, rtol=1e-5, atol=1e-5)
                # made both ways at first; then its kernel is called at once, but where there is a
                # mask
                assert len(calls) == (2 if turn == 0 else int("attn_mask" in named))
        dropping = {"dropout_p": 0.5, "enable_gqa": shared > 1}
        assert attend_with_logsumexp(attention, (q, k, v), dropping)[1] is None


def test_a_kernel_is_asked_only_if_its_output_stays(monkeypatch):
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    monkeypatch.setattr(compat, "_known", {})
    monkeypatch.setattr(compat, "_KERNELS", {op: None})
    q, asked = torch.randn(1, 2, 3, 4), []

    class Changes(compat._Overheard):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            asked.append(func)
            return (out[0] + 1e-3, *out[1:]) if func is op else out

    monkeypatch.setattr(compat, "_Overheard", Changes)
    plain = F.scaled_dot_product_attention(q, q, q)
    with torch.no_grad():
        for _ in range(3):
            out, logsumexp = attend_with_logsumexp(F.scaled_dot_product_attention, (q, q, q), {})
            assert torch.equal(out, plain) and logsumexp is None
    assert asked.count(op) == 1


def call_of(query, key):
    return read_call("layer", nn.Identity(), {"query": query, "key": key, "value": key}, {})


def test_what_is_heard_is_laid_out_as_the_call_is():
    lse = torch.randn(2, 4, 5)
    filled = torch.cat([lse, torch.zeros(2, 4, 27)], -1)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    for given in (lse, lse.unsqueeze(-1), filled, filled.unsqueeze(-1)):
        call = call_of(q, k)
        score_pass.keep(call, given)
        assert torch.equal(call.scores().lse_BHQ, lse)
    unheard = call_of(q, k)
    score_pass.keep(unheard, None)
    score_pass.keep(unheard, torch.randn(2, 3, 5))
    assert unheard.scores().lse_BHQ is None
    flat = call_of(q[:, 0], k[:, 0])
    score_pass.keep(flat, lse[:, 0])
    assert torch.equal(flat.scores().lse_BHQ, lse[:, :1])


class Attention(nn.Module):
    """A layer that attends to its own argument."""

    def forward(self, x_BHSD):
        return F.scaled_dot_product_attention(x_BHSD, x_BHSD, x_BHSD)


def test_a_trace_hands_what_it_heard_to_the_fused_pass(monkeypatch):
    """As on a GPU, by a pass that stands for the kernels; with an edit, what the edited call
    said.
    """
    given = []

    def fused(scores, names, groups, norms):
        given.append(
            (scores, row_logsumexp(scores.q_BHQD, scores.k_BKSD, mask=scores.mask, chunk=8))
        )
        return received._in_chunks(scores, ("received",), groups, norms, None)

    monkeypatch.setattr(received, "fast_path", lambda *call: fused)
    monkeypatch.setattr(routes, "fast_path", lambda _, call: partial(score_pass.attend, call))
    model, x_BHSD = nn.Sequential(Attention(), Attention()), torch.randn(1, 2, 9, 8)
    plain = model(x_BHSD)
    with trace(model) as seen:
        assert torch.equal(model(x_BHSD), plain)
        with intervene(model, MaskPositions(positions=(2,))):
            model(x_BHSD)
    # the edit looks at calls before they run: then nothing is known yet
    heard = [pair for pair in given if pair[0].lse_BHQ is not None]
    assert len(heard) == 4
    for scores, lse_BHQ in heard:
        assert_close(scores.lse_BHQ, lse_BHQ, rtol=1e-5, atol=1e-5)
    assert (seen.received[1][..., 2] == 0).all()


def test_a_chunk_that_is_named_is_kept_to(monkeypatch):
    monkeypatch.setattr(received, "fast_path", lambda *call: pytest.fail("a fast path was asked"))
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    attention_statistics(Scores.of(q, k), ("received",), chunk=4)
