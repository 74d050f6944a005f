"""Weights that a quantiser stored: read from a folder by transformers, or refused by name."""

import importlib.util

import pytest
import torch

import sinklab
from published_toys import edit
from refusals import refused
from sinklab.core.instrument import intervene, trace
from sinklab.core.subject import DiffusionLM
from sinklab.lab.checkpoints import UNTRAINED, describe
from sinklab.lab.measures import MaskSinks
from sinklab.lab.records import weights_hash
from tiny_diffusion import TEXT, save_tiny, tiny_model

IDS = torch.arange(20, 36)[None]
has_torchao = importlib.util.find_spec("torchao") is not None


def test_a_folder_whose_quantiser_is_not_there_is_refused_and_described_all_the_same(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    refused(r"is quantised \(awq\)", sinklab.load, tmp_path)
    assert describe(tmp_path).notes == ("its weights are quantised: awq",)


def test_types_that_are_no_floating_point_are_no_type_of_weights(tmp_path):
    save_tiny(tmp_path)
    refused("dtype must be a floating point type", sinklab.load, tmp_path, dtype="int8")


@pytest.mark.skipif(not has_torchao, reason="torchao is not installed")
# it warns of what torch will do away with
@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_torchao_wrote_is_traced_edited_and_written_with():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    save_tiny("plain")
    how = TorchAoConfig(Int8WeightOnlyConfig())
    written = DiffusionLM.from_pretrained("plain", quantization_config=how).eval()
    written.save_pretrained("int8")
    plain, lm = sinklab.load("plain"), sinklab.load("int8")
    assert (lm.stored, lm.notes) == ("torchao", ("its weights are quantised: torchao",))
    with torch.no_grad(), trace(lm.model) as recording:
        assert torch.equal(lm.model(IDS).logits, written(IDS).logits)
    with torch.no_grad(), trace(plain.model) as other:
        plain.model(IDS)
    assert recording.received[0].allclose(other.received[0], atol=0.2)
    with intervene(lm.model, MaskSinks(k=1)) as log:
        lm.generate("The old man", 6, seed=0)
    assert len(log.removals) == 5
    assert lm.loss(TEXT) == pytest.approx(plain.loss(TEXT), rel=0.05)
    assert weights_hash(lm.model.state_dict()) != weights_hash(plain.model.state_dict())
    refused("cannot be permuted as they are", UNTRAINED["permuted"], lm)
