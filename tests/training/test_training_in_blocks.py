"""Training with attention in blocks, and from a causal model in one command."""

import json
from dataclasses import replace
from pathlib import Path

import sinklab
from refusals import refused
from sinklab.lab.training import train
from tiny_training import repeated_text, tiny_settings


def test_a_model_in_blocks_is_trained_and_writes(tmp_path):
    base = tiny_settings(repeated_text(tmp_path), steps=6, sink_kind="token", sink_count=1)
    train(replace(base, out="small", causal_start=0.3, block_length=4))
    config = json.loads(Path("small/model/config.json").read_text())
    assert config["block_length"] == 4
    loaded = sinklab.load("small/model")
    written = loaded.model.generate([[5, 6, 7]], max_new_tokens=6)
    assert not (written == loaded.model.config.mask_token_id).any()


def test_from_a_causal_model_and_on_from_blocks(tmp_path):
    text = repeated_text(tmp_path)
    causal = tiny_settings(text, steps=1, objective="autoregressive", out="causal")
    train(causal)
    train(tiny_settings(text, steps=1, out="a2d", init_from="causal/model", block_length=4))
    onward = tiny_settings(text, steps=1, out="more", init_from="a2d/model")
    refused("blocks of 4", train, replace(onward, objective="autoregressive"))
    train(onward)
    assert sinklab.load("more/model").model.config.block_length == 4
