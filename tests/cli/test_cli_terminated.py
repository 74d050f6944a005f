"""SIGTERM ends a command in order, with status 143; the same one goes on to what an unbroken run
writes.
"""

import os
import signal
from pathlib import Path

import pytest

from commands import cli
from sinklab.lab.records import RunWriter, open_run
from tiny_diffusion import save_tiny
from tiny_tasks import write_gsm8k


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


def terminated_after(call, owner, method, monkeypatch):
    """SIGTERM comes once this method has been called so many times."""
    usual, calls = getattr(owner, method), [0]

    def counted(self, *given, **how):
        made = usual(self, *given, **how)
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return made

    monkeypatch.setattr(owner, method, counted)


WRITES = "--new-tokens 6 --block-length None"
STUDIES = {
    "trace": (
        f"trace The sea boat --model model {WRITES} --statistics received",
        RunWriter,
        "write",
        1,
        "tokens",
    ),
    "curve": (
        "curve --by layer --model model --rows 3 --length 16",
        RunWriter,
        "write",
        1,
        "curve_rows",
    ),
    "eval": (
        f"eval --model model --tasks gsm8k --data data --limit 4 --num-fewshot 0 {WRITES}",
        RunWriter,
        "write",
        1,
        "samples",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_command_keeps_what_is_written_and_goes_on(name, monkeypatch, capsys):
    if name == "eval":
        pytest.importorskip("lm_eval")
        monkeypatch.setattr("sinklab.lab.studies.benchmarks.harness_model.PART", 2)
        write_gsm8k(4)
    save_tiny(Path("model"), 1, context=160)
    command, owner, method, calls, table = STUDIES[name]
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        terminated_after(calls, owner, method, patch)
        assert cli(f"{command} --out run") == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "sinklab: interrupted; a run folder that was begun is kept"
    )
    # a curve of several models has a folder for each
    run, again = (
        path / "model" if name == "curve" else path for path in (Path("run"), Path("whole"))
    )
    left = open_run(run).info
    assert (left.status, left.error) == ("interrupted", "Terminated: 143")
    kept = {path: path.read_bytes() for path in run.glob("*") if path.name != "run.json"}
    assert kept
    # what is complete of a curve is never made again
    assert cli(f"{command} --out run") == 0
    assert cli(f"{command} --out whole") == 0
    ended, whole = open_run(run), open_run(again)
    assert ended.info.status == "complete"
    assert ended.table(table).equals(whole.table(table))
    assert all(path.read_bytes().startswith(content) for path, content in kept.items()), (
        "nothing is made twice"
    )
