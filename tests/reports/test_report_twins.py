"""Numbers of the controls stand beside those of the model on the page; a run without controls says
so.
"""

import re
from functools import partial

import pytest
from noted import again

from sinklab.lab.records import Arrays, Contents, open_run
from sinklab.lab.reports import as_studies, report
from sinklab.lab.reports.tables import measures, table


def beside(run, **twins):
    """The run with the attention and the losses of other runs as those of its twins."""
    with again(run) as writer:
        for kind, other in twins.items():
            for sample in other.samples:
                values, dims = other.arrays("attention", sample), other.dims("attention", sample)
                given = {f"attention-{kind}": Arrays(values, dims)}
                writer.write(sample, {sample: Contents({}, given)})
        kinds = ["initialised", "permuted"]
        made = [kind in twins for kind in kinds]
        why = ["" if is_made else "it would take about 12 min" for is_made in made]
        writer.table("twins", {"twin": kinds, "made": made, "why": why})
    return open_run(run.path)


@pytest.fixture
def calm(make_study):
    """Runs that attend evenly."""
    return partial(make_study, **{"text_share": 0.05})


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
    assert measures(study) == pytest.approx(measures(as_studies(of("again"))[0]), nan_ok=True)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_the_page_shows_both_controls(make_study, calm, tmp_path):
    run = beside(make_study("a"), initialised=calm("b"), permuted=make_study("c"))
    study = as_studies(run)[0]
    text = report(study, tmp_path / "page").read_text("utf-8").replace("\u00a0", " ")
    part = re.search(r'<section class="part" id="numbers">.*?</section>', text, re.S).group()
    names = ["measure", "value", "fresh weights", "shuffled weights"]
    assert re.findall(r"<th>(.*?)</th>", part) == [*names, "verdict"]
    rows = re.findall(r"<tr>.*?</tr>", part, re.S)
    row = next(one for one in rows if "attention on the greatest text position" in one)
    assert re.findall(r"<td>(.*?)</td>", row)[1:] == ["30.00", "5.001", "30.00", ""]
    written = table(study, "measures").set_index("measure")
    assert [*written.columns] == [
        *("value", "low", "high", "fresh weights", "shuffled weights", "verdict")
    ]
