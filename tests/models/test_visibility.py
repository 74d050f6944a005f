"""Which text a query of the text may see: documents kept apart, and any mask of the
caller's.
"""

import pytest
import torch
from test_diffusion_lm import ATTENTION, build, ragged

from refusals import refused

# B batch, S sequence

SINK = ("token", 2, "front")


@ATTENTION
@pytest.mark.parametrize("sink", [("none", 0, "front"), SINK])
def test_everything_visible_is_no_mask_and_the_lower_triangle_is_causal(impl, sink):
    model = build(sink, impl=impl)
    ids, mask = ragged()
    length = ids.shape[1]
    full = torch.ones(length, length, dtype=torch.bool)
    assert torch.allclose(
        model(ids, mask, visible=full).logits, model(ids, mask).logits, atol=1e-12
    )
    causal = model(ids, causal=True).logits
    for visible in (full.tril(), full.tril().expand(len(ids), -1, -1)):
        assert torch.allclose(model(ids, visible=visible).logits, causal, atol=1e-12)
    # the two combine: what either hides stays hidden
    assert torch.allclose(model(ids, causal=True, visible=full).logits, causal, atol=1e-12)
    assert (model(ids).logits - causal).abs().max() > 1e-3


@ATTENTION
def test_documents_do_not_see_each_other_but_the_sinks(impl):
    model = build(SINK, impl=impl)
    ids, _ = ragged()
    documents_BS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2, 2], [0] * 9])
    visible = documents_BS[:, :, None] == documents_BS[:, None, :]
    logits = model(ids, visible=visible).logits
    # another first document changes nothing in the second, another sink changes all
    changed = ids.clone()
    changed[0, :4] = (ids[0, :4] + 1) % 60
    again = model(changed, visible=visible).logits
    assert torch.equal(again[0, 4:], logits[0, 4:])
    assert (again[0, :4] - logits[0, :4]).abs().max() > 1e-3
    with torch.no_grad():
        model.sink_embeddings.mul_(-1)
    assert ((model(ids, visible=visible).logits - logits).abs().amax(dim=-1) > 1e-6).all()


def test_padding_stays_hidden_and_a_query_that_sees_nothing_is_finite():
    model = build()
    ids, mask = ragged()
    visible = torch.eye(9, dtype=torch.bool)
    out = model(ids, mask, visible=visible)
    assert out.logits.isfinite().all()
    out.logits[mask.bool()].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    changed = ids.clone()
    changed[1, :3] = 7
    full = torch.ones(9, 9, dtype=torch.bool)
    assert torch.equal(
        model(ids, mask, visible=full).logits[1, 3:],
        model(changed, mask, visible=full).logits[1, 3:],
    )


def test_other_kernels_are_refused():
    model = build()
    model.model.config._attn_implementation = "flash_attention_2"
    refused(
        "'flash_attention_2'; use sdpa",
        model,
        ragged()[0],
        visible=torch.ones(9, 9, dtype=torch.bool),
    )
