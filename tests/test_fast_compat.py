"""Private names of torch still do what `sinklab.extras.fast.compat` says."""

import torch
from torch import nn

from sinklab.extras.fast import compat


def test_hooks_of_every_module_are_seen():
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


def test_the_inner_product_of_onednn_is_a_product():
    linear = compat.onednn_linear()
    if linear is None:
        return
    q_CD, k_SD = torch.randn(4, 8), torch.randn(6, 8)
    torch.testing.assert_close(linear(q_CD, k_SD, None, "none", [], ""), q_CD @ k_SD.T)
