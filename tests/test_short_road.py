"""What `sinklab.load` returns answers by itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import sinklab
from sinklab.checkpoints import Loaded
from sinklab.probing import MaskSinks, intervene
from sinklab.scoring import LikelihoodSettings, rolling, score
from tiny_diffusion import TEXT, save_tiny, tiny_loaded
from tiny_llama import tiny_llama


def test_a_loaded_model_tells_what_hiding_the_keys_of_one_head_costs(tmp_path: Path) -> None:
    lm = sinklab.load(save_tiny(tmp_path / "model"))
    assert isinstance(lm, Loaded)
    ids = lm.tokenizer(TEXT)["input_ids"]
    edits = [MaskSinks(k=1, layers=[1], heads=[3])]
    clean, edited = lm.loss(TEXT), lm.loss(TEXT, edits=edits)
    assert abs(edited - clean) > 1e-4
    assert edited == pytest.approx(lm.loss(ids, edits=["mask_sinks:k=1,layers=1,heads=3"]))
    for loss, some in ((clean, ()), (edited, edits)):
        scored = rolling(lm, ids, LikelihoodSettings(samples=32), edits=some)
        assert loss == pytest.approx(-scored.logprob / len(ids))
    assert lm.loss(TEXT, seed=1) != pytest.approx(clean, rel=1e-6)
    assert str(edited.scored.dose).startswith("1.00 keys a head")
    assert clean.scored.dose is None


def test_a_start_token_is_given_and_costs_nothing() -> None:
    loaded = tiny_loaded()
    lm = sinklab.short_road.LM(**vars(replace(loaded, special=replace(loaded.special, bos=9))))
    scored = score(loaded, [([9], [*range(20, 30)])], LikelihoodSettings(samples=32))[0]
    assert lm.loss([9, *range(20, 30)]) == pytest.approx(-scored.logprob / 10)
    assert lm.loss([*range(20, 30)]) != pytest.approx(-scored.logprob / 10, rel=1e-4)
    longer = [9, *([20, 21] * 40)]
    assert lm.loss(longer) == pytest.approx(lm.loss(longer[1:]))


def test_of_an_autoregressive_model_it_is_the_next_token_loss() -> None:
    loaded = tiny_llama()
    lm = sinklab.short_road.LM(**vars(loaded))
    ids = [loaded.special.bos if loaded.special.bos is not None else loaded.special.eos, *range(5, 25)]
    ids_1S = torch.tensor([ids])
    edit = MaskSinks(k=1, source="clean_pass", layers=[0])
    with torch.no_grad():
        whole = cross_entropy(loaded.model(ids_1S).logits[0, :-1], ids_1S[0, 1:])
        with intervene(loaded.model, edit) as log:
            with log.probing():
                loaded.model(ids_1S[:, :-1])
            hidden = cross_entropy(loaded.model(ids_1S[:, :-1]).logits[0], ids_1S[0, 1:])
    assert lm.loss(ids[1:]) == pytest.approx(whole.item(), rel=1e-5)
    assert lm.loss(ids[1:], edits=[edit]) == pytest.approx(hidden.item(), rel=1e-5)


def test_it_writes_as_its_kind_writes(tmp_path: Path) -> None:
    lm = sinklab.load(save_tiny(tmp_path / "model", context=96))
    ids = torch.tensor([lm.tokenizer("The old")["input_ids"]])
    how = {"rule": "entropy", "temperature": 1.0, "seed": 3}
    assert lm.generate("The old", 5, **how) == lm.tokenizer.decode(
        lm.model.generate(ids, max_new_tokens=5, **how)[0], skip_special_tokens=True
    )
    assert len(lm.tokenizer(lm.generate(ids[0].tolist(), seed=0))["input_ids"]) > 40
    filled = lm.generate("The <|mask|> sea", 0)
    assert filled.startswith("The ") and filled.endswith(" sea") and "mask" not in filled
    with pytest.raises(ValueError, match="no known chat format"):
        lm.generate("The old", chat=True)
    with pytest.raises(TypeError, match="generate has no option 'heat'"):
        lm.generate("The old", heat=1)
    causal = sinklab.short_road.LM(**vars(tiny_llama()))
    with torch.no_grad():
        best = causal.model(ids).logits[0, -1].argmax().item()
    assert causal.generate(ids[0].tolist(), 1, do_sample=False) == causal.tokenizer.decode([*ids[0].tolist(), best])


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    lm = sinklab.load(save_tiny(tmp_path / "model"))
    with pytest.raises(ValueError, match="at least one token"):
        lm.loss([])
    with pytest.raises(ValueError, match="unknown intervention 'mask_sink'"):
        lm.loss(TEXT, edits=["mask_sink:k=1"])
    with pytest.raises(ValueError, match="a text is scored in one step"):
        lm.loss(TEXT, edits=["truncate_context:start=2,stop=4,step=3"])
