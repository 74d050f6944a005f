"""The way through transformers' attention functions: what is recorded is what the way through SDPA records."""

from __future__ import annotations

import copy

import pytest
import torch

from sinklab.compat import attention_of
from sinklab.probing import MaskSinks, intervene, trace
from sinklab.probing.tap import Tap
from tiny_models import HandWritten, llama

IDS = torch.randint(1, 30, (2, 10), generator=torch.Generator().manual_seed(1))
LEFT = torch.ones(2, 10, dtype=torch.long)
LEFT[0, :4] = 0
ALL = ("received", "value_norm", "row_entropy", "last_row", "massive_activations")


@pytest.fixture
def by_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is tapped by hooks and a mode over its whole forward."""
    monkeypatch.setattr("sinklab.probing.tap.met", lambda modules, inside: None)


def recorded(model: torch.nn.Module, **given: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with trace(model, ALL) as recording, intervene(model, MaskSinks(k=1)) as log, torch.no_grad():
        logits = model(IDS, **given).logits
        logits = model(IDS, **given).logits
    arrays = {name: torch.as_tensor(recording.array(name)) for name in ALL}
    return logits, arrays | {"gone": log.removals[-1].columns_BLHM}


@pytest.mark.parametrize("padded", [False, True])
def test_both_ways_record_the_same(padded: bool, request: pytest.FixtureRequest) -> None:
    model, given = llama(), {"attention_mask": LEFT} if padded else {}
    logits, narrow = recorded(model, **given)
    request.getfixturevalue("by_hooks")
    others, wide = recorded(model, **given)
    assert torch.equal(logits, others)
    for name, found in wide.items():
        torch.testing.assert_close(narrow[name], found, rtol=0, atol=0, equal_nan=True)


def test_nothing_but_attention_is_heard_of_a_model_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, hear = [], Tap.__torch_function__

    def listen(self: Tap, func: object, *given: object) -> object:
        heard.append(func)
        return hear(self, func, *given)

    monkeypatch.setattr(Tap, "__torch_function__", listen)
    model = llama()
    with trace(model), torch.no_grad():
        assert not model.model.layers[0].self_attn._forward_hooks
        model(IDS)
    assert torch.nn.functional.linear not in heard and len(heard) <= 12 * 2


def test_the_model_keeps_its_attention_and_so_does_its_copy() -> None:
    model = llama()
    plain = model(IDS).logits
    with trace(model) as outer:
        with trace(model.model):
            twin = copy.deepcopy(model)
            assert attention_of(model.config) == "sdpa" != model.config._attn_implementation
            model(IDS)
        assert torch.equal(twin(IDS).logits, plain)
        assert torch.equal(model(IDS).logits, plain)
    assert model.config._attn_implementation == "sdpa" and len(outer.received) == 2
    # the copy asks for the same function under the watched name, by which nobody hears of it any more
    assert attention_of(twin.config) == "sdpa" and torch.equal(twin(IDS).logits, plain)
    with trace(twin) as recording:
        twin(IDS)
    assert len(recording.received) == 1


def test_models_that_share_a_config_leave_each_other_alone() -> None:
    one = llama()
    two = type(one)(one.config).eval()
    with trace(one) as first:
        with pytest.raises(ValueError, match="the model was not run inside"), trace(two):
            one(IDS)
        assert one.config._attn_implementation != "sdpa"
        two(IDS)
        one(IDS)
    assert one.config._attn_implementation == "sdpa"
    assert len(first.received) == 2


def test_a_model_that_attends_by_itself_is_hooked() -> None:
    model = HandWritten()
    with trace(model) as recording:
        model(IDS)
    assert len(recording.received) == 1
