"""The conformance suite of checkpoint families."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path

import torch

from sinklab.checkpoints import families as readers
from sinklab.checkpoints.loading import load
from sinklab.checkpoints.materialize import empty_model, tensor_plan
from sinklab.checkpoints.model_card import describe
from sinklab.checkpoints.weights import open_weights
from sinklab.testing.values import refusal


def check_family(name: str, folder: str | Path) -> None:
    """Hold a checkpoint family to what the loader relies on, with a tiny checkpoint of it.

    The config is read without weights; a field that is absent, of another kind or that cannot be represented is refused
    by name; every tensor of the model comes from exactly one of the checkpoint, and none is left over; what is saved
    loads again, bit for bit; no Python file of the checkpoint is run.

    Args:
        name: of the family in :data:`sinklab.registry.families`.
        folder: a checkpoint of that family with safetensors, which stays as it is.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(shutil.copytree(folder, Path(temporary, "checkpoint")))
        config = readers.read_config(here / "config.json", name)
        assert describe(here / "config.json").published_family == name, f"the config is not recognised as {name}"
        _check_fields(name, here, config)
        _check_tensors(here, config)
        _check_no_code(here, config)
        loaded, again = load(here), Path(temporary, "again")
        loaded.model.save_pretrained(again)
        ids = torch.arange(min(8, loaded.model.config.vocab_size))[None]
        with torch.inference_mode():
            same = torch.equal(load(again).model(ids).logits, loaded.model(ids).logits)
        assert same, "a model that was saved and loaded again has other logits"


def _check_fields(name: str, folder: Path, config: dict) -> None:
    """Every field, absent or of another kind, is read all the same or refused with a ValueError."""

    def refused(config: dict) -> str:
        return refusal(ValueError, lambda: readers.configured(readers.read(config, str(folder)), {}, str(folder)))

    for field in readers.known_families()[name].represented:
        said = refused({**config, field: "a value that no checkpoint has"})
        assert field in said, f"a value of {field} that cannot be represented is not refused by name: {said!r}"
    for field in config:
        refused({key: value for key, value in config.items() if key != field})
        refused({**config, field: {"of": "another kind"}})


def _check_tensors(folder: Path, config: dict) -> None:
    weights = open_weights(folder, str(folder))
    plan = readers.read(config, str(folder), weights.shapes)
    model = empty_model(readers.configured(plan, {}, str(folder)), str(folder))
    taken: dict[str, int] = {}
    for target, (source, _) in tensor_plan(plan, model, weights, {}, str(folder)).sources.items():
        taken[source] = taken.get(source, 0) + model.get_parameter(target).numel()
    absent, unread = sorted(taken.keys() - weights.shapes.keys()), sorted(weights.shapes.keys() - taken.keys())
    assert not (absent or unread), (
        f"the plan names other tensors than the checkpoint has: {absent} are not there and {unread} are not read; "
        "see tensor_names"
    )
    for source, used in taken.items():
        numbers = math.prod(weights.shapes[source])
        assert used == numbers, f"{used} of the {numbers} numbers of {source} are used"


def _check_no_code(folder: Path, config: dict) -> None:
    """A Python file that the config names is not run."""
    ran = folder / "ran"
    (folder / "code_x.py").write_text(f"open({str(ran)!r}, 'w')\n")
    named = {one: "code_x.Thing" for one in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": named}))
    load(folder)
    assert not ran.exists(), "code of the checkpoint was run"
    (folder / "config.json").write_text(json.dumps(config))
