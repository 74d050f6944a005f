"""Numbers of the controls stand beside those of the model on the page; a run without controls says
so.
"""

import re
from functools import partial

import pytest
from noted import again

from sinklab.lab.records import open_run
from sinklab.lab.reports import as_studies, report
from sinklab.lab.reports import sentences as say
from sinklab.lab.reports.build import judged
from sinklab.lab.reports.tables import measures, table


def beside(run, **twins):
    """The run with the attention and the losses of other runs as those of its twins."""
    with again(run, resume=True) as writer:
        for kind, other in twins.items():
            for part in other.parts("attention"):
                arrays, dims = (
                    other.arrays("attention", part=part),
                    other.dims("attention", part=part),
                )
                writer.arrays(f"attention-{kind}", arrays, dims, part=part)
            if "heldout" in other.tables:
                writer.table(f"heldout-{kind}", other.table("heldout"))
        kinds = ["initialised", "permuted"]
        made = [kind in twins for kind in kinds]
        why = ["" if is_made else "it would take about 12 min" for is_made in made]
        writer.table("twins", {"twin": kinds, "made": made, "why": why})
    return open_run(run.path)


@pytest.fixture
def calm(make_study):
    """Runs that attend evenly, and in which blocking keys costs nothing."""
    return partial(make_study, **{"text_share": 0.05, "sinks": 0.02})


@pytest.mark.slow
def test_a_twin_is_read_with_its_own_numbers_on_the_same_tokens(make_study, calm):
    of = make_study
    study = as_studies(beside(of("a"), initialised=calm("b"), permuted=of("c", text_share=0.2)))[0]
    assert [*study.twins] == ["initialised", "permuted"]
    for kind, name in (("initialised", "b"), ("permuted", "c")):
        twin, alone = study.twins[kind], as_studies(open_run(study.run.path.parent / name))[0]
        assert measures(twin) == pytest.approx(measures(alone), nan_ok=True)
        assert twin.label == study.label
        assert twin.twins == {}
        assert twin.generations is None
    assert measures(study) == pytest.approx(measures(as_studies(of("again"))[0]), nan_ok=True)


def test_numbers_of_both_controls_stand_behind_each_statement(make_study, calm):
    study = as_studies(
        beside(
            make_study("a", sinks=1.5), initialised=calm("b"), permuted=calm("c", text_share=0.1)
        )
    )[0]
    said = {
        name: say.told(name, study)[-1].replace("\u00a0", " ")
        for name in ("share", "motion", "classes", "heldout")
    }
    assert said["share"].endswith("Controls: shuffled weights 10.0 %, fresh weights 5.0 %.")
    assert "Controls: shuffled weights" not in said["motion"], "calm models have no sinks to follow"
    # 5 keys cost calm ones 0.02 nats
    assert said["heldout"].endswith("Controls: shuffled weights +0.02, fresh weights +0.02.")
    told = {name: sentence for name, _, sentence in judged([study])}
    cost = next(sentence for name, sentence in told.items() if "costly" in name)
    assert cost.replace("\u00a0", " ").endswith(
        "Controls: shuffled weights 0.1 %, fresh weights 0.1 %."
    )


def test_a_control_that_shows_the_same_is_not_distinguishable(make_study):
    of = partial(make_study, samples=8)
    run = beside(of("a"), permuted=of("b"), initialised=of("c", text_share=0.29))
    assert as_studies(run)[0].in_controls["greatest share"].replace("\u00a0", " ") == (
        "shuffled weights 30.0 % (not distinguishable), fresh weights 29.0 %"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_the_page_shows_both_controls(make_study, calm, tmp_path):
    run = beside(make_study("a"), initialised=calm("b"), permuted=make_study("c"))
    text = report(run, tmp_path / "page").read_text("utf-8").replace("\u00a0", " ")
    assert "No untrained control" not in text
    part = re.search(r'<section class="part" id="twins">.*?</section>', text, re.S).group()
    assert "Beside the controls" in part
    assert re.findall(r"<th>(.*?)</th>", part) == [
        "measure",
        "trained",
        "fresh weights",
        "shuffled weights",
    ]
    rows = re.findall(r"<tr>.*?</tr>", part, re.S)
    row = next(one for one in rows if "attention on the greatest text position" in one)
    assert re.findall(r"<td>(.*?)</td>", row)[1:] == ["30.0", "5.00", "30.0"]
    written = table(run, "twins")
    assert [*written.columns] == ["measure", "trained", "initialised", "permuted"]
    verdicts = table(run, "verdicts").set_index("name")["controls"]
    assert verdicts["blocking is costly"].startswith("shuffled weights ")


@pytest.mark.usefixtures("no_pictures")
def test_a_run_without_twins_says_so(make_study, tmp_path):
    old = make_study("old")
    text = report(old, tmp_path / "old").read_text("utf-8")
    said = "No untrained control of old was run; the setting `twin` runs two on all canvases."
    html = re.sub(r"`([^`]*)`", r"<code>\1</code>", said)
    assert f"<li>{html}</li></ul>" in text, "the last of the findings"
    assert "Controls:" not in text and "Beside the controls" not in text
    why = say.told("twins", as_studies(beside(make_study("dear")))[0])
    assert why == [said.replace("old was run", "dear was run (it would take about 12 min)")]
    assert as_studies(old)[0].in_controls == {}
