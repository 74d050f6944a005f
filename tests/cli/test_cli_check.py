"""`sinklab check`: what a plug-in breaks is named, kind by kind; the examples keep all of it (they
run in tests/test_docs.py).
"""

import re

import pytest

from commands import error_of, out_of
from sinklab.lab.cli import main

HEAD = """
from dataclasses import dataclass, replace
import numpy as np
import torch
from sinklab.core.subject import Sink
from sinklab.lab.added_sinks import per_layer
from sinklab.core.instrument import Edit, Selector, Statistic
from sinklab.core.registry import *
from sinklab.core.registry import (
    caches, interventions, rules, schedules, selectors, sinks, statistics, unmasking_rules
)
from sinklab.core.subject import Cache, UnmaskingRule
from sinklab.lab.registry import studies
from sinklab.lab.studies.base import Study
"""
RULE = '''
@rules.register("mine")
@dataclass(frozen=True)
class Mine:
    """A rule."""
    part: float = 0.1
    def __call__(self, received, seen_by, exists):
        return '''
BROKEN = {
    "whole heads": (RULE + "received > received.std()\n", "sink rule mine: FAILS.*other heads"),
    "padding": (
        RULE + "received > 0.1 * received.sum(-1)[..., None]\n",
        r"sink rule mine: FAILS.*padding \(NaN\)",
    ),
    "can be changed": (
        RULE.replace("frozen=True", "frozen=False") + "received > 1\n",
        "sink rule mine: FAILS.*can be changed",
    ),
    "no class of its own": (RULE + "None.missing\n", "sink rule mine: FAILS: AttributeError"),
    "an edit that does nothing": (
        '''
@interventions.register("mine")
@dataclass(frozen=True)
class Mine(Edit):
    """Nothing."""
    def before(self, call):
        return call
''',
        "intervention mine: FAILS.*had no opportunity to act",
    ),
    "a selector of nothing": (
        '''
@selectors.register("mine")
@dataclass(frozen=True)
class Mine(Selector):
    """Nothing."""
    def select(self, call):
        return torch.zeros_like(call.eligible_BHS)
''',
        "selector mine: FAILS.*",
    ),
    "other axes": (
        '''
@statistics.register("mine")
class Mine(Statistic):
    """Of a layer, not of its heads."""
    axes = ("batch", "layer", "head")
    reads = ("received",)
    def measure(self, call):
        return call.received_BHS.amax((1, 2))[:, None]
''',
        "statistic mine: FAILS",
    ),
    "all at once": (
        '''
@unmasking_rules.register("mine")
@dataclass(frozen=True)
class Mine(UnmaskingRule):
    """Looks at the other rows."""
    def __call__(self, candidates):
        confidence_M = candidates.at_proposals(candidates.probability_MV)
        return (confidence_M - confidence_M.mean()) ** 2
''',
        "unmasking rule mine: FAILS.*a row of a batch depends on the others",
    ),
    "stale": (
        '''
@caches.register("mine")
@dataclass(frozen=True)
class Mine(Cache):
    """Never computes the rest of the text."""
    def columns(self, start, stop, length, evaluation):
        return slice(start, stop)
''',
        "cache mine: FAILS",
    ),
    "a value that is not trained": (
        '''
@sinks.register("mine")
class Mine(Sink):
    """Keys that nothing reads."""
    tensors = ("sink_keys",)
    positions = 0
    def shape(self, config, name):
        layers = config.backbone.num_hidden_layers
        heads = config.backbone.num_key_value_heads
        return layers, config.sink_count, heads, config.head_dim
    def prefix(self, model, length, lengths_B=None):
        still = torch.ones_like(model.sink_keys)
        return per_layer(still, still)
''',
        "sink kind mine: FAILS.*sink_keys gets no gradient",
    ),
    "no table": (
        '''
from sinklab.core.errors import Checked

@studies.register("mine")
class Mine(Study):
    """Nothing."""
    @dataclass(frozen=True)
    class Settings(Checked):
        pass
    def run(self, work):
        pass
''',
        "study mine: FAILS.*it writes no table",
    ),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a plug-in registers goes with its test."""
    from sinklab.core import registry

    for known in registry.REGISTRIES.values():
        monkeypatch.setattr(known, "_classes", dict(known._all()))


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_plug_in_breaks_is_named(what, tmp_path, capsys):
    code, said = BROKEN[what]
    file = tmp_path / f"{what.replace(' ', '_')}.py"
    file.write_text(HEAD + code)
    with pytest.raises(SystemExit) as ended:
        main(["check", str(file)])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert re.search(said, lines[0]), lines


def test_options_of_a_value_are_its_text(tmp_path, capsys):
    file = tmp_path / "hard.py"
    file.write_text(HEAD + RULE + "received > self.part\n")
    assert out_of(f"check {file} mine:part=0.5", capsys) == "sink rule mine: holds\n"
    assert "mine: FAILS: ValueError: " in _failed(f"check {file} mine:pert=0.5", capsys)


def _failed(command, capsys):
    with pytest.raises(SystemExit):
        main(command.split())
    return capsys.readouterr().out


def test_a_file_that_registers_nothing_is_refused(tmp_path, capsys):
    file = tmp_path / "empty.py"
    file.write_text("x = 1\n")
    assert "registers nothing" in error_of(f"check {file}", capsys)
