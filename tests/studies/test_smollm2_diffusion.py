"""The study of SmolLM2 at toy size: longer stages go on from adapters, and blocked or kept keys are what they claim."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sinklab.checkpoints.adapters import read_adapters
from sinklab.records.reading import open_run
from sinklab.training import recipe, train
from sinklab.training.checkpoints import whole_checkpoints
from tiny_training import tiny_settings, uneven_documents

STUDIES = Path(__file__).parents[2] / "studies"


def script(name: str) -> Any:
    """A script of the study, which imports its neighbours."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, STUDIES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


study = script("smollm2_diffusion")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study with a tiny parent, text of seconds, and stages of 2, 2 and 2 steps."""
    corpus = uneven_documents(tmp_path)
    out = tmp_path / "parent"
    tiny = {"length": 16, "heldout_rows": 4, "lora_rank": 2, "save_every": 1, "eval_every": 2, "log_every": 1}
    parent = tiny_settings(corpus, heads=4, steps=2, heldout_rows=4, objective="autoregressive", out=str(out))
    monkeypatch.setattr(study, "BASE", str(train(parent)))
    books = tmp_path / "books"
    books.mkdir()
    for name in ("valid.jsonl", *(name.removesuffix(".gz") for files in study.FILES.values() for name in files)):
        (books / name).write_bytes(corpus.read_bytes())
    monkeypatch.setattr(study, "FILES", {True: ("train-00.jsonl",), False: ("train-02.jsonl", "train-03.jsonl")})
    monkeypatch.setattr(study, "BOOKS", books)
    monkeypatch.setattr(study, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(study, "SIBLINGS", {"iii": study.SIBLINGS["iii"]})
    monkeypatch.setattr(study, "SEEDS", (0,))
    monkeypatch.setattr(study, "CURVE", ("iii-0",))
    monkeypatch.setattr(study, "FIRST", 2)
    monkeypatch.setattr(study, "LONGER", ((2, 4), (4, 6)))
    monkeypatch.setattr(study, "POINTS", (1, 2, 3, 4, 6))

    def shrunk(name: str, **fields: Any) -> Any:
        fields["heldout"] = fields["heldout"].removesuffix(".gz")
        return recipe(name, **(fields | tiny))

    monkeypatch.setattr(study, "recipe", shrunk)
    return tmp_path


def test_a_longer_stage_goes_on_from_the_adapters_and_resumes(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = study.train

    def interrupted(settings: Any, **how: Any) -> Any:
        def stop(text: str) -> None:
            how["progress"](text)
            if settings.adapters and whole_checkpoints(toy / "runs/iii-0-4/checkpoints"):
                raise KeyboardInterrupt

        return whole(settings, **(how | {"progress": stop}))

    monkeypatch.setattr(study, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.train_all()
    monkeypatch.setattr(study, "train", whole)
    (one,) = whole_checkpoints(toy / "runs/iii-0-4/checkpoints")
    assert one.name == "checkpoint-1"
    assert study.adapters_of("iii-0", 3).is_file()
    study.train_all()
    files = sorted((toy / "results" / "adapters").glob("*.safetensors"))
    assert [file.stem for file in files] == ["iii-0-1", "iii-0-2", "iii-0-3", "iii-0-4", "iii-0-6"]
    tokens = [read_adapters(file)[0].tokens for file in files]
    assert tokens == [64, 128, 192, 256, 384]
    told = open_run(toy / "runs" / "iii-0-4").info
    assert told.status == "complete"
    assert told.settings["lr"] == 1e-3
    assert told.settings["adapters"].endswith("iii-0-2.safetensors")
    assert told.model["adapters"]["tokens"] == 128


def test_a_longer_stage_begins_with_the_loss_at_which_the_last_one_ended(toy: Path) -> None:
    study.train_all()
    ended = open_run(toy / "runs" / "iii-0").table("history")["heldout_loss"].dropna().iloc[-1]
    # a stage that learns nothing measures what it began with; adapters are kept in bfloat16
    still = replace(study.Stage("iii", 0, 2, 4).settings(), lr=1e-12, out=str(toy / "still"))
    train(still)
    began = open_run(toy / "still").table("history")["heldout_loss"].dropna().iloc[-1]
    assert abs(began - ended) < 1e-3


def test_the_order_is_the_registered_one() -> None:
    names = [stage.folder.name for stage in study.stages()]
    assert names[:6] == ["iii-0", "i-0", "iv-0", "ii-0", "v-0", "iii-1"]
    assert names[-4:] == ["iii-0-3000", "iv-0-3000", "iii-0-10000", "iv-0-10000"]
    assert [stage.points for stage in study.stages()][:2] == [[100, 300, 500], [500]]
    assert study.Stage("iii", 0, 500, 3000).points == [1000, 3000]
    assert torch.get_num_threads() >= 1
