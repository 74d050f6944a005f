"""`trace` and `report` from the command line, on tiny models."""

import re
from pathlib import Path

import pandas as pd
import pytest

from commands import cli, error_of, out_of
from pictures import no_pictures as no_pictures
from sinklab.lab.cli.progress import working
from sinklab.lab.cli.reports import _show_table
from sinklab.lab.records import open_run

QUICK = "--new-tokens 6 --block-length None --steps 3 --statistics received"


def test_a_run_is_not_reproduced_with_the_model_that_is_the_default(model, capsys):
    assert cli(f"trace The --model {model} --out out {QUICK}") == 0
    capsys.readouterr()
    for command in ("trace --config out --out again", "trace --config=out"):
        with pytest.raises(SystemExit) as end:
            cli(command)
        printed = capsys.readouterr()
        assert end.value.code == 2 and "--model" in printed.err and not printed.out
    assert not Path("again").exists()


def test_trace_takes_prompts_from_a_file_and_resumes(model, capsys):
    Path("q.jsonl").write_text(
        "".join(f'{{"question": "The {thing}"}}\n' for thing in ("sea", "boat", "man"))
    )
    command = f"trace --prompts q.jsonl --samples 2 --model {model} --out out {QUICK}"
    assert cli(f"{command} --layers -1 --maps 1:0:2 --every 2") == 0
    printed = capsys.readouterr()
    again = f"sinklab trace --model {model} --config out --out"
    assert printed.out.splitlines() == [
        "run folder: out",
        "next: sinklab report out",
        f"controls of every number, with shuffled and with fresh weights: {again} out --twin",
        f"what it writes with sinks blocked: {again} out-masked --edits block_keys:keys=top:k=5",
        f"what blocking them costs: sinklab curve --model {model}; head by head: sinklab curve "
        f"--model {model} --by head",
    ]
    stages = [re.sub(r"^ +\d+\.\d s  ", "", line) for line in printed.err.splitlines()]
    assert stages == [
        "writing sample 1 of 2",
        "a control (shuffled weights) reads some of the canvases",
    ]
    written = open_run("out")
    assert written.info.settings["prompts"] == ["The sea", "The boat"]
    assert written.info.model["recorded_layers"] == [1]
    assert written.has("maps", 1)
    assert cli(f"{command} --layers -1 --maps 1:0:2 --every 2") == 0
    assert "holds another run: its model['recorded_layers']" in error_of(command, capsys)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_report_of_two_prints_how_they_differ_and_writes_the_page(model, capsys):
    for name, edits in (("plain", ""), ("masked", "--edits block_keys:keys=top:k=2")):
        assert cli(f"trace 'The sea' --model {model} --out {name} {QUICK} {edits}") == 0
    capsys.readouterr()
    lines = out_of("report plain masked --out both", capsys).splitlines()
    assert any("measure" in line and "difference" in line for line in lines)
    assert lines[-1] == "report: both/report.html"
    assert Path("both/report.html").stat().st_size > 1000


def test_a_table_of_numbers_is_aligned(capsys):
    _show_table(pd.DataFrame({"measure": ["a", "longer"], "a": [1.23456, None], "b": [7, 12]}))
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert rows == [["a", "1.235", "7"], ["longer", "–", "12"]]


def test_other_processes_are_silent(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with working() as progress:
            progress.stage("the [bold] stage")
            progress.count(1, 2)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1
    assert re.fullmatch(r" +\d\.\d s  the \[bold\] stage", printed[0])
