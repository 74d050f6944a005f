"""The core runs where the folder of fast paths is not there, and gives the numbers that it gives
with it.
"""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Olmo2Config, Olmo2Model

import sinklab
from launched import launch
from sinklab.core.registry import (
    Registry,
    fast_decoders,
    fast_losses,
    fast_passes,
    fast_path,
)
from sinklab.extras.fast.decoder import FastDenoiser

ANEW = """
import sys

for name in [name for name in sys.modules if name.startswith("sinklab")]:
    del sys.modules[name]
"""
SCRIPT = """
import json
import torch
from transformers import LlamaConfig
from sinklab.core.attention import Scores, attention_statistics
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.core.subject import Canvas, denoise

backbone = LlamaConfig(vocab_size=41, hidden_size=32, intermediate_size=48,
                       num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3)
torch.manual_seed(1)
config = DiffusionLMConfig(backbone, mask_token_id=40, sink_kind="token", sink_count=1)
model = DiffusionLM(config).double()
canvas = Canvas.from_prompts([[5, 6, 7], [8]], new_tokens=8, mask_id=40, pad_id=0)
model.eval()
texts = []
for cache in ("none", "prefix", "dual"):
    *_, step = denoise(model.denoiser(canvas.attention_BS), canvas, cache=cache, block_length=4)
    texts.append(step.ids_BS.tolist())
scores = torch.log_softmax(model.denoiser(canvas.attention_BS)(canvas.ids_BS, canvas.open_BS), -1)
call = Scores.of(torch.ones(1, 1, 600, 4), torch.eye(600, 4)[None, None])
received = attention_statistics(call, ("received",))["received"]
model.train()
optimizer, labels = torch.optim.SGD(model.parameters(), 0.1), torch.full_like(canvas.ids_BS, -100)
labels[canvas.open_BS] = 3
losses = []
for _ in range(3):
    loss = model(canvas.ids_BS, canvas.attention_BS, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
said = {"texts": texts, "score": scores.sum().item(), "received": received.sum().item()}
print(json.dumps({**said, "losses": losses}))
"""


@pytest.mark.slow
def test_the_core_decodes_scores_and_trains_without_the_folder(tmp_path, capsys, python):
    package = Path(sinklab.__file__).parent
    shutil.copytree(
        package, tmp_path / "sinklab", ignore=shutil.ignore_patterns("extras", "__pycache__")
    )
    assert not (tmp_path / "sinklab" / "extras").exists()
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    done = launch(python, "-c", ANEW + SCRIPT, PYTHONPATH=str(tmp_path))
    without = json.loads(done.stdout)
    runpy.run_path(str(tmp_path / "script.py"))
    with_it = json.loads(capsys.readouterr().out)
    assert without["texts"] == with_it["texts"]
    assert without["score"] == pytest.approx(with_it["score"], rel=1e-9)
    assert without["received"] == pytest.approx(with_it["received"], rel=1e-4)
    assert without["losses"] == pytest.approx(with_it["losses"], rel=1e-9)


def test_every_purpose_has_its_fast_path():
    purposes = (
        fast_decoders,
        fast_losses,
        fast_passes,
    )
    assert [list(paths) for paths in purposes] == [
        ["layers"],
        ["one_pass"],
        ["triton"],
    ]
    assert fast_path(Registry("fast nothing", "absent.folder"), "anything") is None


def test_layers_of_another_kind_are_asked_before_they_are_read():
    """OLMo-2 norms what a layer adds, not what it reads: it has no input_layernorm."""
    config = Olmo2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = torch.nn.Module()
    model.model = Olmo2Model(config)
    assert not hasattr(model.model.layers[0], "input_layernorm")
    assert FastDenoiser.serving(model, None) is None
    assert fast_path(fast_decoders, model, None) is None
