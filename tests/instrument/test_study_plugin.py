"""The plug-in of the study of sinks: neurons of a sink moved to another position, and values that
stand in; against dense float64 attention.
"""

# B batch, L layers, S positions, F neurons
import sys
from pathlib import Path

import torch

from conformance.probing import check_intervention
from sinklab.core.registry import interventions, removals
from sinklab.lab.files import load_plugin
from tiny_diffusion import tiny_model

PLUGIN = Path(__file__).parents[2] / "studies" / "what_sinks_do" / "plugin.py"


def test_the_edit_holds_the_contract(scratch, tmp_path):
    scratch(interventions, removals)
    load_plugin(PLUGIN)
    model, file = tiny_model(), tmp_path / "neurons.safetensors"
    sys.modules["sinklab_plugin_plugin"].save_neurons(model, file, 4, torch.arange(1, 13)[None])
    check_intervention(f"move_neurons:file={file}", model)
