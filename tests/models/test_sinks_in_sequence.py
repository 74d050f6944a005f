"""Training with the sinks in the sequence: the same model as with a prefix, and as the masked
form.
"""

import copy

import pytest
import torch
from test_diffusion_lm import (
    ATTENTION,
    FAMILIES,
    SeenMasks,
    TrueFloat64,
    assert_same_gradients,
    build,
    compare,
    gradients,
    ragged,
)
from torch import nn

from refusals import refused
from sinklab.core.attention import watching
from tiny_models import checkpointed

pytestmark = pytest.mark.ring("extras")


def model_of(sink=("token", 2, "front"), **settings):
    model = build(sink, **settings).train()
    model.sink_form = "sequence"
    return model


def lengths(model, *args, **settings):
    """(queries, keys) of the attention calls of one evaluation."""
    with SeenMasks() as seen:
        model(*args, **settings)
    return {call[:2] for call in seen.calls}


@pytest.mark.parametrize("family", FAMILIES)
@ATTENTION
def test_every_backbone_with_a_gate(family, impl):
    ids, mask = ragged()
    compare(model_of(family=family, gate="elementwise", impl=impl), ids, mask, 1e-12)


@pytest.mark.parametrize("side", ["front", "end"])
@ATTENTION
def test_causal_and_visible_equal_the_prefix_form(impl, side):
    model = model_of(("token", 2, side), impl=impl)
    ids, mask = ragged()
    visible = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(4)) < 0.5
    for settings in (
        {"causal": True},
        {"causal": True, "attention_mask": mask},
        {"visible": visible},
        {"visible": visible[0], "attention_mask": mask, "causal": True},
    ):
        with TrueFloat64():
            inside, prefix = (model(ids, **settings).logits, model.eval()(ids, **settings).logits)
        model.train()
        real = (
            mask.bool() if "attention_mask" in settings else torch.ones_like(mask, dtype=torch.bool)
        )
        assert (inside - prefix)[real].abs().max() <= 1e-12 * prefix.abs().max()


def test_a_causal_pass_needs_no_mask():
    with SeenMasks() as seen:
        model_of()(ragged()[0], causal=True)
    assert all(mask is None and causal for _, _, mask, causal in seen.calls)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo looks
@pytest.mark.slow
def test_checkpointing_compilation_and_autocast_keep_it():
    for change, precision, tolerance in [
        (checkpointed, False, 1e-9),
        (lambda model: model.model.compile(backend="aot_eager", dynamic=False), False, 1e-4),
        (lambda model: None, True, 2e-2),
    ]:
        plain = model_of(("zero", 2, "end"), dtype=torch.float32, std=0.1, gate="elementwise")
        changed = copy.deepcopy(plain)
        plain.sink_form = "prefix"
        change(changed)
        (ids, mask), losses = ragged(), []
        with torch.autocast("cpu", torch.bfloat16, enabled=precision):
            for model in (plain, changed):
                losses.append(model(ids, mask, labels=ids.where(mask.bool(), -100)).loss)
        expected, loss = losses
        assert abs(loss - expected) <= max(tolerance, 1e-6) * expected
        grads = gradients(plain, expected)
        assert grads["sink_embeddings"].abs().max() > 0
        assert_same_gradients(gradients(changed, loss), grads, max(tolerance, 1e-5))
    torch.compiler.reset()


def test_it_is_for_training_alone():
    model = model_of()
    ids, _ = ragged()
    apart = {(1, 1), (9, 11)}
    assert lengths(model, ids) == {(11, 11)}
    with torch.no_grad():
        assert lengths(model, ids) == apart
    with watching(model):
        assert lengths(model, ids) == apart
    assert lengths(model.eval(), ids) == apart
    model.train().sink_form = "auto"
    assert lengths(model, ids) == apart
    assert lengths(model_of(("none", 0, "front")), ids) == {(9, 9)}


class Wrapped(nn.Module):
    """An output projection as adapters leave it: a hook on what is inside no longer sees all of its
    inputs.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states) + 0.1 * states.roll(1, dims=-1)


def test_a_wrapped_projection_gets_the_prefix():
    model = model_of()
    attention = model.model.layers[1].self_attn
    attention.o_proj = Wrapped(attention.o_proj)
    ids, _ = ragged()
    compare(model, ids, None, 1e-12)
    assert lengths(model, ids) == {(1, 1), (9, 11)}


def test_an_interrupted_call_leaves_nothing_behind():
    model = model_of()
    ids, _ = ragged()
    expected = model(ids).logits

    def stop(module, args):
        raise KeyboardInterrupt

    projection = model.model.layers[1].self_attn.o_proj
    handle = projection.register_forward_pre_hook(stop, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model(ids)
    handle.remove()
    again = copy.deepcopy(model)
    assert torch.equal(again(ids).logits, expected)
    assert torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)


def test_an_unknown_form_is_refused():
    model = model_of()
    model.sink_form = "mask"
    refused("sequence, but is 'mask'", model, ragged()[0])


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo looks
@pytest.mark.slow
@pytest.mark.parametrize(
    "sinks, form",
    [
        (("none", 0, "front"), "prefix"),
        (("token", 1, "front"), "prefix"),
        (("token", 2, "end"), "sequence"),
    ],
)
def test_a_compiled_pass_in_which_nothing_is_hidden_has_no_mask(sinks, form):
    """With one, flash attention cannot run: transformers 5.17 makes one in compiled code, of a
    text's positions.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model = model_of(sinks, dtype=torch.float32).train()
    model.sink_form = form
    torch.compiler.reset()
    model.model.compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), dynamic=False)
    ids = torch.randint(0, 20, (2, 9))
    model(ids, labels=ids).loss.backward()
    called = [
        node
        for graph in graphs
        for node in graph.graph.nodes
        if "attention_for_cpu.default" in str(node.target)
    ]
    assert called
    assert all(node.kwargs.get("attn_mask") is None for node in called)
    torch.compiler.reset()
