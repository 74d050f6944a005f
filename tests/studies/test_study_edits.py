"""Studies written under interventions, and the truncation experiment."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sinklab.lab.studies.trace.again import stretches, truncation_table
from sinklab.lab.studies.trace.recording import Selection
from sinklab.lab.studies.trace.run import agreement
from sinklab.lab.studies.trace.study import StudySettings
from small_runs import traced
from tiny_diffusion import tiny_loaded

QUICK = StudySettings(
    prompts=("The old man sat by", "The sea"),
    new_tokens=8,
    steps=4,
    block_length=None,
    statistics=(),
)


def received(run, part=0):
    return run.array("attention", "received", part=part).astype(np.float32)


@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
def test_a_run_under_edits_is_watched_and_says_what_was_removed(tmp_path, cfg_scale):
    settings = replace(
        QUICK,
        edits=("block_keys:keys=top:k=2", "block_keys:keys=positions:positions=1,when=now"),
        cfg_scale=cfg_scale,
    )
    run = traced(tiny_loaded(1), tmp_path / "run", settings)
    assert run.info.settings["edits"] == [
        "block_keys:keys=top:k=2",
        "block_keys:keys=positions:positions=1,when=now",
    ]
    assert run.parts("removals") == (0, 1)
    removals = run.table("removals")
    columns = "sample forward edit layer head row keys held removed overlap key_list"
    assert {*columns.split()} <= {*removals.columns}
    assert set(removals["edit"]) == {"block_keys", "block_keys#2"}
    assert removals["sample"].unique().tolist() == [0, 1]
    per_step = 2 if cfg_scale else 1
    for sample in (0, 1):
        watched = received(run, sample)
        mine = removals[(removals["sample"] == sample) & (removals["forward"] % per_step == 0)]
        assert (mine["forward"] // per_step).max() == 3
        for row in mine.itertuples():
            assert (
                watched[row.forward // per_step, row.layer, row.head][list(row.key_list)] == 0
            ).all()
    assert (received(run)[:, :, :, 2] == 0).all(), "position 1 stands behind one sink column"


def test_the_same_text_as_with_mask_sinks_beside_it(tmp_path):
    beside, edited = (
        traced(tiny_loaded(), tmp_path / name, replace(QUICK, **{name: how}, prompts=("The sea",)))
        for name, how in (("mask_sinks", (2,)), ("edits", ("block_keys:keys=top:k=2",)))
    )
    texts, (row,) = beside.table("generations"), edited.table("generations").itertuples()
    assert texts.query("masked_sinks == 2")["completion"].tolist() == [row.completion]
    assert (row.edits, row.masked_sinks) == ("block_keys:keys=top:k=2", 0)


def test_a_clean_pass_chooses_before_each_step(tmp_path):
    loaded = tiny_loaded()
    quick = replace(QUICK, prompts=("The sea",), new_tokens=4, steps=2)
    edited = replace(quick, edits=("block_keys:keys=top:k=2,when=clean",))
    run = traced(loaded, tmp_path / "run", edited)
    removals = run.table("removals")
    assert sorted(removals["forward"].unique()) == [0, 1], "the first step has its clean pass too"
    whole = received(traced(loaded, tmp_path / "whole", quick))
    # the first step reads the same canvas in both runs: the two greatest keys are known
    for row in removals[removals["forward"] == 0].itertuples():
        assert sorted(row.key_list) == sorted(whole[0, row.layer, row.head].argsort()[-2:].tolist())
    assert run.table("steps")["step"].tolist() == [0, 1]


def test_random_columns_differ_between_samples_and_come_again(tmp_path):
    edits = ("block_keys:keys=random:like=top:k=2,seed=4",)
    quick = replace(QUICK, prompts=("The sea",) * 2, new_tokens=4, steps=2, edits=edits)
    one, other = (traced(tiny_loaded(), tmp_path / name, quick).table("removals") for name in "ab")
    keys = [one[one["sample"] == sample]["key_list"].map(sorted).tolist() for sample in (0, 1)]
    assert keys[0] != keys[1]
    assert one.equals(other)


def test_truncation_hides_where_the_sink_is_and_follows_the_heads(tmp_path):
    loaded = tiny_loaded(1)
    run = traced(loaded, tmp_path / "run", replace(QUICK, truncate=True, new_tokens=12, steps=6))
    length = len(loaded.tokenizer(QUICK.prompts[0])["input_ids"]) + 12
    rows = run.table("truncated", part=0)
    facts = rows.iloc[0]
    assert rows["arm"].tolist() in (["sink"], ["sink", "control"])
    assert (facts["stop"] - facts["start"], facts["step"]) == (max(length // 16, 1), 3)
    whole, hidden = received(run), slice(1 + facts["start"], 1 + facts["stop"])
    limit = 1 + 3 * (length - 1) / length
    drawn = np.where(whole[2] > limit, whole[2], 0).sum((0, 1))[1:]
    assert (
        hidden.start
        <= 1 + (drawn if drawn.any() else whole[2].sum((0, 1))[1:]).argmax()
        < hidden.stop
    )
    table = run.table("truncation", part=0)
    assert table["step"].unique().tolist() == [3, 4, 5]
    assert len(table) == 3 * 2 * 4
    for row in table.itertuples():
        # the step before the cut is that of the untouched run
        before = whole[2, row.layer, row.head]
        assert row.main_before == before.argmax()
        assert row.score_before == pytest.approx(before.max(), rel=1e-3)
        assert row.hidden_share_before == pytest.approx(
            before[hidden].sum() / before.sum(), rel=5e-3
        )
        assert row.lost == (
            hidden.start <= row.main_before < hidden.stop and row.score_before > limit
        )
        assert not hidden.start <= row.main_after < hidden.stop
        assert row.recovered == (row.score_after > limit)
    assert table["hidden_share_before"].mean() == pytest.approx(facts["held"], rel=5e-3)
    assert table["score_after"].between(1, length).all()
    generation = run.table("generations", part=0)
    assert len(generation) == 1
    assert facts["agreement"] == agreement(generation["token_ids"][0], facts["token_ids"])
    assert facts["agreement"] < 1, "the text changes"


def heads_that_read(length, **places):
    """(1 layer, heads, keys) of four even shares, in each head at one position; the rest is
    spread.
    """
    score_LHK = np.full((1, sum(map(len, places.values())), length), 0.5)
    score_LHK[
        0, range(score_LHK.shape[1]), [place for some in places.values() for place in some]
    ] = 4.5
    return score_LHK


def test_the_control_is_as_much_text_with_few_sinks():
    written = np.arange(64) < 40
    # 48 positions would be free, but most are masked, and 10 to 13 holds a sink of one head in
    # eight
    score = heads_that_read(64, main=[20, 20, 20, 20, 21], others=[0, 5, 11])
    score[..., 30:34] *= 1.2
    sink, control = stretches(score, written)
    assert (sink.arm, sink.start, sink.stop, sink.sinks) == ("sink", 18, 22, 5 / 8)
    assert (control.arm, control.sinks) == ("control", 1 / 8), (
        "one in five of those is few, and more attention"
    )
    assert control.start in range(8, 12) or control.start in range(0, 3)
    only = stretches(heads_that_read(64, main=[20, 20, 20], others=[0, 5, 11]), written)[1]
    assert only.sinks == 0 and written[only.place].mean() >= 0.75
    assert sink.held == pytest.approx((score[0, :, 18:22].sum(-1) / score[0].sum(-1)).mean())
    # where masks are all that is left, there is no control; and without any sink the most attended
    # position is hidden
    assert len(stretches(score, np.isin(np.arange(64), range(18, 22)))) == 1
    flat = np.full((1, 2, 34), 0.5)
    flat[0, :, 1 + 16] = 1.5
    main, other = stretches(flat, np.ones(33, bool))
    assert main.sinks == 0 and (main.start, main.stop) == (15, 17) and other.sinks == 0


def test_tokens_of_the_uncut_text_are_scored_with_either_stretch_hidden(tmp_path, monkeypatch):
    loaded = tiny_loaded(1)
    run = traced(loaded, tmp_path / "run", replace(QUICK, truncate=True, new_tokens=36, steps=9))
    found, stretch = run.table("recovery"), run.table("truncated").set_index(["sample", "arm"])
    assert found["sample"].unique().tolist() == [0, 1], "both samples have a sink and a control"
    attend, column = torch.nn.functional.scaled_dot_product_attention, slice(0)

    def hidden(query, key, *args, **options):
        mask = torch.zeros(query.shape[-2], key.shape[-2])
        mask[:, column] = -torch.inf
        return attend(
            query, key, args[0], attn_mask=mask, scale=options.get("scale"), enable_gqa=True
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", hidden)
    tokens = run.table("tokens")
    for row in found.groupby("sample").sample(3, random_state=0).itertuples():
        read = tokens[(tokens["sample"] == row.sample) & (tokens["step"] == row.step)].sort_values(
            "position"
        )
        assert read["state"].iloc[row.position] == "masked" and row.step >= 4
        ids = torch.tensor(read["token_id"].to_numpy())[None]
        for arm in ("", "sink", "control"):
            place = stretch.loc[(row.sample, arm)] if arm else None
            assert place is None or not place["start"] <= row.position < place["stop"]
            column = slice(1 + place["start"], 1 + place["stop"]) if arm else slice(0)
            with torch.no_grad():
                logits = loaded.model(ids).logits[0, row.position]
            name = f"logprob_{arm}" if arm else "logprob"
            assert getattr(row, name) == pytest.approx(
                logits.log_softmax(-1)[row.token_id].item(), abs=1e-4
            ), name
    assert (found["logprob"] - found["logprob_sink"]).abs().mean() > 0.01
    written = run.table("generations")["token_ids"]
    started = [len(loaded.tokenizer(prompt)["input_ids"]) for prompt in QUICK.prompts]
    assert [
        written[row.sample][row.position - started[row.sample]] for row in found.itertuples()
    ] == found["token_id"].tolist()


def test_a_head_that_loses_its_sink_is_seen_to_lose_it():
    """One added sink column, eight positions of which a cache ran four as queries; positions 3 and
    4 are hidden.
    """
    received_TLHK = np.full((3, 1, 2, 9), 0.1)
    received_TLHK[0, 0, 0, 5], received_TLHK[0, 0, 1, 0] = 3.2, 3.2
    received_TLHK[1:, ..., 4:6] = 0
    received_TLHK[1, 0, 0, 2], received_TLHK[2, 0, 0, 7] = 1.5, 2.5
    received_TLHK[1:, 0, 1, 0] = 3.0
    arrays = {
        "received": received_TLHK.astype(np.float16),
        "visible": np.full((3, 9), 4.0, np.float32),
        "positions": np.full(3, 8.0, np.float32),
        "step_number": np.array([2, 3, 4]),
    }
    table = truncation_table(arrays, slice(4, 6), Selection((6,), (1, 3), 8, 4), sample=9)
    assert set(table["sample"]) == {9}
    assert table["step"].tolist() == [3, 3, 4, 4]
    assert table["layer"].tolist() == [6] * 4
    assert table["head"].tolist() == [1, 3, 1, 3]
    assert table["main_before"].tolist() == [5, 0, 5, 0]
    assert table["score_before"] == pytest.approx([6.4] * 4, rel=1e-3)
    assert table["hidden_share_before"] == pytest.approx(
        [3.3 / 4, 0.2 / 4, 3.3 / 4, 0.2 / 4], rel=1e-3
    )
    assert table["lost"].tolist() == [True, False, True, False]
    assert table["main_after"].tolist() == [2, 0, 7, 0]
    assert table["score_after"] == pytest.approx([3.0, 6.0, 5.0, 6.0], rel=1e-3)
    # above 1 + 3 · 7 / 8
    assert table["recovered"].tolist() == [False, True, True, True]


def test_agreement_counts_the_longer_text():
    assert agreement(np.array([1, 2, 3, 4]), np.array([1, 5, 3, 4])) == 0.75
    assert agreement(np.array([1, 2]), np.array([1, 2, 3, 4])) == 0.5
    assert agreement(np.array([]), np.array([])) == 1.0
