"""A trace of one model changes nothing in other models and in copies, in any thread; another thread
is refused.
"""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from refusals import refused, refusing
from sinklab.core.attention import is_watched
from sinklab.core.instrument import intervene, trace
from sinklab.core.subject import Canvas, denoise
from sinklab.extras.fast import decoder
from sinklab.lab.caching import DualCache
from sinklab.lab.measures import MaskSinks
from tiny_diffusion import tiny_model
from tiny_models import checkpointed

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
NEW = 6


@pytest.fixture
def other_thread():
    with ThreadPoolExecutor(1, thread_name_prefix="second") as pool:
        yield lambda deed: pool.submit(deed).result()


@pytest.fixture(params=["one thread", "two threads"])
def run(request, other_thread):
    """Calls what it is given, here or in a second thread."""
    return other_thread if request.param == "two threads" else lambda deed: deed()


def traced(function, *models):
    """What the function returns inside traces of these models, which were run and are run again."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(trace(model))
            model(IDS)
        result = function()
        for model in models:
            model(IDS)
    return result


def written(model, cache):
    start = Canvas.from_prompts(
        [[5, 6, 7, 8]], new_tokens=NEW, mask_id=model.config.mask_token_id, pad_id=0
    )
    return list(denoise(model.denoiser(), start, cache=cache, block_length=3))


def test_another_models_decoding_is_the_same_bit_for_bit(monkeypatch, run):
    cache = DualCache()
    model, other, taken, own = (
        tiny_model(1),
        tiny_model(1, seed=1),
        [],
        decoder.FastDecoder.__call__,
    )

    def spy(self, *args, **options):
        taken.append(self.decoder)
        return own(self, *args, **options)

    monkeypatch.setattr(decoder.FastDecoder, "__call__", spy)
    alone = written(model, cache)
    assert taken == [model.model] * NEW
    beside = traced(lambda: run(lambda: written(model, cache)), other)
    assert taken == [model.model] * (2 * NEW)
    for one, two in zip(alone, beside, strict=True):
        assert torch.equal(one.ids_BS, two.ids_BS)
        assert torch.equal(one.confidence_BS.nan_to_num(), two.confidence_BS.nan_to_num())


def test_another_models_training_is_the_same_bit_for_bit(other_thread):
    model, other = tiny_model(2).train(), tiny_model(1, seed=1)

    def loss_and_gradients():
        model.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    alone = loss_and_gradients()
    beside = traced(lambda: other_thread(loss_and_gradients), other)
    assert all(map(torch.equal, alone, beside))


def test_another_thread_that_runs_a_traced_model_is_refused(other_thread):
    model = tiny_model(1)
    with trace(model) as alone:
        model(IDS)
        model(IDS)
    message = "'MainThread' has .* this DiffusionLM .*'second_0'"

    def elsewhere(*_):
        assert is_watched(model)
        for run in (
            lambda: model(IDS),
            lambda: model.model(input_ids=IDS),
            lambda: written(model, DualCache()),
        ):
            refused(message, run)

    with trace(model) as recording, intervene(model):
        model(IDS)
        other_thread(elsewhere)
        # and while a forward is under way
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: other_thread(elsewhere))
        model(IDS)
        hook.remove()
    assert recording.layers == alone.layers and len(recording.received) == len(alone.received) == 2
    assert all(map(torch.equal, recording.received, alone.received))
    assert torch.equal(other_thread(lambda: model(IDS).logits), model(IDS).logits)


def test_another_thread_that_traces_a_traced_model_is_refused(other_thread):
    model, other = tiny_model(), tiny_model()

    def elsewhere():
        with refusing("'MainThread' has .*'second_0'"), trace(model):
            pass
        wrapper = nn.Sequential(model)
        with refusing("'MainThread' has .*'second_0'"), trace(wrapper):
            wrapper(IDS)
        with trace(other):
            other(IDS)

    with trace(model) as recording:
        model(IDS)
        other_thread(elsewhere)
        with trace(model):
            model(IDS)
    assert len(recording.received) == 2
    assert not is_watched(model) and not any(module._forward_hooks for module in model.modules())
    other_thread(lambda: traced(lambda: None, model))


def test_a_copy_made_while_a_model_is_traced_is_another_model(other_thread):
    model = tiny_model(1)
    with trace(model) as recording:
        model(IDS)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ]
        for twin in copies:
            assert not is_watched(twin)
            assert torch.equal(other_thread(lambda twin=twin: twin(IDS).logits), twin(IDS).logits)
        with trace(copies[0]) as own:
            copies[0](IDS)
    assert len(recording.received) == len(own.received) == 1
    assert torch.equal(recording.received[0], own.received[0])


def test_a_backward_pass_in_another_thread_replays_edited_layers(other_thread):
    """As on a GPU, whose backward pass has a thread of its own."""
    model = checkpointed(tiny_model(1))

    def gradients(run):
        model.zero_grad()
        with intervene(model, MaskSinks(k=1)) as log:
            model(IDS)
            loss = model(IDS, labels=IDS).loss
            run(loss.backward)
        assert log.forwards == 2
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(lambda deed: deed()), gradients(other_thread)))
