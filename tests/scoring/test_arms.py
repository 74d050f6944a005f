"""The loop over arms × texts, against plain twins: eager attention, and a block for each arm."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys, intervene
from sinklab.core.sinks import Excess
from sinklab.lab.measures import EqualMass, MaskPositions, MaskSinks, Random, WindowAttention
from sinklab.lab.scoring.arms import DOSE, arm_losses, together
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama


def texts(rows=6, length=24):
    return torch.randint(3, 280, (rows, length)).tolist()


def table(*given, **how):
    """What `arm_losses` gives, by arm and text."""
    lines = [
        {"arm": one.arm, "text": one.text, "loss": one.loss, **one.about}
        for one in arm_losses(*given, **how)
    ]
    return pd.DataFrame(lines).set_index(["arm", "text"])


def attention_of(ids_BS, hidden_LBHS=None):
    """Logits of a causal model by transformers' own eager attention, with keys hidden from all
    queries; what each key received then.

    A query that would lose all keys that it sees keeps them.
    """
    model = tiny_llama().model
    model.set_attn_implementation("eager")
    if hidden_LBHS is not None:
        seen_QS = torch.ones(ids_BS.shape[1], ids_BS.shape[1], dtype=torch.bool).tril()
        left_LBHQS = seen_QS & ~hidden_LBHS[..., None, :]
        left_LBHQS = torch.where(left_LBHQS.any(-1, keepdim=True), left_LBHQS, seen_QS)
        for layer, left_BHQS in zip(model.model.layers, left_LBHQS, strict=True):
            mask = torch.zeros(left_BHQS.shape).masked_fill(~left_BHQS, -torch.inf)
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, named, mask=mask: (args, named | {"attention_mask": mask}),
                with_kwargs=True,
            )
    found = model(ids_BS, output_attentions=True)
    return found.logits, torch.stack(found.attentions).sum(-2)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_losses_doses_and_new_sinks_of_a_causal_model_are_those_of_eager_attention(k):
    ids_BS = torch.tensor(texts(3, 12))
    with torch.no_grad():
        _, received_LBHS = attention_of(ids_BS)
        # the first key, the only one that the first query sees, is always among those hidden
        hidden_LBHS = torch.zeros_like(received_LBHS, dtype=torch.bool)
        hidden_LBHS.scatter_(-1, received_LBHS.topk(k, -1).indices, True)
        logits, after_LBHS = attention_of(ids_BS, hidden_LBHS)
    nats = -logits.double().log_softmax(-1)[:, :-1].gather(-1, ids_BS[:, 1:, None])[..., 0]
    found = table(tiny_llama(), {"a": [MaskSinks(k=k)] if k else []}, ids_BS.tolist())
    assert np.allclose(found["loss"], nats.mean(-1), rtol=1e-4)
    held_R = received_LBHS.masked_fill(~hidden_LBHS, 0).sum(-1).mean((0, 2)) / 12
    assert np.allclose(found["held"], held_R, atol=1e-5)
    top = after_LBHS.max(-1, keepdim=True)
    was = received_LBHS.gather(-1, top.indices)
    grown_LBH = ((top.values > 3.6) & (was <= 3.6))[..., 0]
    assert np.allclose(found["regrown"], grown_LBH.float().mean((0, 2)))
    for text in range(3):
        places = top.indices[..., 0][:, text][grown_LBH[:, text]].tolist()
        at = found["grown_at"].loc["a", text]
        assert places.count(at) == max(map(places.count, places)) if places else np.isnan(at)
    if not k:
        assert np.allclose(found["strongest"], received_LBHS.amax(-1).mean((0, 2)) / 12, atol=1e-5)


EDITS = {
    "top": [MaskSinks(k=2, when="clean")],
    "rule": [BlockKeys(SinkKeys(Excess(1.0), 3), when="clean")],
    "control": [BlockKeys(EqualMass(TopKeys(2)), when="clean")],
    "one head": [MaskSinks(k=3, when="clean", layers=[1], heads=[2])],
    "two edits": [MaskSinks(k=1, when="clean", how="zero_value"), WindowAttention(radius=6)],
    "positions": [MaskPositions((0, 5))],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sink", "autoregressive"])
def test_one_clean_pass_for_all_arms_scores_what_a_block_for_each_arm_scores(family):
    """The plain twin: `intervene` around a clean pass and the scored one, text by text."""
    loaded = tiny_llama() if family == "autoregressive" else tiny_loaded(1)
    some, calls = texts(3), []
    how = {"seed": 3, "batch": 2, "tick": lambda: calls.append(None)}
    found = table(loaded, {"none": [], **EDITS}, some, **how)
    assert len(calls) == 2 * (1 + len(EDITS))
    assert (found.loc["none", ["keys", "held", "removed", "regrown"]] == 0).all(axis=None)
    for number, ids in enumerate(some):
        ids_1S = torch.tensor([ids])
        (rows,) = together(loaded, [ids], seed=3, first=number)

        def loss(ids_1S=ids_1S, rows=rows):
            if family == "autoregressive":
                logits_SV = loaded.model(ids_1S).logits[0]
                return torch.nn.functional.cross_entropy(logits_SV[:-1], ids_1S[0, 1:])
            noisy_1S = ids_1S.masked_fill(rows.masked_RS, loaded.model.config.mask_token_id)
            log_p_SV = loaded.model(noisy_1S).logits[0].log_softmax(-1)
            nats_S = -log_p_SV.gather(-1, ids_1S.T)[:, 0]
            return (nats_S * rows.masked_RS[0]).sum() * rows.weight_R[0] / len(nats_S)

        with torch.no_grad():
            for arm, edits in {"none": [], **EDITS}.items():
                with intervene(loaded.model, *edits) as log:
                    with log.probing():
                        loss()
                    expected = float(loss())
                assert found.loc[arm, number]["loss"] == pytest.approx(expected, rel=1e-4)
                for name in DOSE if edits else ():
                    known = getattr(log.dose(), name)
                    assert found.loc[arm, number][name] == pytest.approx(
                        known, abs=1e-5, nan_ok=True
                    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: tiny_loaded(1), tiny_llama])
def test_arms_and_batches_do_not_disturb_each_other_and_a_text_draws_by_its_number(make):
    loaded, some = make(), texts()
    arms = {
        "random": [BlockKeys(Random(TopKeys(3)))],
        "none": [],
        "top": ["block_keys:keys=top:k=1"],
    }
    together = table(loaded, arms, some)
    for arm, edits in arms.items():
        assert table(loaded, {arm: edits}, some).equals(together.loc[[arm]].reorder_levels([0, 1]))
    apart = table(loaded, arms, some, batch=2)
    np.testing.assert_allclose(apart.loc[together.index], together, rtol=1e-4, atol=1e-5)
    rest = table(loaded, arms, some[4:], first=4)
    np.testing.assert_allclose(rest, together.loc[rest.index], rtol=1e-4, atol=1e-5)
    drawn = [replace(arms["random"][0], seed=1)]
    assert (table(loaded, {"random": drawn}, some) - together)["loss"].dropna().abs().max() > 1e-4


def test_texts_of_a_diffusion_model_have_masks_of_their_own_and_their_beginning_has_none():
    loaded = tiny_loaded()
    loaded = replace(loaded, special=replace(loaded.special, bos=20))
    (rows,) = together(loaded, [[20, *ids] for ids in texts()])
    assert not rows.masked_RS[:, 0].any()
    assert len({tuple(row) for row in rows.masked_RS.tolist()}) == len(texts())
