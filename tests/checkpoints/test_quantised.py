"""Weights that a quantiser stores: made by torchao at loading, read from a folder, refused by name
where neither goes.

Where torchao is not installed, a stand-in that rounds takes its place for what is ours.
"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import sinklab
from published_toys import edit
from refusals import refused
from sinklab.core.models import DiffusionLM
from sinklab.core.probing import intervene, trace
from sinklab.lab.checkpoints import describe, untrained_twins
from sinklab.lab.measures import MaskSinks
from sinklab.lab.records import weights_hash
from tiny_diffusion import TEXT, save_tiny, tiny_model

IDS = torch.arange(20, 36)[None]
has_torchao = importlib.util.find_spec("torchao") is not None
with_torchao = [
    pytest.mark.skipif(not has_torchao, reason="torchao is not installed"),
    # it warns of what torch will do away with
    pytest.mark.filterwarnings("ignore"),
]


def rounding(monkeypatch):
    """A torchao that knows int8 alone: numbers are rounded to 127 steps a row, and tensors stay
    what they are.
    """

    def quantize(model, config, chooses):
        for path, module in model.named_modules():
            if chooses(module, path):
                step_O1 = module.weight.detach().abs().amax(1, keepdim=True) / 127
                module.weight = nn.Parameter((module.weight.detach() / step_O1).round() * step_O1)

    def no_int4():
        raise ImportError("Requires another library")

    torchao = ModuleType("torchao")
    torchao.__version__ = "0.0"
    torchao.quantization = SimpleNamespace(
        quantize_=quantize, Int8WeightOnlyConfig=object, Int4WeightOnlyConfig=no_int4
    )
    monkeypatch.setitem(sys.modules, "torchao", torchao)


def test_the_linear_layers_but_the_head_are_stored_and_the_rest_keeps_the_type_of_the_config(
    tmp_path, monkeypatch
):
    folder = save_tiny(tmp_path / "model", 1)
    plain = sinklab.load(folder)
    rounding(monkeypatch)
    lm = sinklab.load(folder, dtype="int8")
    assert (lm.model.dtype, lm.stored, plain.stored) == (torch.float32, "int8", "")
    assert lm.notes == ("weights of linear layers but the head are stored in int8 (torchao 0.0)",)
    before = plain.model.state_dict()
    changed = {
        name
        for name, tensor in lm.model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    assert changed == {name for name in before if "proj" in name}
    refused(r"torchao 0\.0 does not run int4", sinklab.load, folder, dtype="int4")


def test_without_torchao_the_remedy_is_named(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "torchao", None)
    refused("dtype='int8' needs torchao", sinklab.load, folder, dtype="int8")


def test_a_folder_whose_quantiser_is_not_there_is_refused_and_described_all_the_same(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    refused(r"is quantised \(awq\)", sinklab.load, tmp_path)
    assert describe(tmp_path).notes == ("its weights are quantised: awq",)


class TestTorchao:
    """With the library itself."""

    pytestmark = with_torchao

    def test_a_model_in_eight_bits_is_traced_edited_and_written_with(self, tmp_path):
        folder = save_tiny(tmp_path / "model", 1)
        plain, lm = sinklab.load(folder), sinklab.load(folder, dtype="int8")
        assert type(lm.model.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao")
        with torch.no_grad():
            expected, logits = plain.model(IDS).logits, lm.model(IDS).logits
        assert 0 < (logits - expected).abs().max() < 0.1 * expected.abs().max()
        with (
            torch.no_grad(),
            trace(lm.model, ("received", "value_norm", "row_entropy")) as recording,
        ):
            assert torch.equal(lm.model(IDS).logits, logits)
        assert recording.received[0].sum(-1).allclose(torch.tensor(float(IDS.shape[1])), atol=1e-3)
        with torch.no_grad(), trace(plain.model) as other:
            plain.model(IDS)
        assert recording.received[0].allclose(other.received[0], atol=0.2)
        wanted = IDS > 30
        assert lm.model.denoiser().is_fast
        assert lm.model.denoiser()(IDS, wanted).allclose(
            lm.model.denoiser(plain=True)(IDS, wanted), atol=1e-4
        )
        with intervene(lm.model, MaskSinks(k=1)) as log:
            lm.generate("The old man", 6, seed=0)
        assert len(log.removals) == 5
        assert lm.generate("The old man", 6, cache="dual", block_length=3).startswith("The old man")
        assert lm.loss(TEXT) == pytest.approx(plain.loss(TEXT), rel=0.05)
        assert weights_hash(lm.model.state_dict()) != weights_hash(plain.model.state_dict())
        refused("cannot be permuted as they are", untrained_twins, lm)

    def test_four_bits_run_or_are_refused_by_name(self, tmp_path):
        folder = save_tiny(tmp_path / "model")
        try:
            lm = sinklab.load(folder, dtype="int4")
        except ValueError as error:
            assert "does not run int4 weights of" in str(error)
        else:
            assert lm.model(IDS).logits.isfinite().all()

    def test_a_folder_that_torchao_wrote_gives_the_model_that_was_written(self, tmp_path):
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        save_tiny(tmp_path / "plain")
        how = TorchAoConfig(Int8WeightOnlyConfig())
        written = DiffusionLM.from_pretrained(tmp_path / "plain", quantization_config=how).eval()
        written.save_pretrained(tmp_path / "int8")
        lm = sinklab.load(tmp_path / "int8")
        assert (lm.stored, lm.notes) == ("torchao", ("its weights are quantised: torchao",))
        with torch.no_grad():
            assert torch.equal(lm.model(IDS).logits, written(IDS).logits)
