"""What sinks carry: the run folder of a tiny model, against the trajectory it was sampled from."""

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from refusals import refused, refusing
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.scoring.prompts import encode
from sinklab.lab.scoring.task import Task
from sinklab.lab.studies.contents.figures import contents_sentences
from sinklab.lab.studies.contents.lens import LogitLens
from sinklab.lab.studies.contents.run import READ
from sinklab.lab.studies.contents.samples import sample_text
from sinklab.lab.studies.contents.study import TARGETS, ContentsSettings, sink_contents
from tiny_diffusion import TEXT, tiny_loaded
from tiny_llama import tiny_llama

PROMPTS = tuple(TEXT[start : start + 12] for start in range(0, 64, 8))
SETTINGS = ContentsSettings(
    prompts=PROMPTS,
    new_tokens=12,
    block_length=4,
    choose="strongest",
    every=2,
    folds=3,
    classes=4,
    resamples=50,
    twin=False,
)


SHORT = replace(
    SETTINGS, prompts=PROMPTS[:3], new_tokens=4, block_length=2, layers=(1,), resamples=5
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model with an added sink; those of other runs have none."""
    folder = tmp_path_factory.mktemp("contents") / "run"
    return open_run(sink_contents(tiny_loaded(1), folder, SETTINGS))


def test_the_folder_says_what_was_done(run):
    assert (run.info.kind, run.info.status, run.info.seed) == ("contents", "complete", 0)
    assert run.info.settings["choose"] == "strongest"
    names = {"samples", "looks", "texts", "lens", "probes", "added", "added_sinks"}
    assert set(run.tables) == names
    assert run.parts("samples") == run.parts("states") == run.parts("texts") == tuple(range(8))
    assert run.table("texts")["prompt"].tolist() == list(PROMPTS)


def test_samples_are_pairs_that_are_alike(run):
    table = run.table("samples")
    assert set(table["population"]) == {"sink", "matched"}
    assert set(table["step"]) == {0, 2, 4, 6, 8, 10}
    wide = table.pivot(index=["text", "layer", "pair"], columns="population")
    for name in ("step", "place", "block", "progress", "frequent"):
        assert (wide[name]["sink"] == wide[name]["matched"]).all()
    assert (wide["heads"]["sink"] > 0).all() and (wide["heads"]["matched"] == 0).all()
    assert (wide["position"]["sink"] != wide["position"]["matched"]).all()
    assert (
        table.loc[table["place"] == "future", "token_now"]
        .eq(tiny_loaded().model.config.mask_token_id)
        .all()
    )
    assert (table[table["place"] == "prompt"].eval("token == token_now")).all()
    assert table.loc[table["step"] == 0, "progress"].eq(1).all()
    assert table.loc[table["step"] == 6, "progress"].eq(0.5).all()
    assert set(table.loc[table["step"] == 10, "place"]) <= {"block", "committed", "prompt"}
    looks = run.table("looks")
    assert looks["pairs"].sum() == len(table) / 2
    assert (looks["pairs"] <= np.minimum(looks["sinks"], 2)).all()


def test_states_are_those_of_the_text(run):
    """Each is found again by running the model once on what it read at that step."""
    loaded = tiny_loaded(1)
    model, prompt = loaded.model, encode(loaded, PROMPTS[1])
    task = Task(loaded, prompt, SETTINGS, int(run.table("texts")["seed"][1]))
    moments = list(task.moments())
    ids_1S = torch.tensor(moments[6].ids_S)[None]
    positions_1S = torch.arange(ids_1S.shape[1])[None] + model.config.text_start
    how = {"use_cache": False, "is_causal": False, "output_hidden_states": True}
    how["sink_prefix"] = model.sink_prefix(ids_1S.shape[1])
    final = [*prompt.ids, *moments[-1].written]
    with torch.inference_mode():
        embedded_1SD = model.model.embed_tokens(ids_1S)
        states = model.model(
            inputs_embeds=embedded_1SD, position_ids=positions_1S, **how
        ).hidden_states
        for layer, rows in run.table("samples", part=1).groupby("layer"):
            at = np.flatnonzero(rows["step"] == 6)
            stored_ND = torch.from_numpy(run.array("states", f"layer{layer}", part=1)[at])
            if layer == 2:
                # transformers norms the last of them
                stored_ND = model.model.norm(stored_ND)
            places = rows["position"].iloc[at].tolist()
            assert places
            assert torch.allclose(stored_ND, states[layer][0, places], atol=1e-5)
            assert rows["token"].iloc[at].tolist() == [final[place] for place in places]


def test_what_is_written_and_what_comes_next_are_means_of_embeddings(run):
    embedding = tiny_loaded(1).model.get_input_embeddings().weight.detach()
    written = run.table("texts")["token_ids"][2].tolist()
    arrays = run.arrays("states", part=2)
    assert arrays["step_number"].tolist() == [0, 2, 4, 6, 8, 10]
    assert np.isnan(arrays["committed"][0]).all() and np.isnan(arrays["next"][4:]).all()
    # four tokens a block, one a step: at step 4 the first block stands
    assert np.allclose(arrays["committed"][2], embedding[written[:4]].mean(0), atol=1e-6)
    assert np.allclose(arrays["next"][2], embedding[written[8:]].mean(0), atol=1e-6)


def test_the_tables_cover_places_layers_and_measures(run):
    lens, probes = run.table("lens"), run.table("probes")
    assert set(lens["measure"]) == set(READ) and lens["value"].map(math.isfinite).all()
    assert set(probes["target"]) == set(TARGETS)
    assert set(lens["layer"]) == {0, 1, 2} and "future" in set(lens["place"])
    for table, about in ((lens, "measure"), (probes, "target")):
        wide = table.pivot(index=["place", "layer", about], columns="population", values="value")
        assert np.allclose(wide["difference"], wide["sink"] - wide["matched"], atol=1e-9)
    # fewer than 8 texts in a place have no interval
    known = probes["texts"] >= 8
    assert known.any() and probes[known][["low", "high"]].notna().all(axis=None)
    assert (probes[known]["low"] <= probes[known]["high"]).all() and probes[~known][
        ["low", "high"]
    ].isna().all(axis=None)
    # the embeddings of masks are all the same: nothing to read, exactly
    first = probes[(probes["place"] == "future") & (probes["layer"] == 0)]
    assert len(first) and first["value"].eq(0).all()
    content = probes[
        probes["target"].isin(["committed", "next"]) & (probes["population"] != "difference")
    ]
    assert content["other_text"].notna().all()
    assert probes[probes["target"] == "progress"]["other_text"].isna().all()


def test_the_lens_table_is_the_mean_of_the_samples(run):
    samples, lens = run.table("samples"), run.table("lens")
    part = samples[
        (samples["place"] == "future") & (samples["layer"] == 2) & (samples["population"] == "sink")
    ]
    row = lens.query("place == 'future' and layer == 2 and population == 'sink'").set_index(
        "measure"
    )["value"]
    for name in ("entropy", "kl", "log10_rank", "norm"):
        assert row[name] == pytest.approx(part[name].mean(), rel=1e-6)
    assert row["first"] == pytest.approx((part["log10_rank"] == 0).mean())
    assert samples[samples["layer"] == 2]["kl"].max() < 1e-5


def test_an_added_sink_carries_a_constant(run):
    added = run.table("added_sinks")
    assert added["layer"].tolist() == [0, 1] and added["texts"].eq(8).all()
    assert added["spread"].eq(0).all() and added["norm"].gt(0).all()
    assert added["share"].between(0.001, 0.999).all()
    lens = run.table("lens").query("measure == 'variation' and place == 'committed'")
    own = lens[(lens["layer"] == 1) & (lens["population"] != "difference")]["value"]
    assert len(own) and own.gt(0.01).all()


def test_a_sink_of_keys_and_values_has_no_states(tmp_path):
    loaded = tiny_loaded(sink_kind="kv", sink_count=1)
    added = open_run(sink_contents(loaded, tmp_path / "run", SHORT)).table("added_sinks")
    # attention of two layers, whatever states are kept
    assert added["layer"].tolist() == [0, 1]
    assert added["spread"].isna().all() and added["share"].gt(0).all()


def test_shifted_logits_are_read_where_they_predict(tmp_path):
    loaded = tiny_loaded(logit_shift=True)
    settings = replace(SHORT, layers=(2,), pairs=8, block_length=None, every=1)
    run = open_run(sink_contents(loaded, tmp_path / "run", settings))
    samples = run.table("samples", part=0)
    final = [*encode(loaded, PROMPTS[0]).ids, *run.table("texts")["token_ids"][0]]
    lens = LogitLens.of(loaded.model, hidden_ids=(loaded.model.config.mask_token_id,))
    states = torch.from_numpy(run.array("states", "layer2", part=0))
    last = samples["position"] == len(final) - 1
    assert last.any() and samples[last]["probability"].isna().all()
    probability = lens.log_probabilities(lens.logits(states)).exp()
    for row, (position, found) in enumerate(
        zip(samples["position"], samples["probability"], strict=True)
    ):
        if position + 1 < len(final):
            assert found == pytest.approx(probability[row, final[position + 1]].item(), rel=1e-5)


def test_an_interrupted_run_goes_on_and_gives_the_same(tmp_path):
    whole = open_run(sink_contents(tiny_loaded(), tmp_path / "whole", SHORT))
    told: list[str] = []

    def stop(text):
        told.append(text)
        if text.startswith("writing text 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sink_contents(tiny_loaded(), tmp_path / "run", SHORT, progress=stop)
    assert open_run(tmp_path / "run").info.status == "interrupted"
    changed = replace(SHORT, pairs=3)
    again = {"resume": True, "progress": told.append}
    folder = tmp_path / "run"
    refused(
        r"\['pairs'\] is 2, and now", sink_contents, tiny_loaded(), folder, changed, resume=True
    )
    told.clear()
    run = open_run(sink_contents(tiny_loaded(), folder, SHORT, **again))
    assert told == [f"writing text {n} of 3 and sampling states" for n in (2, 3)] + [
        "reading the states"
    ]
    for name in ("samples", "lens", "probes"):
        pd.testing.assert_frame_equal(run.table(name), whole.table(name))


def test_guided_writing_is_watched_in_its_first_forward(tmp_path):
    loaded, settings = tiny_loaded(), replace(SHORT, cfg_scale=0.5, layers=(0,))
    run = open_run(sink_contents(loaded, tmp_path / "run", settings))
    embedding = loaded.model.get_input_embeddings().weight.detach().numpy()
    samples = run.table("samples", part=0)
    prompt = samples[samples["place"] == "prompt"].index
    # the second forward has the prompt masked
    assert len(prompt)
    assert np.allclose(
        run.array("states", "layer0", part=0)[prompt], embedding[samples["token_now"][prompt]]
    )


def test_beginnings_come_from_a_corpus(tmp_path):
    held = tmp_path / "text.txt"
    held.write_text(TEXT * 20)
    settings = replace(SHORT, prompts=(), heldout=str(held), rows=4, prompt_tokens=5)
    texts = open_run(sink_contents(tiny_loaded(), tmp_path / "run", settings)).table("texts")
    assert len(texts) == 4 and texts["prompt"].nunique() > 1
    bare = open_run(
        sink_contents(tiny_loaded(), tmp_path / "bare", replace(settings, prompt_tokens=0))
    )
    assert set(bare.table("looks")["place"]) == {"block", "future", "committed"}
    # at the first step nothing is written, so nothing is the most frequent token
    begun = bare.table("samples").query("step == 0")
    assert begun["frequent"].eq(-1).all() and begun["frequent_probability"].isna().all()


def test_no_sinks_give_no_tables_and_no_error(tmp_path):
    settings = replace(SHORT, choose="excess", epsilon=1000.0)
    run = open_run(sink_contents(tiny_loaded(), tmp_path / "run", settings))
    assert set(run.tables) == {"looks", "texts"}
    assert run.table("looks")["sinks"].eq(0).all()


def test_sampling_does_not_change_what_is_written():
    loaded = tiny_loaded()
    task = Task(loaded, encode(loaded, PROMPTS[0]), replace(SETTINGS, temperature=0.0), 3)
    kept = sample_text(task, SETTINGS, (0, 1, 2), np.random.default_rng(0), lambda: None)
    assert kept.final_S[kept.open_S].tolist() == list(task.moments())[-1].written.tolist()


@pytest.mark.parametrize(
    "changes", [{}, {"logit_shift": True}, {"sink_kind": "token", "sink_count": 1}]
)
def test_on_what_it_wrote_itself_a_model_is_sampled_as_it_was(changes):
    loaded = tiny_loaded(**changes)
    task = Task(loaded, encode(loaded, PROMPTS[0]), SETTINGS, 3)
    once, again = (
        sample_text(task, SETTINGS, (0, 2), np.random.default_rng(0), lambda: None, whole)
        for whole in ((), list(task.moments()))
    )
    assert again.final_S.tolist() == once.final_S.tolist() and again.looks == once.looks
    for name, array in once.arrays()[0].items():
        torch.testing.assert_close(again.arrays()[0][name], array, equal_nan=True)


@pytest.mark.slow
def test_untrained_twins_read_the_texts_of_the_run(tmp_path):
    alone = open_run(sink_contents(tiny_loaded(), tmp_path / "alone", SHORT))
    told: list[str] = []
    settings = replace(SHORT, twin=True)
    done = open_run(sink_contents(tiny_loaded(), tmp_path / "run", settings, progress=told.append))
    assert done.table("twins")["made"].all() and told.count("reading the states") == 3
    for kind in ("initialised", "permuted"):
        looks = done.table(f"looks-{kind}")
        assert looks.drop(columns=["sinks", "pairs"]).equals(
            alone.table("looks").drop(columns=["sinks", "pairs"])
        )
        mine, theirs = (
            done.table(name).query("population == 'sink'")
            for name in ("samples", f"samples-{kind}")
        )
        written = {(row.text, row.position): row.token for row in mine.itertuples()}
        both = [row for row in theirs.itertuples() if (row.text, row.position) in written]
        assert both and all(row.token == written[row.text, row.position] for row in both), (
            "the texts are the run's"
        )
        assert set(done.table(f"probes-{kind}")["target"]) == set(TARGETS)
        assert not done.table(f"lens-{kind}")["value"].equals(done.table("lens")["value"])
    assert "No untrained control" not in " ".join(contents_sentences([done]))
    assert contents_sentences([alone])[-1].startswith("No untrained control of")


def test_what_a_control_shows_stands_beside_it(tmp_path):
    """Four differences, two of them told; of the control's four one is."""
    targets, names = ["token", "block", "next", "position"], ("probes", "probes-permuted")
    values = dict(zip(names, ([0.5, -0.4, 0.01, 0.02], [-0.2, -0.1, 0.01, 0.02]), strict=True))
    with RunWriter(
        tmp_path, kind="contents", model={"name": "x"}, settings=vars(SETTINGS), seed=0
    ) as writer:
        looks = {"place": ["future"], "sinks": [1], "positions": [10], "pairs": [1]}
        writer.table("looks", pd.DataFrame(looks))
        writer.table("texts", pd.DataFrame({"text": [0]}))
        writer.table("lens", pd.DataFrame({"place": ["future"]}))
        writer.table("twins", pd.DataFrame({"twin": ["permuted"], "made": [True], "why": [""]}))
        for name in names:
            rows = pd.DataFrame(
                {"place": "future", "population": "difference", "target": targets, "layer": 1}
            )
            value = np.array(values[name])
            writer.table(name, rows.assign(value=value, low=value - 0.15, high=value + 0.15))
    said = next(
        line for line in contents_sentences([open_run(tmp_path)]) if line.startswith("future")
    )
    assert (
        "(chance gives about 0) (shuffled weights 1 of 4); the largest is token at layer 1, +0.50 "
        in said
    )
    assert "[+0.35, +0.65] (shuffled weights -0.20); " in said
    assert said.endswith(
        "the lowest is block at layer 1, -0.40 [-0.55, -0.25] (shuffled weights -0.10)."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folds": 2}, "folds must be at least 3, but is 2"),
        ({"every": 0}, "every must be at least 1, but is 0"),
        ({"heldout": "x.txt"}, "there are both; leave one of them out"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    refused(re.escape(message), replace, SETTINGS, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choose": "exces"}, "did you mean 'excess'?"),
        ({"cache": "dual"}, "but cache=dual computes some of them; decode without a cache"),
        (
            {"layers": (3,)},
            "layers are numbers from 0 to 2, which leaves the last layer, but 3 is not",
        ),
        (
            {"folds": 9},
            "9 folds need as many texts, but there are 8; give more prompts or fewer folds",
        ),
        ({"prompts": (), "chat": True}, "the beginnings come from a corpus; give prompts"),
        (
            {"prompts": (), "rows": 10**6},
            "beginnings of 32 tokens, but rows=1000000 are to be written",
        ),
        ({"new_tokens": 100}, "100"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_taken(tmp_path, changes, message):
    # some are refused by the settings, the others by the model
    with refusing(re.escape(message)):
        sink_contents(tiny_loaded(), tmp_path / "run", replace(SETTINGS, **changes))
    assert not (tmp_path / "run").exists()


def test_an_autoregressive_model_has_no_future(tmp_path):
    refused("no positions that are still", sink_contents, tiny_llama(), tmp_path / "run", SETTINGS)
