"""A model that accelerate spreads over devices is traced, edited and decoded as one that lies on
one device.

No second device is here. What `device_map` does to a model that is larger than its devices is done
on a CPU: its weights lie on the meta device, and a layer has them only while it runs.
"""

import accelerate
import pytest
import torch

from sinklab import load, trace
from sinklab.core import compat
from sinklab.core.instrument import intervene
from sinklab.lab.measures import MaskSinks
from tiny_diffusion import save_tiny

IDS = torch.randint(3, 30, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[0, 2], ids=["no sink", "two sinks"])
def models(request, tmp_path):
    """A model, and the same one whose layers have no weights while they do not run."""
    folder = save_tiny(tmp_path, request.param)
    whole, spread = (load(folder, dtype="float64").model for _ in range(2))
    for layer in spread.model.layers:
        accelerate.cpu_offload(layer, torch.device("cpu"))
    assert {one.device.type for one in spread.model.layers.parameters()} == {"meta"}
    return whole, spread


@torch.inference_mode()
def test_statistics_and_edits_of_a_spread_model_are_those_of_a_whole_one(models):
    found = []
    for model in models:
        with intervene(model, MaskSinks(1)) as log, trace(model) as recording:
            model(IDS)
            logits = model(IDS).logits
        found.append(
            (logits, recording.received, recording.value_norm, log.removals[-1].columns_BLHM)
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert not torch.equal(found[0][0], models[0](IDS).logits)


@pytest.mark.parametrize("cache", [None, "dual"])
def test_a_spread_model_writes_what_a_whole_one_writes(models, cache):
    how = {"max_new_tokens": 8, "block_length": 4, "cache": cache}
    one, other = (model.generate(IDS, **how) for model in models)
    assert torch.equal(one, other)


def test_a_model_whose_heads_are_divided_over_processes_is_not_traced(monkeypatch):
    model = load("tiny").model
    assert not compat.is_divided(model)
    monkeypatch.setattr(model, "_tp_size", 2, raising=False)
    with pytest.raises(ValueError, match='device_map="auto"'), trace(model):
        pass
