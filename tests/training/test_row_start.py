"""Rows that begin with a start token."""

import copy
from dataclasses import replace

import pytest
import torch

from refusals import refused
from sinklab import load
from sinklab.lab.data import begin_rows, pack, row_start
from sinklab.lab.records import open_run
from sinklab.lab.scoring import arm_losses, heldout_rows
from sinklab.lab.scoring.prompts import encode
from sinklab.lab.training import train, trainer
from sinklab.lab.training.text import prepare
from tiny_diffusion import tiny_tokenizer
from tiny_training import tiny_settings


@pytest.fixture(scope="module")
def settings(corpus):
    often = {"save_every": 4, "heldout_rows": 8, "steps": 12}
    return tiny_settings(corpus, row_start=True, sink_kind="token", sink_count=1, **often)


def test_rows_begin_with_a_start_token_that_is_given(settings):
    text = prepare(settings)
    start = row_start(text.tokenizer)
    assert start == [text.tokenizer.bos_token_id] == [len(tiny_tokenizer())], "behind all other ids"
    batch = trainer.NoisyCollator(0, 4, "low_discrepancy")(
        [text.training[number] for number in range(4)]
    )
    assert batch["input_ids"].shape == (4, settings.length)
    assert batch["input_ids"][:, 0].tolist() == start * 4
    assert not (batch["input_ids"][:, 1:] == start[0]).any()
    assert not batch["maskable"][:, 0].any()
    assert batch["maskable"][:, 1:].all()
    assert not batch["masked"][:, 0].any()
    assert batch["masked"].any()
    asked = trainer.asked_causally(batch)
    assert asked.sum().item() == 4 * (settings.length - 1), (
        "every token of text is predicted, the first one too"
    )


def test_rows_with_a_start_token_hold_the_same_text():
    tokenizer, documents = (
        copy.deepcopy(tiny_tokenizer()),
        ["the sea and the boat", "a wind", "the old man by the sea"],
    )
    plain_RS = pack(documents, tokenizer, 5)
    begin_rows(tokenizer)
    ids_RS = pack(documents, tokenizer, 6)
    assert torch.equal(ids_RS[:, 1:], plain_RS)


def test_a_model_remembers_how_its_rows_began(settings):
    here = replace(settings, steps=2, heldout=settings.corpus)
    loaded = load(train(here))
    start = row_start(loaded.needed_tokenizer())
    assert start == [loaded.special.bos]
    assert list(encode(loaded, "the sea").ids[:1]) == start
    text = heldout_rows(loaded, settings.corpus, rows=8, length=settings.length)
    assert text.ids_RS[:, 0].tolist() == start * 8
    seen = []
    loaded.model.get_input_embeddings().register_forward_pre_hook(
        lambda table, args: seen.append(args[0])
    )
    (one, *_) = arm_losses(loaded, {"none": []}, text.ids_RS.tolist())
    assert one.loss > 0
    assert all((ids_BS[:, 0] == start[0]).all() for ids_BS in seen), "noise spares it"
    assert any((ids_BS == loaded.special.mask).any() for ids_BS in seen)
    measured = open_run("run").table("heldout")
    assert measured["tokens"].item() == 8 * (settings.length - 1)
    # a run that goes on from it reads such rows too
    onward = replace(here, tokenizer=None, init_from="run/model", row_start=False)
    assert prepare(onward, tokenizer=loaded.tokenizer).training.maskable_RS is not None
    refused(
        "begin with a start token",
        prepare,
        replace(onward, streaming=True),
        tokenizer=loaded.tokenizer,
    )
