"""`sinklab probe`, its figures and its sentences."""

from functools import partial

import pandas as pd
import pytest

from commands import error_of, out_of
from refusals import refused
from sinklab.lab.cli.command import Inputs, Reading, command
from sinklab.lab.cli.options import typed
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.studies.contents import ContentsSettings, Probe, figures
from sinklab.lab.studies.contents.figures import (
    contents_figure,
    contents_places,
    contents_sentences,
)
from tiny_diffusion import TEXT

SMALL = {
    "twin": False,
    "new_tokens": 8,
    "block_length": 4,
    "every": 2,
    "folds": 3,
    "resamples": 20,
    "layers": (0, 2),
}


def probe(
    prompt,
    model,
    out,
    inputs,
    settings,
    *,
    resume=False,
):
    given = {
        "prompt": prompt,
        "model": model,
        "out": out,
        "inputs": inputs,
        "resume": resume,
        "reading": Reading(),
    }
    command("probe", Probe())(**given, settings=typed(settings, "prompts"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(TEXT[start : start + 10] for start in range(0, 40, 8)))
    return path


@pytest.mark.slow
def test_the_command_says_what_was_found(model, prompts, tmp_path, capsys, monkeypatch):
    # one picture is enough
    one = partial(figures.save_contents_figures, places=("future",))
    monkeypatch.setattr(figures, "save_contents_figures", one)
    inputs = Inputs(prompts=prompts, samples=4)
    settings = ContentsSettings(choose="strongest", **SMALL)
    probe((), model, tmp_path / "run", inputs, settings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("the strongest keys of each head, sinks or not, in 4 texts.")
    assert [line.split()[0] for line in lines[1:5]] == ["block", "future", "committed", "prompt"]
    assert "Added sinks: " in lines[5] and lines[5].endswith("a constant.")
    assert lines[6].startswith("No untrained control")
    assert lines[7] == f"run folder: {tmp_path / 'run'}"
    assert lines[8] == f"drawn: {tmp_path / 'run' / 'contents-future.png'}"
    assert (tmp_path / "run" / "contents-future.png").read_bytes()[:4] == b"\x89PNG"
    refused("is taken", probe, (), model, tmp_path / "run", inputs, settings)
    probe((), model, tmp_path / "run", inputs, settings, resume=True)
    assert capsys.readouterr().out.splitlines() == lines
    assert contents_places(open_run(tmp_path / "run")) == ["block", "future", "committed", "prompt"]


def test_places_without_sinks_are_said_and_not_drawn(model, prompts, tmp_path, capsys):
    settings = ContentsSettings(epsilon=500.0, **SMALL)
    probe((), model, tmp_path / "run", Inputs(prompts=prompts), settings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("sinks by ε = 500, in 5 texts.")
    assert lines[2].endswith(
        "0 % of the positions of a layer are chosen, 0 pairs sampled; nothing to compare."
    )
    assert not any(line.startswith("figures") for line in lines)
    with pytest.raises(NotRecorded, match="or --choose strongest"):
        contents_figure(open_run(tmp_path / "run"))


def test_bad_input_is_told(model, prompts, tmp_path):
    out, settings = tmp_path / "run", ContentsSettings(**SMALL)
    refused(
        "both: 'The' and --prompts", probe, ("The",), model, out, Inputs(prompts=prompts), settings
    )
    refused("give it with --prompts FILE", probe, ("The",), model, out, Inputs(samples=3), settings)
    refused("3 folds need as many texts", probe, ("The",), model, out, Inputs(), settings)
    refused(
        "pairs must be at least 1",
        lambda: probe(("The",), model, out, Inputs(), ContentsSettings(pairs=0)),
    )
    assert not out.exists()


@pytest.mark.slow
def test_sentences_count_differences_that_are_sure(tmp_path):
    cells = [("sink", 0.9, 0.8, 1.0), ("matched", 0.1, 0.0, 0.2), ("difference", 0.8, 0.6, 1.0)]
    rows = [
        {
            "place": "future",
            "layer": 3,
            "target": "token",
            "measure": "skill",
            "population": one,
            "value": value,
        }
        | {
            "low": low,
            "high": high,
            "rows": 9,
            "texts": 5,
            "shuffled": 0.0,
            "other_text": 0.0,
            "accuracy": 0.5,
        }
        for one, value, low, high in cells
    ]
    constant = [{**row, "layer": 0, "value": 0.0, "low": 0.0, "high": 0.0} for row in rows]
    settings = {"choose": "excess", "epsilon": 3.0}
    with RunWriter(
        tmp_path, kind="contents", model={"name": "toy"}, settings=settings, seed=0
    ) as writer:
        writer.table(
            "looks",
            {"place": ["prompt"], "sinks": [0], "positions": [12], "pairs": [0], "step": [0]},
        )
        writer.table("texts", {"text": [0]})
        assert contents_sentences([open_run(tmp_path)])[0].endswith(
            "not complete; --resume goes on with it."
        )
        writer.table("probes", pd.DataFrame(rows + constant))
        lens = [
            {key: row[key] for key in ("place", "layer", "population", "value", "low", "high")}
            for row in rows
        ]
        writer.table("lens", pd.DataFrame(lens).assign(measure="entropy"))
        writer.table(
            "looks",
            {"place": ["future"], "sinks": [3], "positions": [12], "pairs": [3], "step": [0]},
        )
        writer.table("texts", {"text": [0, 1]})
    run = open_run(tmp_path)
    assert contents_places(run) == ["future"]
    lines = contents_sentences([run])
    assert lines[0] == "toy: sinks by ε = 3, in 2 texts."
    assert lines[1] == "block (masked, in the block being written): no such positions."
    assert lines[2].startswith(
        "future (masked, to the right of the block): 25 % of the positions of a layer are chosen, "
        "3 pairs sampled. Of 1 differences between what probes read at sinks and beside them, 1 "
        "are above 0 and 0 below it at 95 %"
    )
    assert lines[2].endswith("the largest is token at layer 3, +0.80 [+0.60, +1.00].")
    assert [
        path.name for path in figures.save_contents_figures(run, tmp_path / "new", prefix="a-")
    ] == ["a-contents-future.png"]
    titles = {
        axes.get_title("left"): len(axes.lines) for axes in contents_figure(run, "future").axes
    }
    assert titles["entropy, nats"] == 2 and titles["the token finally written (skill)"] == 6
    assert titles["position (R²)"] == 0


def test_runs_of_another_kind_are_refused(tmp_path):
    with RunWriter(tmp_path, kind="study", model={}, settings={}, seed=0):
        pass
    refused("is of kind 'study'; make one", contents_places, open_run(tmp_path))


def test_through_the_command_line(model, prompts, tmp_path, capsys):

    arguments = f"probe --model {model} --prompts {prompts} --out {tmp_path / 'run'}"
    arguments += " --epsilon 500 --new-tokens 8 --block-length 4 --every 4 --folds 3"
    assert "run folder: " in out_of(f"{arguments} --resamples 10 --layers 2 --no-twin", capsys)
    assert "decode without a cache" in error_of(f"{arguments} --cache dual --resume", capsys)
