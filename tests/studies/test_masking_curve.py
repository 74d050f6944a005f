"""Loss over hidden columns, for diffusion and autoregressive models."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from refusals import refused
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys, intervene
from sinklab.core.sinks import Excess
from sinklab.lab.data.noise import corrupt, masked_token_loss, sample_times
from sinklab.lab.measures import EqualMass, MaskPositions, MaskSinks, Random, WindowAttention
from sinklab.lab.records import open_run
from sinklab.lab.scoring import removal_table
from sinklab.lab.scoring.heldout import HeldoutRows, edited_losses, heldout_rows, row_losses
from sinklab.lab.studies.curve.reading import DOSE, StrongestKeys, curve_table, grown_table
from sinklab.lab.studies.curve.study import CurveSettings, masking_curve
from sinklab.lab.studies.curve.verdicts import masking_curve_verdicts
from tiny_diffusion import TEXT, tiny_loaded
from tiny_llama import tiny_llama


def text(rows=6, length=24):
    return torch.randint(3, 280, (rows, length))


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
def test_a_causal_model_loses_the_same_keys_as_a_diffusion_model_and_no_query_all_of_its_own(k):
    loaded, ids_BS = tiny_llama(), text(3, 12)
    with torch.no_grad():
        _, received_LBHS = attention_of(ids_BS)
        # the first key, the only one that the first query sees, is always among those hidden
        hidden_LBHS = torch.zeros_like(received_LBHS, dtype=torch.bool)
        hidden_LBHS.scatter_(-1, received_LBHS.topk(k, -1).indices, True)
        logits, _ = attention_of(ids_BS, hidden_LBHS)
    expected = (
        -logits.double().log_softmax(-1)[:, :-1].gather(-1, ids_BS[:, 1:, None])[..., 0].mean(-1)
    )
    found = edited_losses(loaded, ids_BS, [[MaskSinks(k=k)] if k else []])[0]
    assert torch.isfinite(found.losses_R).all()
    assert torch.allclose(found.losses_R.double(), expected, rtol=1e-4)
    held_R = received_LBHS.masked_fill(~hidden_LBHS, 0).sum(-1).mean((0, 2)) / 12
    assert torch.allclose(found.doses_by_row()["held"].nan_to_num(), held_R, atol=1e-5)


def test_what_grows_is_read_from_the_attention_before_and_after_the_mask():
    """The strongest key of every head is hidden, and the others compared before and after."""
    loaded, ids_BS = tiny_llama(), text(3, 12)
    with torch.no_grad():
        _, before_LBHS = attention_of(ids_BS)
        hidden_LBHS = torch.zeros_like(before_LBHS, dtype=torch.bool)
        hidden_LBHS.scatter_(-1, before_LBHS.argmax(-1, keepdim=True), True)
        _, after_LBHS = attention_of(ids_BS, hidden_LBHS)
    strongest = StrongestKeys()
    arms = [[MaskSinks(k=1), strongest], [MaskSinks(k=2)]]
    one, two = edited_losses(loaded, ids_BS, arms, batch=2)
    first_RE, second_RE, _ = torch.cat(strongest.batches).unbind(-1)
    held = [scored.doses_by_row()["held"] for scored in (one, two)]
    assert torch.allclose(first_RE.mean(1), held[0], atol=1e-7)
    assert torch.allclose((first_RE + second_RE).mean(1), held[1], atol=1e-6)
    table = grown_table(one, second_RE, 0)
    others_LBH = before_LBHS.masked_fill(hidden_LBHS, 0).amax(-1) / 12
    order = (1, 0, 2)
    assert table[["row", "layer", "head"]].to_numpy().tolist() == [
        list(place) for place in np.ndindex(*others_LBH.permute(order).shape)
    ]
    assert np.allclose(table["before"], others_LBH.permute(order).ravel(), atol=1e-5)
    assert np.allclose(table["after"], after_LBHS.amax(-1).permute(order).ravel() / 12, atol=1e-5)
    assert table["at"].tolist() == after_LBHS.argmax(-1).permute(order).ravel().tolist()
    assert (grown_table(one, second_RE, 2)["at"] == table["at"] - 2).all(), (
        "added sinks stand in front"
    )


EDITS = {
    "top": [MaskSinks(k=2, when="clean")],
    "rule": [BlockKeys(SinkKeys(Excess(1.0), 3), when="clean")],
    "control": [BlockKeys(EqualMass(TopKeys(2)), when="clean")],
    "one head": [MaskSinks(k=3, when="clean", layers=[1], heads=[2])],
    "two edits": [
        MaskSinks(k=1, when="clean", how="zero_value"),
        WindowAttention(radius=6),
    ],
    "positions": [MaskPositions((0, 5))],
}


@pytest.mark.parametrize("family", ["diffusion", "sink", "autoregressive"])
def test_one_clean_pass_for_all_arms_scores_what_a_block_for_each_arm_scores(family):
    """The plain twin: `intervene` around a clean pass and the scored one, arm by arm."""
    ids_RS = text()
    loaded = tiny_llama() if family == "autoregressive" else tiny_loaded(int(family == "sink"))
    if family == "autoregressive":

        def losses():
            logits_BSV = loaded.model(ids_RS).logits
            return torch.nn.functional.cross_entropy(
                logits_BSV[:, :-1].mT, ids_RS[:, 1:], reduction="none"
            ).mean(1)

    else:
        generator = torch.Generator().manual_seed(3)
        t_R = sample_times(6, sampler="low_discrepancy", generator=generator)
        mask_id = loaded.model.config.mask_token_id
        noisy_RS, masked_RS = corrupt(ids_RS, t_R, mask_id=mask_id, generator=generator)

        def losses():
            logits_MV = loaded.model(noisy_RS, logits_to_keep=masked_RS).logits
            return masked_token_loss(logits_MV, ids_RS, masked_RS, t_R, reduction="row")

    calls = []
    found = edited_losses(
        loaded, ids_RS, [[], *EDITS.values()], seed=3, batch=4, progress=lambda: calls.append(None)
    )
    assert len(calls) == 2 * len(found)
    with torch.no_grad():
        assert torch.allclose(found[0].losses_R, losses(), atol=1e-5)
        for edits, one in zip(EDITS.values(), found[1:], strict=True):
            with intervene(loaded.model, *edits) as log:
                with log.probing():
                    losses()
                expected_R = losses()
            assert torch.allclose(one.losses_R, expected_R, atol=1e-5)
            assert (one.losses_R - found[0].losses_R).abs().max() > 1e-4
            rows = pd.DataFrame(removal_table(log)).groupby("row")
            known = (
                rows[["keys", "held", "removed", "matched"]]
                .mean()
                .assign(sinks=rows["sinks"].sum() / rows["chosen"].sum())
            )
            for name, found_R in one.doses_by_row().items():
                assert np.allclose(found_R, known[name], atol=1e-5, equal_nan=True)
            assert str(one.dose) == str(log.dose())


def test_arms_do_not_disturb_each_other_and_the_number_of_a_row_is_what_it_draws_by():
    arms = [
        [BlockKeys(Random(TopKeys(3)))],
        [],
        [MaskSinks(k=1)],
        [BlockKeys(Random(TopKeys(1)))],
    ]
    for loaded in (tiny_loaded(1), tiny_llama()):
        ids_RS = text()
        together = edited_losses(loaded, ids_RS, arms)
        for edits, one in zip(arms, together, strict=True):
            alone = edited_losses(loaded, ids_RS, [edits])[0]
            assert torch.equal(alone.losses_R, one.losses_R)
            assert (
                torch.equal(alone.doses_by_row()["held"], one.doses_by_row()["held"]) or not edits
            )
        for one, other in zip(together, edited_losses(loaded, ids_RS, arms, batch=2), strict=True):
            assert torch.allclose(one.losses_R, other.losses_R, rtol=1e-4)
            assert torch.allclose(
                one.doses_by_row()["held"], other.doses_by_row()["held"], atol=1e-5, equal_nan=True
            )
        assert together[1].doses_by_row()["held"].isnan().all()
        assert (together[2].doses_by_row()["held"] > together[3].doses_by_row()["held"]).all()


def rows_of(losses):
    """The table ``curve_rows`` of these losses, of unknown doses."""
    frames = []
    for (k, control), loss_R in losses.items():
        columns = {"row": range(len(loss_R)), "k": k, "control": control, "loss": loss_R}
        frames.append(pd.DataFrame(columns | dict.fromkeys(DOSE, math.nan)))
    return pd.concat(frames, ignore_index=True)


def made_up(rows=40):
    generator = np.random.default_rng(1)
    clean = generator.normal(4, 1, rows)
    losses = {(0, "none"): clean}
    for k in (1, 5):
        losses[k, "top"] = clean + generator.normal(0.1 * k, 0.05, rows)
        losses[k, "random"] = clean + generator.normal(0.01 * k, 0.05, rows)
    return losses


def test_the_table_is_paired_and_its_intervals_are_those_of_a_normal_mean():
    losses = made_up()
    table = curve_table(rows_of(losses), HeldoutRows(torch.zeros(40, 10), 1000))
    assert [*zip(table["k"], table["control"], strict=True)] == [*losses]
    assert (table["delta"][0], table["delta_low"][0], table["delta_high"][0]) == (0, 0, 0)
    clean_R = losses[0, "none"]
    for (k, control), loss_R in losses.items():
        cell = table[(table["k"] == k) & (table["control"] == control)].iloc[0]
        assert cell["relative"] == pytest.approx((loss_R - clean_R).mean() / clean_R.mean())
        assert cell["bits_per_byte"] == pytest.approx(loss_R.mean() * 400 / 1000 / math.log(2))
        assert math.isnan(cell["excess"]) == (control != "top")
        known = {"loss": loss_R}
        if k:
            known["delta"] = loss_R - clean_R
        if control == "top":
            known["excess"] = loss_R - losses[k, "random"]
        for name, values_R in known.items():
            mean, reach = values_R.mean(), 1.96 * values_R.std(ddof=1) / math.sqrt(40)
            ends = (cell[f"{name}_low"], cell[f"{name}_high"])
            assert cell[name] == pytest.approx(mean)
            assert ends == pytest.approx((mean - reach, mean + reach), abs=0.2 * reach)


@pytest.mark.parametrize("family", ["diffusion", "autoregressive"])
def test_a_run_folder_says_it_all(tmp_path, family):
    (tmp_path / "held.txt").write_text(TEXT * 10)
    loaded = tiny_loaded(1) if family == "diffusion" else tiny_llama()
    settings = CurveSettings(
        ks=(3, 1),
        rows=4,
        length=20,
        heldout=str(tmp_path / "held.txt"),
        draws=2,
        batch=3,
        edits=("window_attention:radius=4",),
        twin=False,
    )
    said = []
    path = masking_curve(loaded, tmp_path / "run", settings, progress=said.append)
    run = open_run(path)
    assert run.info.kind == "curve"
    assert run.info.model["family"] == family
    assert run.info.settings["ks"] == [0, 1, 3]
    assert said == ["rows 1 to 3, 10 ways", "rows 4 to 4, 10 ways"]
    rows, table = run.table("curve_rows"), run.table("curve")
    arms = ["top", "random", "equal_mass", "matched"]
    assert table["control"].tolist() == ["none", *arms, *arms, "window_attention:radius=4"]
    assert len(rows) == 4 * len(table)
    means = rows.groupby(["k", "control"])["loss"].mean()
    for _, cell in table.iterrows():
        assert means[cell["k"], cell["control"]] == pytest.approx(cell["loss"])
    cells = table.set_index(["k", "control"])
    assert cells.loc[3, "top"][["keys", "matched"]].tolist() == pytest.approx(
        [3, math.nan], nan_ok=True
    )
    assert cells.loc[(0, "none"), ["keys", "held", "removed"]].tolist() == [0, 0, 0]
    assert cells.loc[0, "window_attention:radius=4"]["removed"] > 0
    # one draws for every row what holds as much as the other, in the same heads
    matched, equal = cells.loc[1, "matched"], cells.loc[1, "equal_mass"]
    assert (
        matched["matched"] == pytest.approx(equal["matched"], abs=1e-6)
        and 0 < equal["matched"] <= 1
    )
    assert equal["held"] == pytest.approx(matched["held"], rel=0.1)
    assert matched["excess"] == pytest.approx(matched["delta"] - equal["delta"])
    seen = run.table("phenomenon")
    assert seen["main"].mean() == pytest.approx(
        cells.loc[1, "top"]["held"], abs=0.05 if family == "diffusion" else 1e-6
    )
    assert seen["gu"].between(0, 1).all()
    held = heldout_rows(loaded, tmp_path / "held.txt", rows=4, length=20).ids_RS
    first = row_losses(loaded, held, edits=[MaskSinks(k=3)], batch=3).mean().item()
    loss = float(means[3, "top"])
    # noise changes with the draw; a causal model without random columns has none
    assert (
        loss == pytest.approx(first, rel=1e-6)
        if family == "autoregressive"
        else abs(loss - first) > 1e-4
    )


def test_a_rule_that_no_key_passes_is_a_dose_of_zero_and_said_to_be_one(tmp_path):
    (tmp_path / "held.txt").write_text(TEXT * 10)
    settings = CurveSettings(
        ks=(1,),
        rows=8,
        length=16,
        heldout=str(tmp_path / "held.txt"),
        sink_rule="excess:epsilon=15",
        batch=6,
        twin=False,
    )
    run = open_run(masking_curve(tiny_loaded(), tmp_path / "run", settings))
    table = run.table("curve").set_index("control")
    assert list(table.index) == ["none", "sinks", "random", "equal_mass", "matched"]
    assert table.loc["sinks"][["keys", "held", "removed", "delta"]].tolist() == [0, 0, 0, 0]
    assert table["matched"].isna().all()
    assert masking_curve_verdicts(run)["verdict"].tolist()[0] == "inconclusive"
    assert open_run(tmp_path / "run").info.settings["sink_rule"] == "excess:epsilon=15.0"


def test_what_makes_no_sense_is_refused(tmp_path):
    refused("'randm'; did you mean 'random'", CurveSettings, controls=("randm",))
    loaded = tiny_loaded(1)
    for message, settings in (
        ("one of ks", {"by": "head", "ks": (1, 2)}),
        ("63 positions, got 65", {"ks": (1,), "length": 65}),
        # 20 tokens and an added sink
        ("21 keys of a row, but k is 11", {"ks": (11,), "length": 20}),
        ("keys of a row, but k is 21", {"ks": (21,), "length": 20, "controls": ("sinks",)}),
    ):
        refused(message, masking_curve, loaded, tmp_path / "a", CurveSettings(**settings))
    for message, unfit in (
        ("has no tokenizer files", replace(loaded, tokenizer=None)),
        ("has mask_token_id None", tiny_loaded(mask_token_id=None)),
    ):
        refused(message, masking_curve, unfit, tmp_path / "a")
    assert not (tmp_path / "a").exists()
