"""The plug-in of the study of sinks: neurons of a sink moved to another position, and values that
stand in; against dense float64 attention.
"""

# B batch, L layers, S positions, F neurons
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from conformance.probing import check_intervention
from sinklab import intervene
from sinklab.core.registry import interventions, removals
from sinklab.lab.files import load_plugin
from sinklab.lab.scoring import state_records
from tiny_diffusion import tiny_model
from tiny_models import llama

PLUGIN = Path(__file__).parents[2] / "studies" / "what_sinks_do" / "plugin.py"


@pytest.fixture
def plugin(monkeypatch):
    """The plug-in; what it registers is forgotten afterwards."""
    for known in (interventions, removals):
        monkeypatch.setattr(known, "_classes", dict(known._all()))
    load_plugin(PLUGIN)
    yield sys.modules["sinklab_plugin_plugin"]
    del sys.modules["sinklab_plugin_plugin"]


def test_the_edit_holds_the_contract(plugin, tmp_path):
    model, file = tiny_model(), tmp_path / "neurons.safetensors"
    plugin.save_neurons(model, file, 4, torch.arange(1, 13)[None])
    check_intervention(f"move_neurons:file={file}", model)


@contextmanager
def inputs(modules, change):
    """What these modules read, or `change` of it and the number of the module."""
    hooks = [
        module.register_forward_pre_hook(lambda _module, given, n=n: (change(n, given[0]),))
        for n, module in enumerate(modules)
    ]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("seed", [None, 7])
def test_neurons_of_a_sink_move_to_another_position(plugin, tmp_path, seed):
    model, ids_1S = llama(), torch.arange(1, 13)[None]
    file = tmp_path / "neurons.safetensors"
    plugin.save_neurons(model, file, 5, ids_1S, count=6, seed=seed)
    edit = plugin.MoveNeurons(file=str(file), to=2)
    with torch.no_grad(), intervene(model, edit) as log:
        found = model(ids_1S).logits
    readers = [layer.mlp.down_proj for layer in model.double().model.layers]
    acts = []
    with torch.no_grad(), inputs(readers, lambda _n, act: acts.append(act) or act):
        model(ids_1S)
    act_LSF = torch.cat(acts)
    median_LF = act_LSF.sort(1).values[:, 5]
    size_LF = torch.stack([reader.weight.square().sum(0).sqrt() for reader in readers])
    excess_LF = (act_LSF[:, 5] - median_LF).abs() * size_LF
    flags_LF = torch.zeros_like(excess_LF, dtype=torch.bool)
    order = excess_LF.flatten().argsort(descending=True)
    if seed is not None:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))
    flags_LF.view(-1)[order[:6]] = True

    def move(layer, act_BSF):
        act_BSF = act_BSF.clone()
        act_BSF[0, 2] = torch.where(flags_LF[layer], act_LSF[layer, 5], act_BSF[0, 2])
        act_BSF[0, 5] = torch.where(flags_LF[layer], median_LF[layer], act_BSF[0, 5])
        return act_BSF

    with torch.no_grad(), inputs(readers, move):
        expected = model(ids_1S).logits
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    moved = {one.layer for one in state_records(log)}
    assert moved == set(flags_LF.any(1).nonzero()[:, 0].tolist())
    assert not any(reader._forward_pre_hooks for reader in readers)
