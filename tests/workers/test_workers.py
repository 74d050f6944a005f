"""Runs by workers are the runs of a loop: to the last bit, after kills, and beside samples that
fail.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import sinklab
from launched import PATIENCE
from sinklab.core.errors import Checked
from sinklab.extras.ray import engine
from sinklab.lab.cli.main import main
from sinklab.lab.records import Contents, RunWriter, open_run
from sinklab.lab.studies.base import Study
from sinklab.lab.studies.trace.study import StudySettings, Trace
from sinklab.lab.studies.trace.study import study as trace

pytestmark = pytest.mark.slow

PROMPTS = tuple(f"The sea {number}" for number in range(18))


def contents(folder):
    """Every file of a run by its name, without the time at which it was begun."""
    found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    about = json.loads(found.pop("run.json"))
    assert about.pop("created")
    return found | {"run.json": about}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A command without its folder, and the files that it writes in a loop, in four parts."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    asked = ["trace", "--prompts", str(folder / "prompts.txt"), "--new-tokens", "4", "--out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trace, "part_size", lambda *_: 5)
        assert main([*asked, str(folder / "run")]) == 0
        yield SimpleNamespace(asked=asked, files=contents(folder / "run"))


def test_workers_and_shards_write_what_a_loop_writes(ray, alone, tmp_path):
    lm = sinklab.load("tiny")
    assert len(alone.files) > 10
    for place in range(2):
        settings = StudySettings(prompts=PROMPTS, new_tokens=4)
        trace(lm, tmp_path / "shards", settings, shard=f"{place}/2")
    assert contents(tmp_path / "shards") == alone.files
    assert contents(lm.watch(PROMPTS, 4, workers=2).path) == alone.files


class Squares(Study):
    """Square numbers; some of them fail while a file says so."""

    @dataclass(frozen=True)
    class Settings(Checked):
        bad: str = ""
        """File that makes 1 fail, and 5 end its process; 7 does so once."""

    shards = True

    def samples(self, plan):
        return 8

    def part_size(self, plan):
        return 2

    def make(self, work, samples):
        (sample,) = samples
        bad = Path(work.settings.bad)
        once = bad.with_name("once")
        if bad.exists() and sample == 1:
            raise RuntimeError("out of memory")
        if bad.exists() and (sample == 5 or (sample == 7 and not once.exists())):
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {sample: Contents({"squares": [{"sample": sample, "square": sample**2}]}, {})}


def test_a_sample_that_fails_is_named_and_comes_when_it_can(ray, tmp_path, monkeypatch):
    from ray import cloudpickle

    # workers do not find this file
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(engine, "TRIES", 2)
    bad = tmp_path / "bad"
    bad.touch()
    lm, settings = sinklab.load("tiny"), Squares.Settings(str(bad))
    with pytest.raises(ValueError, match="sample 1: RuntimeError: out of memory; sample 5: ended"):
        Squares()(lm, tmp_path / "run", settings, workers=2)
    run = open_run(tmp_path / "run")
    assert run.info.status == "interrupted"
    assert set(run.table("squares")["sample"]) == {2, 3, 6, 7}
    bad.unlink()
    Squares()(lm, tmp_path / "run", settings, workers=1)
    run = open_run(tmp_path / "run")
    assert run.info.status == "complete"
    assert run.table("squares")["square"].tolist() == [number**2 for number in range(8)]


def test_more_gpus_than_there_are_are_refused_before_a_model_is_loaded(ray, tmp_path):
    def never():
        raise AssertionError("loaded")

    said = "2 workers with 99 GPUs each need 198"
    with pytest.raises(ValueError, match=said):
        trace(never, tmp_path / "run", workers=2, gpus_per_worker=99)


def test_a_model_that_no_worker_can_load_is_refused(tmp_path):
    lm = sinklab.load("tiny-causal")
    wrapped = sinklab.wrap(lm.model, lm.tokenizer, kind="autoregressive")
    with pytest.raises(ValueError, match="load the model by themselves"):
        wrapped.watch("The sea", 2, workers=2)


def test_the_extra_is_named_where_it_is_absent(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["trace", "--workers", "2", "--out", str(tmp_path / "run")]) == 2
    assert 'pip install "sinklab[ray]"' in capsys.readouterr().err


PAUSED = """
import os, signal, sys
from sinklab.lab.cli.main import main
from sinklab.lab.records import RunWriter
from sinklab.lab.studies.trace.study import Trace

def paused(*part):
    written(*part)
    print(os.getpid(), flush=True)
    signal.pause()

written, RunWriter.write = RunWriter.write, paused
Trace.part_size = lambda *_: 5
main(sys.argv[1:])
"""
"""A driver that writes one part, tells its number and waits."""


def test_a_driver_that_is_ended_leaves_a_run_that_goes_on(
    ray, alone, tmp_path, monkeypatch, python
):
    """By SIGKILL, Ctrl-C and SIGTERM, each time after it wrote a part."""
    run = tmp_path / "run"
    asked = [*alone.asked, str(run), "--workers", "1"]
    with subprocess.Popen([python, "-c", PAUSED, *asked], stdout=subprocess.PIPE) as command:
        driver = psutil.Process(int(command.stdout.readline()))
        children = driver.children(recursive=True)
        # those that only report try for a minute to tell of the end
        agents = ("/agent.py", "/agent/main.py")
        children = [one for one in children if not any(x.endswith(agents) for x in one.cmdline())]
        assert children
        driver.kill()
        assert command.wait(PATIENCE) == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, PATIENCE)
    assert not alive, "nothing of Ray is left"
    written = RunWriter.write
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):

        def ended(self, *part, number=number):
            written(self, *part)
            signal.raise_signal(number)

        monkeypatch.setattr(RunWriter, "write", ended)
        # the children of a job in the background ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert main(asked) == status
        assert open_run(run).info.status == "interrupted"
    monkeypatch.undo()
    assert main(asked) == 0
    assert contents(run) == alone.files
