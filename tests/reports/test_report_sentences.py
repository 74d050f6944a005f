import numpy as np
import pytest

from sinklab.lab.reports import as_studies
from sinklab.lab.reports import sentences as say
from sinklab.lab.reports.findings import blocking

STEPS, TEXT, PROMPT = 12, 24, 6


def spoken(text):
    return text.replace("\u00a0", " ")


def told(statement, run):
    return " ".join(say.told(statement, run))


def one(run):
    return as_studies(run)[0]


def test_motion_is_told_with_its_numbers(make_study):
    runs = [make_study("plain", samples=8), make_study("sink", added=1, text_share=0.2, samples=8)]
    plain, added = as_studies(runs)
    text = spoken(told("motion", plain))
    assert text.startswith(
        "The sinks of plain are moving: at two random steps, a head's strongest token differs"
    )
    assert text.endswith("100.0 % of the time on average (8 samples).")
    text = spoken(told("motion", added))
    assert "The sinks of sink are static" in text and "differs 0.0 % of the time" in text
    assert text.endswith("Among text positions alone that chance is 100.0 %.")
    none = told("motion", one(make_study("none", text_share=0.05)))
    assert none == "No head of none has a sink at two steps, so motion cannot be measured."
    kept = spoken(told("motion", one(make_study("ar", family="autoregressive", text_share=0.8))))
    assert kept == (
        "In ar, at two random steps, a head's strongest token differs 0.0 % of the time on average "
        "(2 samples; a verdict takes 8)."
    )


@pytest.mark.parametrize(
    ("what", "verdict"),
    [
        ("class", "rather semantic"),
        ("position", "rather positional"),
        ("neither", "too few to separate them"),
    ],
)
def test_what_explains_attention_is_told_either_way(make_study, what, verdict):
    def change(sample, arrays):
        received = arrays["received"]
        masked = np.arange(TEXT) >= PROMPT + np.arange(len(received))[:, None]
        early = np.broadcast_to(np.arange(TEXT) % 2 == 0, masked.shape)
        noise = np.random.default_rng(sample).random(masked.shape)
        score = {"class": masked, "position": early, "neither": noise}[what]
        received[:] = (0.2 + score)[:, None, None]

    text = spoken(told("explained", one(make_study(change=change, samples=8))))
    assert text.startswith("In tiny, token class (with [MASK] as a class) explains")
    assert (
        verdict in text
        and "8 samples" in text
        and ("detectable difference" in text) == (what == "neither")
    )
    if what == "class":
        assert "explains 100.0 % of the variance" in text


def test_classes_that_sinks_favour_are_named(make_study):
    text = spoken(told("classes", one(make_study())))
    assert (
        "sinks favour tokens of class mask (100.0 % of sinks, 54.0 % of positions: 1.9 times as "
        "often as by chance" in text
    )
    assert "and tokens that are masked (100.0 % of sinks, 54.0 %" in text
    # The added sink is no class of tokens, and here it is the only sink.
    assert told("classes", one(make_study("sink", added=1, text_share=0.1))) == ""
    assert told("classes", one(make_study("none", leave_out=("tokens",)))) == ""


def test_removals_are_told_an_edit_each(make_study):
    removals = {
        "sample": [0, 0, 0],
        "forward": [1, 2, 1],
        "edit": ["block_keys", "block_keys", "window_attention"],
        "keys": [5, 5, 12.0],
        "held": [0.5, 0.3, np.nan],
        "removed": [0.4, 0.2, 0.1],
        "overlap": [np.nan, 0.5, np.nan],
    }
    first, second = map(spoken, say.told("removals", one(make_study(whole={"removals": removals}))))
    assert first == (
        "In tiny, block_keys removed 5.00 keys per head in every forward pass; attention mass of "
        "the selected keys 40.0 %; mass actually removed 30.0 %; overlap of the selection with "
        "that of the step before 50.0 %."
    )
    assert second == (
        "In tiny, window_attention removed 12.0 keys per head in every forward pass; mass "
        "actually removed 10.0 %."
    )
    assert told("removals", one(make_study("none"))) == ""


def test_in_short_holds_for_runs_that_recorded_little(make_study):
    bare = one(make_study("bare", leave_out=("attention", "heldout", "tokens", "generations")))
    assert say.in_short([bare]) == []
    few = one(
        make_study(
            "few", leave_out=("value_norm", "tokens", "heldout", "main_by_state", "share_by_state")
        )
    )
    short = [spoken(text) for text in say.in_short([few])]
    assert short.pop().startswith("No untrained control of few was run;")
    assert (
        len(short) == 2
        and short[0].startswith("In few, which has no added sink")
        and "a verdict takes 8" in short[1]
    )


def test_whether_hidden_sinks_matter_more_is_told_by_an_interval_over_rows(make_study):
    table = make_study("table").table("heldout")

    def words(name, change):
        """Of a run whose rows lose this more with 5 sinks hidden than with as many random
        columns.
        """
        losses = list(map(np.asarray, table["losses"]))
        losses[3] = losses[4][: len(change)] + change
        rows = table.assign(losses=[one[: len(change)].tolist() for one in losses])
        study = one(make_study(name, leave_out=("heldout",), whole={"heldout": rows}))
        return blocking(study)["gap"], told("heldout", study)

    spread = np.array([-0.05, 0.03, 0.02, -0.01, 0.04, -0.03, 0.02, -0.02])
    for name, mean, verdict in (
        ("more", 0.1, "they matter more"),
        ("less", -0.1, "they matter less"),
    ):
        found, said = words(name, mean + spread)
        assert found.above() is not None and found.value == pytest.approx(mean) and verdict in said
    # less than two standard errors above zero
    found, said = words("unsure", 0.02 + spread)
    assert found.above() is None and "not distinguishable (detectable difference: 0.0" in said
    found, said = words("few", 0.1 + spread[:5])
    assert found.above() is None and "inconclusive with 5 rows (8 needed)" in said
    rowless = one(
        make_study("old", leave_out=("heldout",), whole={"heldout": table.drop(columns="losses")})
    )
    assert not blocking(rowless)["gap"].samples
    assert "inconclusive, since the run kept no losses of single rows" in told("heldout", rowless)
