"""Private names of torch still do what `sinklab.extras.fast.compat` says."""

import torch
from torch import nn

from sinklab.extras.fast import compat


def test_hooks_are_counted_everywhere():
    first = compat.next_hook()
    handle = nn.Linear(2, 2).register_forward_pre_hook(lambda *_: None)
    assert compat.next_hook() > first
    handle.remove()
    assert not compat.has_global_hooks()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert compat.has_global_hooks()


def test_hooks_are_counted_by_module():
    layer = nn.Linear(2, 2)
    before, after = compat.forward_hooks(layer)
    handle = layer.register_forward_pre_hook(lambda *_: None)
    assert (len(before), len(after)) == (1, 0)
    handle.remove()
    assert not before


def test_the_attention_of_the_cpu_says_its_log_sum_exp():
    q_BHQD, k_BGKD, v_BGKD = (
        torch.randn(2, 4, 3, 8),
        torch.randn(2, 2, 5, 8),
        torch.randn(2, 2, 5, 8),
    )
    mask_B11K = torch.zeros(2, 1, 1, 5)
    mask_B11K[1, ..., :2] = -torch.inf
    scores_BHQK = 0.3 * q_BHQD @ k_BGKD.repeat_interleave(2, 1).mT + mask_B11K
    out_BHQD, lse_BHQ = compat.attention_with_logsumexp(q_BHQD, k_BGKD, v_BGKD, mask_B11K, 0.3)
    assert torch.allclose(lse_BHQ, scores_BHQK.logsumexp(-1), atol=1e-5)
    assert torch.allclose(
        out_BHQD, scores_BHQK.softmax(-1) @ v_BGKD.repeat_interleave(2, 1), atol=1e-5
    )
    assert compat.attention_with_logsumexp(q_BHQD.to("meta"), k_BGKD, v_BGKD, None, 0.3) is None


def test_the_inner_product_of_onednn_is_a_product():
    linear = compat.onednn_linear()
    if linear is None:
        return
    q_CD, k_SD = torch.randn(4, 8), torch.randn(6, 8)
    torch.testing.assert_close(linear(q_CD, k_SD, None, "none", [], ""), q_CD @ k_SD.T)
