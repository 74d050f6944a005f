"""What heads give: output norms beside the bound of Eq. 20, all statistics at once, and no bit
changed.
"""

# B batch, L layers, H heads, Q queries, S keys
import pytest
import torch
from probed import IDS, PADDED
from torch.testing import assert_close

from sinklab.core.instrument import BlockKeys, Listener, TopKeys, intervene, trace
from sinklab.core.instrument.routes import tapped
from sinklab.core.registry import statistics
from tiny_models import STYLES, HandWritten, llama

NAMES = tuple(
    name for name, kind in statistics.items() if not (kind.needs_canvas or name == "drift")
)


class Outputs(Listener):
    """Keeps what every call gave."""

    def __init__(self):
        self.norms = []

    def observe(self, call, out):
        self.norms.append(call.by_head(out).norm(dim=-1))


@pytest.mark.parametrize("style", STYLES)
def test_every_statistic_at_once_changes_no_bit(style):
    model = HandWritten(style)
    model(IDS).square().sum().backward()
    plain, gradient = model(IDS), model.blocks[0].qkv.weight.grad.clone()
    model.zero_grad()
    with trace(model, NAMES) as recording:
        out = model(IDS)
    out.square().sum().backward()
    assert torch.equal(plain, out)
    assert torch.equal(gradient, model.blocks[0].qkv.weight.grad)
    assert not any(recording.values(name)[0].requires_grad for name in NAMES)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("how", ["", "mask"])
def test_output_norms_are_those_of_the_outputs_and_keep_the_bound(style, how):
    model = HandWritten(style)
    edits = [BlockKeys(TopKeys(4), when="now", how=how)] if how else []
    outputs, names = Outputs(), ("output_norm", "noop_bound")
    with intervene(model, *edits), trace(model, names) as recording, tapped(model, outputs):
        model(IDS)
    norms, bounds = recording.values("output_norm")[0], recording.values("noop_bound")[0]
    assert norms.shape == bounds.shape == (2, 2, 1 if style == "headless" else 2, 12)
    assert_close(norms, torch.stack(outputs.norms, 1))
    assert (norms <= bounds * (1 + 1e-5)).all()
    # far below in some rows: the bound is no equality
    assert (norms < 0.9 * bounds).any()


def test_autoregressive_decoding_with_a_cache():
    model = llama(causal=True)
    options = {"attention_mask": PADDED, "max_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(IDS, **options)
    with trace(model, NAMES) as recording:
        traced = model.generate(IDS, **options)
    assert torch.equal(plain.sequences, traced.sequences)
    assert all(map(torch.equal, plain.logits, traced.logits))
    assert recording.array("positions").tolist() == [[8 + step, 12 + step] for step in range(4)]
    for step in range(1, 4):
        # one query ran: its row is the column sum
        assert_close(recording.values("last_row")[step], recording.received[step])
        norms, bounds = recording.values("output_norm")[step], recording.values("noop_bound")[step]
        assert norms.shape == (2, 2, 4, 1) and (norms <= bounds * (1 + 1e-5)).all()
