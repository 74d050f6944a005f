"""The replication: who is next, what is kept, a run that diverges, and no look before the last."""

import subprocess
from dataclasses import make_dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from launched import script

replication = script("studies/replication")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository of its own, with nothing measured."""
    for name, folder in {"ROOT": "", "RESULTS": "studies/replication", "RUNS": "runs"}.items():
        monkeypatch.setattr(replication, name, tmp_path / folder)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    for name, value in {"user.name": "a", "user.email": "a@b.c"}.items():
        subprocess.run([*git, "config", name, value], check=True)
    monkeypatch.setattr(replication.os, "nice", lambda _: None)
    return tmp_path


def measured(late, other):
    """Costs of some texts as they are kept."""
    loss = {"late": late, "random late": other}
    return {"keys": {"1": {"loss": loss, "removed": 0.4, "blocked": []}}}


def test_runs_come_in_the_registered_order_and_each_once(place, monkeypatch):
    done = []

    def one_run(name):
        done.append(name)
        history = place / f"{name}.csv"
        history.write_text("step,loss\n1,2.5\n", "utf-8")
        (place / "not mine").write_text("", "utf-8")
        replication.keep(name, {"costs": measured([1.0], [0.0])}, [history])

    monkeypatch.setattr(replication, "one_run", one_run)
    for _ in range(3):
        replication.run_next()
    assert done == ["ii-3", "iii-3", "ii-4"] == list(replication.NAMES[:3])
    assert len(replication.NAMES) == 16
    log = ["git", "-C", str(place), "log", "--name-only", "--format=%s"]
    text = subprocess.run(log, check=True, capture_output=True, text=True).stdout
    assert "Replication: ii-4 trained and measured, 3 of 16 runs" in text
    assert "history/iii-3.csv" in text and "not mine" not in text
    with pytest.raises(SystemExit, match="3 of 16 runs"):
        replication.report()


def test_a_run_that_diverges_starts_again_at_half_the_peak(place):
    tried, file = [], place / "adapters"
    history = pd.DataFrame({"heldout_loss": [5.5, 6.1, np.nan]})

    def train(settings, progress):
        tried.append((settings.lr, settings.resume))
        stage.folder.mkdir(parents=True, exist_ok=True)
        (stage.folder / "run.json").write_text("{}", "utf-8")
        if len(tried) == 1:
            raise ValueError("the loss must stay finite, but loss is nan at step 7")
        if len(tried) == 2:
            progress("step 200 of 500, held out 7.724, about 60 min left")
        if len(tried) == 3:
            raise KeyboardInterrupt
        file.write_text("", "utf-8")

    settings = make_dataclass("Settings", [("lr", float, 2e-3), ("resume", bool, False)])
    stage = SimpleNamespace(folder=place / "runs" / "iii-4" / "iii-4", settings=settings)
    study = SimpleNamespace(
        Stage=lambda sibling, seed: stage,
        RESULTS=place / "runs" / "iii-4",
        adapters_of=lambda name, step: file,
        open_run=lambda folder: SimpleNamespace(table=lambda name: history),
        train=train,
        take_adapters=lambda stages: None,
    )
    study.RESULTS.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        replication.trained(study, "iii-4")
    told = replication.trained(study, "iii-4")
    assert tried == [(2e-3, False), (1e-3, False), (5e-4, False), (5e-4, True)]
    assert len(told) == 2 and "step 7" in told[0] and "7.72" in told[1]
    assert replication.trained(study, "iii-4") == told
    assert len([*(study.RESULTS / "history").glob("iii-4-diverged-*.csv")]) == 2
    file.unlink()
    history.loc[2] = 7.5
    replication.trained(study, "iii-4")
    assert tried[4] == (2.5e-4, False)


@pytest.mark.parametrize(
    ("value", "high", "p", "word"),
    [
        (0.5, 0.9, 0.01, "replicated"),
        (0.2, 0.28, 0.01, "replicated"),
        (-0.5, -0.1, 0.01, "not replicated"),
        (0.1, 0.28, 0.2, "not replicated"),
        (0.2, 0.29, 0.2, "inconclusive"),
    ],
)
def test_the_word_is_the_registered_one(value, high, p, word):
    assert replication.word(SimpleNamespace(value=value, high=high, p=p)) == word


def test_seeds_are_in_their_order_and_a_random_key_is_subtracted():
    found = {
        "iii-10": measured([1.0, 2.0], [0.5, 0.5]),
        "iii-9": measured([3.0, 3.0], [0.0, 1.0]),
        "ii-9": measured([9.0, 9.0], [0.0, 0.0]),
    }
    assert replication.by_seed(found, "iii").tolist() == [[3.0, 2.0], [0.5, 1.5]]


def test_a_ratio_of_rises_has_an_interval():
    ii_ST = np.full((4, 6), 2.0) + np.arange(6)
    low, high = replication.ratio_interval(ii_ST, ii_ST / 2, draws=50)
    assert low == pytest.approx(0.5) and high == pytest.approx(0.5)
