import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from simulated import received_of

from refusals import refused, refusing
from sinklab.core.sinks import Excess
from sinklab.lab.analysis.rules import Top
from sinklab.lab.records import Arrays, Contents, RunWriter, open_run
from sinklab.lab.reports import NotRecorded, as_studies, report
from sinklab.lab.reports.tables import measures_table, verdicts_of

STEPS, LAYERS, HEADS, TEXT, PROMPT = 12, 2, 3, 24, 6
EVENTS = LAYERS * HEADS * (STEPS + STEPS - 2)


def one(run):
    return as_studies(run)[0]


def layers_of(study):
    return list(study.over("layer").itertuples())


def test_a_sample_has_its_arrays_and_tokens_on_one_grid(make_study):
    study = one(make_study(added=1, text_share=0.25))
    sample = study.samples[1]
    assert sample.index == 1
    steps = STEPS - 2
    assert (
        sample.step_numbers_T.tolist() == list(range(steps))
        and received_of(sample).dtype == np.float32
    )
    assert received_of(sample).shape == (steps, LAYERS, HEADS, 1 + TEXT)
    assert_allclose(sample.facts["share_TK"][:, 0], 0.5, rtol=1e-3)
    # 0.25 * 24 = 6 and 0.5 * 24 = 12 exceed 1 + 3 * 23/24: two sinks a head, the added one is the
    # main one.
    assert (
        sample.facts["sinks"].sum() == 2 * steps * LAYERS * HEADS and not sample.facts["main"].any()
    )
    assert sample.facts["events_TK"][3].nonzero()[0].tolist() == [0, 1 + PROMPT + 3]
    assert sample.states_TS.dtype == np.int8
    assert sample.states_TS[2].tolist() == [2] * PROMPT + [1] * 2 + [0] * (TEXT - PROMPT - 2)
    ages = ["prompt"] * PROMPT + ["committed", "just committed"] + ["masked"] * (TEXT - PROMPT - 2)
    assert sample.ages_TS[2].tolist() == ages
    # Before the first step nothing is known to be just committed.
    assert set(sample.ages_TS[0]) == {"prompt", "masked"}
    classes = (
        ["words"] * 4 + ["punctuation", "newline", "words", "punctuation"] + ["mask"] * (TEXT - 8)
    )
    assert sample.classes_TS[2].tolist() == classes
    assert sample.grid["token_id"][0].tolist() == list(range(TEXT)) and set(
        sample.grid["special"][0]
    ) == {
        "",
        "mask",
    }
    assert sample.labels_TK[2, [0, 1, 7, 9]].tolist() == ["added sink", "It", " night", "[MASK]"]
    assert sample.classes_TK[2, 0] == "sink" and sample.ages_TK[2, 0] == "added sink"
    assert sample.blocks_T.tolist() == [0] * 6 + [1] * 4
    assert (
        np.isnan(sample.stored("row_entropy")[0, 1]).all()
        and sample.stored("row_entropy")[0, 0, 0, 0] == 2.5
    )


def test_steps_of_a_cache_are_scaled_to_all_positions(make_study):
    whole, part = as_studies([make_study("whole", added=1), make_study("part", added=1, ran=0.25)])
    raw = part.run.array("attention", "received", sample=0)
    assert raw[1, 0, 0, 0] < 0.3 * raw[0, 0, 0, 0]
    assert_allclose(received_of(part.samples[0]), received_of(whole.samples[0]), rtol=2e-3)
    assert_allclose(part.samples[0].visible_TK, TEXT)
    assert_array_equal(part.samples[0].facts["events_TK"], whole.samples[0].facts["events_TK"])


def test_one_query_a_step_is_scaled_too_and_keys_grow(make_study):
    study = one(make_study(family="autoregressive", text_share=0.8, samples=8))
    sample = study.samples[0]
    assert sample.exists_TK.sum(1).tolist() == list(range(PROMPT, PROMPT + STEPS))
    here = sample.positions_T[3]
    assert_allclose(received_of(sample)[3, 0, 0, 0], 0.8 * here, rtol=1e-3)
    assert_allclose(sample.visible_TK[3, : int(here)], here)
    assert not sample.facts["main"].any()
    assert (sample.facts["events_TK"][:, 0] == LAYERS * HEADS).all() and not sample.facts[
        "events_TK"
    ][:, 1:].any()
    # The token written at the step before is the youngest; before the first step there is only the
    # prompt.
    assert sample.ages_TS[2, PROMPT : PROMPT + 3].tolist() == ["committed", "just committed", None]
    assert sample.states_TS[0].tolist() == [2] * PROMPT + [-1] * STEPS
    assert sample.labels_TK[0, PROMPT] is None
    verdict = next(
        verdict for verdict in verdicts_of(study) if verdict.name == "sinks only at the start"
    )
    assert verdict.holds is True and verdict.estimate.value == 1


@pytest.mark.parametrize("added", [0, 2])
def test_facts_of_the_layers_are_those_that_were_put_in(make_study, added):
    study = one(make_study(added=added, share=0.4, text_share=0.3, norm=0.25))
    for place, facts in enumerate(layers_of(study)):
        assert facts.layer == place
        assert_allclose(facts.text_share, 0.3, rtol=1e-3)
        # every sink is a mask, about to be committed: there is no visible one to compare with
        # visible text
        assert_allclose([facts.rest_norm, facts.text_norm, facts.mask_norm], 2)
        assert np.isnan(facts.sink_norm)
        # two added sinks of 0.2 * 24 = 4.8 each, a text sink of 7.2, all above 3.875
        assert_allclose(facts.sinks, 1 + added)
        assert_allclose(facts.absorbed, 0.3 + 0.2 * added, rtol=2e-3)
        assert_allclose(facts.main_share, 0.3, rtol=1e-3)
        cases = HEADS * (STEPS + STEPS - 2)
        assert (facts.mains, facts.events) == (cases, cases * (1 + added))
        assert facts.added_events == cases * added
        got = [facts.added_share, facts.added_norm]
        assert_allclose(got, [0.4, 0.25] if added else [np.nan] * 2, rtol=1e-3)


@pytest.mark.slow
def test_added_sinks_are_no_tokens_and_have_no_position(make_study):
    def masks_alone(sample, arrays):
        received = arrays["received"]
        masked = np.arange(TEXT) >= PROMPT + np.arange(len(received))[:, None]
        received[..., -TEXT:] = (0.2 + masked)[:, None, None]

    how = {"change": masks_alone, "samples": 8}
    plain, added = as_studies([make_study("p", **how), make_study("s", added=1, **how)])
    # What the added sink receives is nobody's class or place.
    assert (
        plain.measured.explained.by_class.value == pytest.approx(1, abs=2e-3)
        and plain.measured.explained.word == "semantic"
    )
    for name in ("by_class", "by_position"):
        ends = [
            (found.value, found.low, found.high)
            for found in (getattr(r.measured.explained, name) for r in (plain, added))
        ]
        assert_allclose(*ends, atol=1e-9)
    both = one(make_study("both", added=1, text_share=0.25))
    assert both.measured.events_NS[0].nonzero()[0].tolist() == list(range(PROMPT, PROMPT + STEPS))


def test_keys_that_nobody_sees_hold_nothing(make_study):
    def hidden(sample, arrays):
        arrays["visible"][2:, 5] = 0

    sample = one(make_study(change=hidden)).samples[0]
    assert (
        sample.labels_TK[1, 5] == "\n"
        and sample.labels_TK[2, 5] is None
        and sample.classes_TK[2, 5] is None
    )
    assert np.isnan(sample.facts["share_TK"][2:, 5]).all() and not sample.exists_TK[2:, 5].any()


def planted_norms(change):
    """Masks carry values of a quarter of the length and are never sinks; sinks stand on visible
    text, from step 3 on on what was committed, which carries longer values than prompts; each is
    ``change`` times as long as its state's.
    """

    def put(sample, arrays):
        arrays["received"][:] = 0.6
        for step, norm_LS in enumerate(arrays["value_norm"]):
            norm_LS[:, :PROMPT], norm_LS[:, PROMPT : PROMPT + step] = 1.5, 3.0
            norm_LS[:, PROMPT + step :] = 0.5
            place = PROMPT + step - 1 if step > 2 else step
            arrays["received"][step, :, :, place] = 8.0
            norm_LS[:, place] *= change

    return put


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "longer", "word"), [(1.0, None, "inconclusive"), (1.3, True, "longer")]
)
def test_sinks_are_compared_with_text_in_the_same_state(make_study, change, longer, word):
    """A mixture of states is no effect: all positions together say 1.8 times where nothing was
    planted.
    """
    study = one(make_study(change=planted_norms(change), samples=8))
    facts = study.over("layer").iloc[0]
    # of eight samples four have 12 steps and four have 10; three sinks of each stand in the prompt
    rest = (64 * 3.0 + 24 * 1.5) / 88
    found = (facts.mask_norm, facts.rest_norm, facts.sink_norm)
    assert found == pytest.approx((0.5, rest, change * rest), rel=5e-4)
    ratio = study.measured.norm_ratio
    assert (ratio.samples, ratio.above(1)) == (8, longer)
    assert ratio.value == pytest.approx(change, rel=5e-4)
    words = measures_table(study).set_index("measure")["verdict"]
    assert words["value norm, text sinks over other text"] == word


def test_recorded_layers_and_heads_keep_their_numbers(make_study):
    study = one(make_study(recorded_layers=[3, 17], recorded_heads=[0, 4, 5]))
    assert (study.layers, study.heads) == ([3, 17], [0, 4, 5])
    assert [facts.layer for facts in layers_of(study)] == [3, 17]
    assert sorted(set(study.measured.motions["head"])) == [0, 4, 5]
    with refusing(r"names 3 .* sample 0 hold 2"):
        _ = one(make_study("other", recorded_layers=[1, 2, 3])).layers


def test_steps_that_were_not_recorded_are_left_out(make_study):
    def thin(sample, arrays):
        for name, array in arrays.items():
            arrays[name] = array[::3]

    study = one(make_study(change=thin))
    sample = study.samples[0]
    assert sample.step_numbers_T.tolist() == [0, 3, 6, 9] and sample.blocks_T.tolist() == [
        0,
        0,
        1,
        1,
    ]
    assert sample.states_TS.shape == (4, TEXT) and (sample.states_TS[2] == 1).sum() == 6
    # Committed at steps 3, 4 and 5, first seen at step 6.
    assert (sample.ages_TS[2] == "just committed").sum() == 3


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_an_interrupted_run_shows_the_samples_it_has(make_study, tmp_path):
    whole = make_study()
    with (
        pytest.raises(KeyboardInterrupt),
        RunWriter(
            tmp_path / "half", kind="study", model=whole.info.model, settings={}, seed=3, samples=2
        ) as run,
    ):
        given = Arrays(whole.arrays("attention", 0), whole.dims("attention", 0))
        tables = {"tokens": whole.table("tokens", 0)}
        run.write(0, {0: Contents(tables, {"attention": given})})
        raise KeyboardInterrupt
    study = one(open_run(tmp_path / "half"))
    assert len(study.samples) == 1 and layers_of(study)[0].mains == STEPS * HEADS
    assert study.samples[0].blocks_T.tolist() == [-1] * STEPS
    assert [verdict.holds for verdict in verdicts_of(study)] == [None, None]
    content = report(study, tmp_path / "page", tables=False).read_text("utf-8")
    assert "was interrupted: KeyboardInterrupt" in content


def test_what_a_run_did_not_record_is_none(make_study):
    study = one(make_study(leave_out=("attention",)))
    assert study.layers == study.heads == layers_of(study) == [] and study.recorded == ()
    measured = study.measured
    assert measured.curve.empty and measured.rules.empty and study.cost is None
    assert measured.motion is measured.enriched.get("token") is measured.explained is None
    with pytest.raises(NotRecorded, match=r"attention: .* of sample 0"):
        _ = received_of(study.samples[0])
    thin = one(make_study("thin", leave_out=("tokens", "value_norm")))
    assert thin.measured.enriched.get("token") is None and not thin.samples[0].has_tokens
    assert np.isnan(layers_of(thin)[0].rest_norm)
    with pytest.raises(NotRecorded, match=r"table tokens: .* of sample 0"):
        _ = thin.samples[0].grid


@pytest.mark.slow
def test_verdicts_follow_the_tables(make_study):
    study = one(make_study(samples=8))
    verdicts = {verdict.name: verdict for verdict in verdicts_of(study)}
    assert (
        verdicts["96 % filtered"].holds is False
        and verdicts["sinks only at the start"].estimate.value == 0
    )
    # eight samples that agree are p = 0.0078, enough for a share among two statements
    assert all(verdict.holds is not None for verdict in verdicts_of(study))
    assert verdicts["96 % filtered"].p == 2 * 0.5**8


def test_runs_of_another_kind_are_refused(tmp_path):
    with RunWriter(tmp_path / "training", kind="training", model={}, settings={}, seed=0):
        pass
    refused(r"'study': .* kind 'training'", as_studies, open_run(tmp_path / "training"))
    refused("at least one run", as_studies, [])


def test_labels_tell_runs_apart(make_study):
    runs = [make_study("tiny", folder="a"), make_study("tiny", folder="b"), make_study("other")]
    assert [study.label for study in as_studies(runs)] == ["tiny (a)", "tiny (b)", "other"]
    paths = [
        make_study(name, folder=f"n{index}")
        for index, name in enumerate(("/models/x/llada", "GSAI/LLaDA-8B", "./"))
    ]
    assert [study.label for study in as_studies(paths)] == ["llada", "GSAI/LLaDA-8B", "./"]
    assert [study.label for study in as_studies([runs[0], runs[0]])] == [
        "tiny (a) [1]",
        "tiny (a) [2]",
    ]


@pytest.mark.parametrize(
    ("rule", "events", "threshold"), [(Excess(8.0), 0, 1 + 8 * 23 / 24), (Top(2), 2, np.nan)]
)
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_a_rule_that_was_given_decides_what_is_a_sink(
    make_study, tmp_path, rule, events, threshold
):
    run = make_study(text_share=0.3)
    study = as_studies(run, rule=rule)[0]
    assert sum(facts.events for facts in layers_of(study)) == events * EVENTS
    assert_allclose(study.measured.threshold, threshold)
    assert study.measured.events_NS.sum() == events * EVENTS and len(study.measured.rules) == 7
    page = report(run, tmp_path, rule=rule, tables=False).read_text("utf-8")
    assert study.rule_words in page and study.rule_words in (
        "excess (epsilon = 8, scale = sum)",
        "top (k = 2)",
    )
