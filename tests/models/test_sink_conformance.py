"""What every kind of added sink keeps: those of the package, the example, and some that are written
here.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.models import check_sink
from refusals import refused
from sinklab.core.registry import sinks
from sinklab.core.subject import Sink
from sinklab.lab.checkpoints import load
from sinklab.lab.records import open_run
from sinklab.lab.reports import report
from sinklab.lab.reports.training import variant
from sinklab.lab.training import train
from tiny_diffusion import tiny_model
from tiny_training import tiny_settings, uneven_documents


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, ring", [("token", "core"), ("zero", "core"), ("kv", "lab"), ("logit", "lab")]
)
def test_a_sink_kind_conforms(kind, ring):
    assert sinks[kind].__module__.startswith(f"sinklab.{ring}.")
    check_sink(kind)


@pytest.fixture
def keys(scratch):
    """The sink kind of the example."""
    scratch(sinks, example="add_a_sink")
    return "keys"


@pytest.mark.slow
def test_the_sink_kind_of_the_example_conforms(keys, tmp_path):
    check_sink(keys)
    assert variant({"sink_kind": keys, "sink_count": 2}) == "2 keys sinks"
    tiny_model(sink_kind=keys, sink_count=1).save_pretrained(tmp_path)
    del sinks._classes[keys]
    refused("'keys'; if a plug-in defines", load, tmp_path)


@pytest.mark.slow
def test_a_kind_of_ones_own_is_trained_and_drawn(keys, tmp_path):
    changes = {"sink_kind": keys, "sink_count": 2, "out": str(tmp_path / "run"), "monitor_every": 4}
    sizes = {"heads": 4, "steps": 4, "save_every": 4, "heldout_rows": 6}
    train(tiny_settings(uneven_documents(tmp_path), **sizes, **changes))
    sink_keys = load(tmp_path / "run" / "model").model.sink_keys
    assert sink_keys.shape == (2, 2, 4, 8) and sink_keys.std() > 0
    page = report([open_run(tmp_path / "run")], tmp_path / "page", tables=False)
    assert "2 keys sinks" in Path(page).read_text("utf-8")


@dataclass(frozen=True)
class Scaled(Sink):
    start: float = 0.5
    tensors = ("sink_embeddings", "sink_scale")
    weight_decay = True

    def shape(self, config, name):
        return (config.sink_count, 1) if name == "sink_scale" else super().shape(config, name)

    def initialize(self, name, tensor, std):
        tensor.fill_(self.start) if name == "sink_scale" else tensor.normal_(std=std)

    def embeddings(self, model):
        return model.sink_embeddings * model.sink_scale


@pytest.mark.slow
def test_a_sink_kind_may_have_options(keys, tmp_path):
    sinks.register("scaled")(Scaled)
    check_sink("scaled:start=2.0")
    model = tiny_model(sink_kind="scaled:start=2.0", sink_count=1)
    assert model.sink_scale.tolist() == [[2.0]]
    model.save_pretrained(tmp_path)
    assert load(tmp_path).model.config.sink == Scaled(2.0)
