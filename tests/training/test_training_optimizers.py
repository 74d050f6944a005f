"""Muon beside AdamW, and rows that begin with a start token."""

import copy
from dataclasses import replace

import pytest
import torch
from ran import interrupted
from test_training_resume import assert_same

from refusals import refused
from sinklab import load
from sinklab.lab.data import begin_rows, pack_with_documents, row_start
from sinklab.lab.records import open_run
from sinklab.lab.scoring import heldout_rows, row_losses
from sinklab.lab.scoring.prompts import encode
from sinklab.lab.training import run, settings_of, train, trainer
from sinklab.lab.training.model import MuonAndAdamW
from sinklab.lab.training.text import prepare
from tiny_diffusion import tiny_tokenizer
from tiny_training import tiny_settings


@pytest.fixture(scope="module")
def settings(corpus):
    often = {"eval_every": 6, "save_every": 4, "heldout_rows": 8, "steps": 12}
    return tiny_settings(
        corpus, optimizer="muon", row_start=True, sink_kind="token", sink_count=1, **often
    )


def made(settings, monkeypatch):
    """The Trainer of a run of these settings."""
    kept = []

    class Kept(trainer.DiffusionTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            kept.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(run, "DiffusionTrainer", Kept)
        train(settings)
    return kept[0]


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(settings, tmp_path, monkeypatch):
    used = made(replace(settings, steps=2, muon_lr=0.004, out=str(tmp_path / "run")), monkeypatch)
    optimizer = used.optimizer.optimizer
    adamw, muon = optimizer.parts
    names = {id(weight): name for name, weight in used.model.named_parameters()}
    had = {
        kind: {names[id(weight)] for group in part.param_groups for weight in group["params"]}
        for kind, part in (("adamw", adamw), ("muon", muon))
    }
    assert had["muon"] == {name for name in names.values() if "_proj" in name}
    assert had["adamw"] == set(names.values()) - had["muon"]
    spared = {
        names[id(one)]
        for group in adamw.param_groups
        if not group["weight_decay"]
        for one in group["params"]
    }
    assert spared == {name for name in had["adamw"] if "embed_tokens" not in name}
    rates = (
        {group["initial_lr"] for group in adamw.param_groups},
        {group["initial_lr"] for group in muon.param_groups},
    )
    assert rates == ({0.01}, {0.004})
    assert {group["lr"] / group["initial_lr"] for group in optimizer.param_groups} == {0.1}, (
        "one schedule for all"
    )


def test_a_step_is_that_of_torchs_own_optimizers(settings):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())

    def optimizers(model):
        return torch.optim.AdamW([model.bias], lr=0.1), torch.optim.Muon([model.weight], lr=0.1)

    together, apart = MuonAndAdamW(*optimizers(ours)), optimizers(theirs)
    for number in range(4):
        if number == 2:
            kept = together.state_dict()
            together = MuonAndAdamW(*optimizers(ours))
            together.load_state_dict(kept)
            together.param_groups[0]["lr"] = apart[0].param_groups[0]["lr"] = 0.05
        for model in (ours, theirs):
            model.zero_grad()
            model(torch.arange(6.0)).square().sum().backward()
        together.step()
        for part in apart:
            part.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.slow
def test_a_run_with_muon_goes_on_to_the_same_end(settings, tmp_path, monkeypatch):
    here = replace(settings, monitor_every=5, monitor_rows=2, out=str(tmp_path / "run"))
    interrupted(here, 7)
    refused("optimizer: 'muon' → 'adamw'", train, replace(here, optimizer="adamw", resume=True))
    train(replace(here, resume=True))
    train(replace(here, out=str(tmp_path / "whole")))
    assert_same(tmp_path / "run", tmp_path / "whole")
    assert settings_of(tmp_path / "run") == replace(here, out=str(tmp_path / "run"))


def test_rows_begin_with_a_start_token_that_is_given(settings, tmp_path):
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
    plain_RS, owners_RS = pack_with_documents(documents, tokenizer, 5)
    begin_rows(tokenizer)
    ids_RS, numbers_RS = pack_with_documents(documents, tokenizer, 6)
    assert torch.equal(ids_RS[:, 1:], plain_RS)
    assert torch.equal(numbers_RS[:, 1:], owners_RS)
    assert (numbers_RS[:, 0] == 0).all()


@pytest.mark.parametrize("objective", ["diffusion", "autoregressive"])
def test_a_model_remembers_how_its_rows_began(settings, tmp_path, objective):
    plain = {} if objective == "diffusion" else {"sink_kind": "none", "sink_count": 0}
    here = replace(
        settings,
        steps=2,
        objective=objective,
        heldout=settings.corpus,
        out=str(tmp_path / "run"),
        **plain,
    )
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
    assert row_losses(loaded, text.ids_RS).isfinite().all()
    assert all((ids_BS[:, 0] == start[0]).all() for ids_BS in seen), "noise spares it"
    if objective == "diffusion":
        assert any((ids_BS == loaded.special.mask).any() for ids_BS in seen)
    measured = open_run(tmp_path / "run").table("heldout")
    assert measured["tokens"].item() == 8 * (settings.length - 1)
    # a run that goes on from it reads such rows too
    onward = replace(
        here, tokenizer=None, init_from=str(tmp_path / "run" / "model"), row_start=False
    )
    assert prepare(onward, tokenizer=loaded.tokenizer).training.maskable_RS is not None
    refused(
        "begin with a start token",
        prepare,
        replace(onward, streaming=True),
        tokenizer=loaded.tokenizer,
    )
