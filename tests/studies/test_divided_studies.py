"""A study over models that several processes hold together is the study over the whole model."""

import numpy as np
import pytest

from launched import torchrun
from sinklab.extras.parallel import dividing
from sinklab.lab.records import open_run
from sinklab.lab.studies.processes import Processes, Units
from sinklab.lab.studies.trace.study import study
from tiny_diffusion import save_tiny

PROMPTS = ("The old man", "The sea", "The wind")


@pytest.mark.skipif(not dividing.divides_experts(), reason="transformers cannot divide experts")
@pytest.mark.slow
def test_two_processes_of_one_model_write_what_one_process_writes(tmp_path, python):
    from sinklab.lab.checkpoints import load

    model = save_tiny(tmp_path / "model", 1)
    given = [
        "--model",
        model,
        "--new-tokens",
        6,
        "--mask-sinks",
        1,
        "--tensor-parallel",
        2,
        "--dtype",
        "float64",
        # one process would measure its fast decoder
        "--exact",
    ]
    done = torchrun(python, "-m", "sinklab", "trace", *PROMPTS, *given, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("run folder") == 1
    study(load(model, dtype="float64"), tmp_path / "one", study.settings_of(tmp_path / "two"))
    one, two = open_run(tmp_path / "one"), open_run(tmp_path / "two")
    assert one.info.settings == two.info.settings
    assert one.info.model == two.info.model | {"name": one.info.model["name"]}
    assert one.tables == two.tables
    texts = [run.table("generations") for run in (one, two)]
    assert [list(row) for row in texts[0]["token_ids"]] == [
        list(row) for row in texts[1]["token_ids"]
    ]
    for sample in range(3):
        here, there = (run.arrays("attention", part=sample) for run in (one, two))
        assert here.keys() == there.keys()
        for name in here:
            np.testing.assert_allclose(
                np.asarray(here[name]), np.asarray(there[name]), rtol=2e-3, err_msg=name
            )


class Told:
    """What processes of one model tell one another, in one process: a list that the first fills and
    others read.
    """

    def __init__(self, heard, leads):
        self.heard, self.leads = heard, leads

    def told(self, value):
        if self.leads:
            self.heard.append(value)
            return value
        return self.heard.pop(0)


def test_units_of_a_model_are_those_that_its_first_process_claims():
    heard: list = []
    first = Units(None, [2, 0, 1], lambda unit: False, worker=Told(heard, leads=True))
    assert [*first] == [2, 0, 1]
    assert heard == [2, 0, 1, None]
    second = Units(None, [0, 1, 2], lambda unit: True, worker=Told(heard, leads=False))
    assert [*second] == [2, 0, 1]


def test_processes_of_one_model_are_one_worker(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        worker = Processes.here(None, 2)
        found.append((worker.rank, worker.world))
    assert found == [(0, 2), (0, 2), (1, 2), (1, 2)]
    # a launch that is one shard of several is one worker, whatever its size
    assert Processes.here("1/3", 2) == Processes(1, 3, joins=True)
