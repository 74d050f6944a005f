"""SIGTERM ends a command in order, with status 143; the same one goes on to what an unbroken run
writes.
"""

import os
import signal
from pathlib import Path

import pytest

from commands import cli
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.studies.trace import run as observation
from tiny_diffusion import save_tiny


@pytest.mark.slow
def test_a_command_keeps_what_is_written_and_goes_on(monkeypatch, capsys):
    save_tiny(Path("model"), 1, context=160)
    monkeypatch.setattr(observation, "SAMPLES", 1)
    command = "trace The sea --model model --new-tokens 6 --statistics received --out"
    handler, write = signal.getsignal(signal.SIGTERM), RunWriter.write

    def killing(*given):
        write(*given)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "write", killing)
        assert cli(f"{command} run") == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "sinklab: interrupted; a run folder that was begun is kept"
    left = open_run("run")
    assert (left.info.status, left.info.error) == ("interrupted", "Terminated: 143")
    assert left.samples == (0,)
    kept = {path: path.stat().st_mtime_ns for path in Path("run").glob("*-0000.*")}
    for folder in ("run", "whole"):
        assert cli(f"{command} {folder}") == 0
    assert open_run("run").info.files == open_run("whole").info.files
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "nothing is made twice"
