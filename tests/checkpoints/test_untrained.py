"""Untrained twins: the same tensors, none of what was learned."""

import pytest
import torch

from refusals import refused
from sinklab.core.subject import DiffusionLM
from sinklab.lab.checkpoints.controls import UNTRAINED, initialised
from sinklab.lab.records.storage import weights_hash
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama


def untrained_twins(loaded, seed=0):
    return {name: make(loaded, seed) for name, make in UNTRAINED.items()}


def trained(**settings):
    """A model with a sink and gates whose numbers are those of no fresh one."""
    loaded = tiny_loaded(2, gate="elementwise", **settings)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.5).add_(0.1)
    return loaded


@pytest.mark.parametrize("loaded", [trained(), tiny_llama()], ids=["diffusion", "causal"])
def test_twins_have_the_tensors_of_the_model_and_leave_it_alone(loaded):
    before = weights_hash(loaded.model.state_dict())
    twins = untrained_twins(loaded, 3)
    assert weights_hash(loaded.model.state_dict()) == before
    ours = loaded.model.state_dict()
    for twin in twins.values():
        theirs = twin.model.state_dict()
        assert {name: tensor.shape for name, tensor in theirs.items()} == {
            name: ours[name].shape for name in ours
        }
        assert type(twin.model) is type(loaded.model)
        assert not any(
            torch.equal(theirs[name], ours[name]) for name in ours if name.endswith("proj.weight")
        )
        assert twin.name.startswith(loaded.name)
        assert not twin.model.training
    permuted = twins["permuted"].model.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(
            permuted[name].flatten().sort().values, tensor.flatten().sort().values
        ), name
    # rows are mixed with rows, not only among themselves
    name = next(name for name in ours if name.endswith("q_proj.weight"))
    assert not torch.equal(permuted[name].sort(1).values, ours[name].sort(1).values)


def test_sinks_and_gates_are_permuted_and_initialised_like_all_others():
    loaded = trained(gate_bias=1.0)
    twins = {name: twin.model.state_dict() for name, twin in untrained_twins(loaded).items()}
    ours = loaded.model.state_dict()
    for name in ("sink_embeddings", "gates.0.weight"):
        assert not any(torch.equal(tensors[name], ours[name]) for tensors in twins.values())
    assert torch.equal(twins["initialised"]["gates.0.bias"], torch.ones(32))
    assert torch.equal(twins["initialised"]["model.norm.weight"], torch.ones(32))
    weight = twins["initialised"]["model.layers.1.mlp.up_proj.weight"]
    assert abs(weight.std().item() / 0.3 - 1) < 0.1, "as wide as the config says"


def test_twins_follow_from_the_seed_alone():
    loaded = trained()
    state = torch.get_rng_state()
    one, same, other = (untrained_twins(loaded, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for name in one:
        first, again, different = (
            weights_hash(twins[name].model.state_dict()) for twins in (one, same, other)
        )
        assert first == again != different
    # a model that was made under this very seed is no twin of itself
    fresh = tiny_loaded(seed=1)
    twin = initialised(fresh, 1)
    assert weights_hash(twin.model.state_dict()) != weights_hash(fresh.model.state_dict())


class Foreign(DiffusionLM):
    """A class that its config does not make."""

    def __init__(self, config, tables):
        raise AssertionError("never made here")


def test_a_class_that_cannot_initialise_itself_is_refused():
    loaded = tiny_loaded()
    loaded.model.__class__ = Foreign
    refused(r"^Foreign .*'tables'.*|no freshly initialised twin", initialised, loaded)
