"""Recording: the same bits as without it, the numbers of eager attention, and nothing left
behind.
"""

# B batch, H heads, S sequence
from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from probed import IDS

from refusals import refused, refusing
from sinklab.core.instrument import Statistic, trace
from sinklab.core.registry import statistics
from sinklab.core.subject import Canvas, denoise
from tiny_diffusion import tiny_model
from tiny_models import HandWritten, by_itself, llama


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_layers_that_see_differently_are_told_apart():
    model = HandWritten()
    model.blocks[1].style = "causal"
    with trace(model) as recording:
        model(IDS)
    with refusing(r"blocks.0; read .*visible_by"):
        _ = recording.visible
    layers = recording.visible_by_layer[0]
    assert layers.shape == (2, 2, 12)
    assert layers[0].tolist() == [[12.0] * 12, [float(12 - i) for i in range(12)]]


def test_marks_group_forwards_and_keep_the_first():
    model = HandWritten()
    with trace(model) as recording:
        for step in ("a", "b"):
            model(IDS)
            model(IDS + 0 * IDS if step == "a" else 29 - IDS.clamp(max=29))
            recording.mark(step)
        model(IDS)
    with trace(model) as single:
        model(IDS)
    assert recording.steps == ["a", "b"]
    assert recording.forwards_per_step == [2, 2]
    assert all(torch.equal(step, single.received[0]) for step in recording.received)
    assert single.steps == [0]


def test_a_part_of_the_model_may_be_called_directly():
    model = llama()
    with torch.no_grad(), trace(model) as recording:
        for _ in range(2):
            model.lm_head(model.model(IDS).last_hidden_state)
            recording.mark()
    hand = HandWritten()
    with torch.no_grad(), trace(hand) as pieces:
        for _ in range(3):
            x = hand.embed(IDS)
            for block in hand.blocks:
                x = block(x)
    assert [x.shape[1] for x in recording.received] == [2, 2]
    assert [x.shape[1] for x in pieces.received] == [2, 2, 2]


def test_nested_traces_and_neighbours_do_not_disturb_each_other():
    model, other = HandWritten(), HandWritten("causal")
    with trace(model) as outer, trace(other) as beside:
        model(IDS)
        with trace(model, ("value_norm",)) as inner:
            model(IDS)
            other(IDS)
        F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 4))
        model(IDS)
    assert (len(outer.received), len(inner.value_norm), len(beside.received)) == (3, 1, 1)
    assert hooks(model) == hooks(other) == 0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda recording: pickle.loads(pickle.dumps(recording))]
)
def test_a_copy_of_a_recording_has_its_numbers_and_not_the_model(copied):
    model = tiny_model()
    canvas = Canvas.from_prompts([[5, 6, 7]], new_tokens=3, mask_id=model.config.mask_token_id)
    with trace(model, ("received", "output_norm"), canvas=canvas) as recording:
        for step in denoise(model.denoiser(), canvas):
            recording.mark(step)
            other = copied(recording)
    for name in ("received", "query_state"):
        assert (other.array(name) == recording.array(name)).all()
    assert other.steps[-1].ids_BS.tolist() == recording.steps[-1].ids_BS.tolist()
    assert other.layers == recording.layers
    refused("a copy", other.mark)
    held = model.lm_head.weight.numel() * 4
    assert len(pickle.dumps(recording)) < held + 100_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_trace_inside_of_a_trace_is_refused_by_name():
    model = HandWritten().eval()
    with trace(model) as recording:
        model(IDS)
        refused("torch.jit.trace", torch.jit.trace, model, (IDS,))
        model(IDS)
    assert recording.array("received").shape[0] == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_no_trace(error):
    model = HandWritten()
    plain = model(IDS)

    def fail(*_):
        raise error

    with pytest.raises(error), trace(model) as recording:
        model(IDS)
        handle = model.blocks[1].register_forward_pre_hook(fail)
        try:
            model(IDS)
        except error:
            handle.remove()
            model(IDS)
            raise
    assert len(recording.received) == 2
    assert hooks(model) == 0
    assert torch.equal(plain, model(IDS))


@pytest.mark.parametrize(
    "model, message",
    [
        (by_itself(llama(attention="eager")), 'ran 1 times .*"sdpa"'),
        (HandWritten("plain", layers=0), "ran 1 times"),
        (lambda ids: ids, "got function"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused(model, message):
    with refusing(message), trace(model, allow_empty=True):
        model(IDS)


def test_wrong_use_is_refused_by_name():
    model = HandWritten()
    for names, message in ((("recieved",), "'received'"), ("received", "(name,)")):
        with refusing(re.escape(message)), trace(model, names):
            pass
    with refusing("inside the block"), trace(model):
        pass
    with pytest.raises(KeyError), trace(model):
        raise KeyError
    with trace(model, allow_empty=True) as recording:
        pass
    assert recording.layers == recording.steps == []
    with trace(model) as recording:
        model(IDS)
        recording.mark()
        refused("last mark", recording.mark)
    with refusing("'row_entropy'"):
        _ = recording.row_entropy


def test_statistics_are_named_by_their_options_and_say_what_they_need(scratch):
    scratch(statistics)

    @statistics.register("largest", axes="head rank")
    def largest(call, k=1):
        return call.received_BHS.topk(k, -1).values

    model = HandWritten()
    with trace(model, ("largest", "received", "largest:k=3", "largest: k = 3")) as recording:
        model(IDS)
    assert recording.statistics == ("largest", "received", "largest:k=3")
    expected = recording.received[0].topk(3, -1).values
    assert torch.equal(torch.from_numpy(recording.array("largest:k=3"))[0], expected)
    assert torch.equal(recording.largest[0], expected[..., :1])
    # what it reads unnamed is computed when it asks, for the heads that are recorded
    with trace(model, ("largest",), heads=(1, 0)) as alone:
        model(IDS)
    torch.testing.assert_close(alone.largest[0], expected[:, :, [1, 0], :1])
    bare = statistics.register("bare")(type("Bare", (Statistic,), {"axes": ("batch",)}))
    with (
        refusing('a statistic hold "layer"'),
        trace(model, (bare(),)),
    ):
        pass
    about = {"axes": ("batch", "layer"), "reads": ("recieved",)}
    misspelt = statistics.register("misspelt")(type("Misspelt", (Statistic,), about))
    with (
        refusing(r"what misspelt reads.*received"),
        trace(model, (misspelt(),)),
    ):
        pass
    with pytest.raises(AttributeError, match="recording has no 'recieved'"):
        _ = recording.recieved
