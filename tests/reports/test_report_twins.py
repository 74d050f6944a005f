"""Numbers of the controls stand beside those of the model on the page; a run without controls says
so.
"""

import re

import pytest

from sinklab.lab.records import Arrays, Contents, RunWriter, open_run
from sinklab.lab.reports import as_studies, report
from sinklab.lab.reports.tables import table


def beside(run, **twins):
    """The run with the attention and the losses of other runs as those of its twins."""
    about = ("kind", "model", "settings", "seed", "samples", "part_size")
    with RunWriter(run.path, **{name: getattr(run.info, name) for name in about}) as writer:
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


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_the_page_shows_both_controls(make_study, tmp_path):
    twins = {"initialised": make_study("b", text_share=0.05)}
    twins["permuted"] = make_study("c", text_share=0.2)
    run = beside(make_study("a"), **twins)
    study = as_studies(run)[0]
    text = report(study, tmp_path / "page").read_text("utf-8").replace("\u00a0", " ")
    part = re.search(r'<section class="part" id="numbers">.*?</section>', text, re.S).group()
    names = ["measure", "value", "fresh weights", "shuffled weights"]
    assert re.findall(r"<th>(.*?)</th>", part) == [*names, "verdict"]
    rows = re.findall(r"<tr>.*?</tr>", part, re.S)
    row = next(one for one in rows if "attention on the greatest text position" in one)
    assert re.findall(r"<td>(.*?)</td>", row)[1:] == ["30.00", "5.001", "20.00", ""]
    written = table(study, "measures").set_index("measure")
    assert [*written.columns] == [
        *("value", "low", "high", "fresh weights", "shuffled weights", "verdict")
    ]
