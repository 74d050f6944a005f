"""Training with attention in blocks: its noise, its loss, its limits, and from a causal model in
one command.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch.testing import assert_close

import sinklab
from refusals import refused
from sinklab.lab.data.noise import corrupt, masked_token_loss
from sinklab.lab.training import train
from tiny_diffusion import tiny_model
from tiny_training import repeated_text, tiny_settings


def rows(count=8, length=16):
    ids_RS = torch.randint(3, 200, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids_S, "row": torch.tensor(row)} for row, ids_S in enumerate(ids_RS)]


def test_the_loss_weighs_each_token_by_the_time_of_its_block():
    model = tiny_model(block_length=4).double()
    ids_BS = torch.stack([row["input_ids"] for row in rows()])
    t_BS = (
        torch.rand(8, 4, generator=torch.Generator().manual_seed(2))
        .clamp(min=0.2)
        .repeat_interleave(4, 1)
    )
    noisy_BS, masked_BS = corrupt(ids_BS, t_BS, mask_id=model.config.mask_token_id)
    logits_MV = model(noisy_BS, logits_to_keep=masked_BS, clean=ids_BS).logits
    loss = masked_token_loss(logits_MV, ids_BS, masked_BS, t_BS)
    cost_M = torch.nn.functional.cross_entropy(logits_MV, ids_BS[masked_BS], reduction="none")
    assert_close(loss, (cost_M / t_BS[masked_BS]).sum() / ids_BS.numel())


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
