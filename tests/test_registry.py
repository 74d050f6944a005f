"""What can be extended: registries, values as text, plug-ins; and how what does not exist is
refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from refusals import refused, refusing
from sinklab.core import errors, registry
from sinklab.core.instrument import BlockKeys
from sinklab.core.registry import Registry, interventions
from sinklab.lab.files import load_plugin
from sinklab.lab.measures import (
    MaskPositions,
    MaskSinks,
    WindowAttention,
)

toys = Registry("toy", "toys")


@toys.register("ball")
@dataclass(frozen=True)
class Ball:
    """Rolls."""

    size: int = 1
    weight: float | None = None
    color: str | None = "red"


@toys.register("box")
@dataclass(frozen=True)
class Box:
    """Holds a toy."""

    content: Ball | None = registry.registered(toys, None)
    corners: tuple[int, ...] = ()
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class Made:
    maker: str = "nobody in particular"


@toys.register("kite")
@dataclass(frozen=True)
class Kite(Made):
    tail: int


def test_a_registry_is_a_mapping_of_classes_by_name():
    assert (
        list(toys) == ["ball", "box", "kite"]
        and len(toys) == 3
        and "ball" in toys
        and "bal" not in toys
    )
    assert toys["ball"] is Ball and toys.name_of(Ball(3)) == "ball"
    with refusing(r"'bal'; .*did you mean 'ball'"):
        toys["bal"]
    with refusing(r"'sledge'; .*--plugin"):
        toys["sledge"]
    refused("Ball.* is no registered toy.*pass an object", toys.parse, Ball)
    refused("3 is no registered toy", toys.name_of, 3)


def test_a_name_belongs_to_one_class():
    refused(
        "toy 'ball' is defined twice",
        toys.register("ball"),
        type("Ball", (), {"__module__": "elsewhere"}),
    )
    # a module that is run a second time defines the same class anew
    assert toys.register("ball")(Ball) is toys["ball"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ball", Ball()),
        ("ball:size=3,weight=0.5", Ball(3, 0.5)),
        (" ball: size = 3 , color=none ", Ball(3, color=None)),
        ("ball:weight=none", Ball()),
        ("box:corners=1+2..4,is_open=true", Box(corners=(1, 2, 3), is_open=True)),
        ("box:content=ball:size=2", Box(Ball(2))),
        ("box:content=(ball:size=2,weight=4.0),is_open=true", Box(Ball(2, 4.0), is_open=True)),
        ("box:content=box", Box(Box())),  # type: ignore[arg-type]
        ("box:content=none", Box()),
        ("kite:tail=2,maker=me", Kite(2, maker="me")),
    ],
)
def test_values_are_read_from_text(text, value):
    assert toys.parse(text) == value and toys.parse(value) is value
    assert toys.parse(toys.as_text(value)) == value


def test_an_object_of_the_base_need_not_be_registered():
    other = Made()
    assert toys.parse("ball:size=3", Made) == Ball(3) and toys.parse(other, Made) is other
    refused("did you mean 'ball'", toys.parse, "bal:size=3", Made)
    refused("object of class Made, got 3", toys.parse, 3, Made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ball:sise=1", "the toy 'ball' has no field 'sise'; did you mean 'size'"),
        ("ball:size", "'size' is no single field=value"),
        ("ball:size=1,size=2", "'size=2' is no single field=value"),
        ("ball:size=big", "size takes int, got 'big'; write size=…"),
        ("box:is_open=yes", "is_open takes bool, got 'yes'"),
        ("box:content=bal", "toy must be one of ball, box, kite, but is 'bal'"),
        ("kite", "the toy 'kite' needs tail; write kite:tail=…"),
        ({"size": 1}, "{'size': 1} is no registered toy; known are"),
    ],
)
def test_what_is_no_value_is_refused_by_name(given, message):
    refused(message, toys.parse, given)


def test_a_class_that_is_no_dataclass_is_no_value(monkeypatch):
    kind = type("Marble", (), {})
    monkeypatch.setitem(toys._classes, "marble", kind)
    for call, given in ((toys.parse, "marble"), (toys.as_text, kind())):
        refused("Marble .*@dataclass", call, given)


def test_the_text_of_an_edit_names_what_is_not_default():
    assert interventions.as_text(MaskSinks(5)) == "block_keys:keys=top:k=5"
    assert interventions.as_text(MaskPositions((3, 4), layers=-1, steps=(2, None))) == (
        "block_keys:keys=positions:positions=3+4,layers=-1,when=now,steps=2+none"
    )
    window = WindowAttention(4, keep_prefix=False)
    assert interventions.as_text(window) == "window_attention:radius=4,keep_prefix=false"


PLUGIN = """
from dataclasses import dataclass
from sinklab.core.registry import interventions

@interventions.register("{name}")
@dataclass(frozen=True)
class Plugged:
    strength: float = 1.0
"""


def test_a_plugin_file_is_run_once(tmp_path, scratch):
    scratch(interventions)
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.format(name="mine"), "utf-8")
    for _ in range(2):
        load_plugin(file)
    assert interventions.as_text(interventions.parse("mine:strength=2")) == "mine:strength=2.0"


def test_a_plugin_file_that_fails_is_refused(tmp_path, scratch):
    scratch(interventions)
    before = {name for name in sys.modules if name.startswith("sinklab_plugin_")}
    missing, broken, taken = (tmp_path / f"{name}.py" for name in ("missing", "broken", "taken"))
    refused(r"missing\.py is none", load_plugin, missing)
    broken.write_text("\nimport there_is_no_such_module", "utf-8")
    refused(r"no_such_module.*line 2", load_plugin, broken)
    taken.write_text(PLUGIN.format(name="block_keys"), "utf-8")
    refused("'block_keys' is defined twice", load_plugin, taken)
    assert {name for name in sys.modules if name.startswith("sinklab_plugin_")} == before
    assert interventions["block_keys"] is BlockKeys


def test_near_names_are_offered():
    assert errors.near("recieved", ("received", "value_norm")) == "did you mean 'received'?"
    assert errors.near("masked", ("mask", "masks", "value")) == "did you mean 'mask' or 'masks'?"
    assert errors.near("what", ("received",)) == ""
    twice = errors.near("--promt", ("--prompt", "--prompts", "--prompts"))
    assert twice == "did you mean '--prompt' or '--prompts'?"
    refused("of a, b, but is 'x'; register it", errors.one_of, "rule", "x", "ab", "register it")
    refused(r"'fats'; did you mean 'fast'\?", errors.one_of, "mode", "fats", ("fast", "slow"))
    errors.one_of("mode", "fast", ("fast", "slow"))
    refused("ball has no field 'x'", errors.known_fields, "a ball", ["size", "x"], ["size"])
    refused("stone has no field 'x'", errors.known_fields, "a stone", ["x"], [])


@dataclass(frozen=True)
class Settings(errors.Checked):
    count: int = errors.limited(1, at_least=1, at_most=9)
    rate: float | None = errors.limited(None, above=0)
    kinds: tuple[str, ...] = errors.limited(("a",), one_of=("a", "b"), needed=True)


def test_settings_are_checked_in_one_place():
    assert Settings(kinds="b") == Settings(kinds=["b"]) == Settings(kinds=("b",))  # type: ignore[arg-type]
    for given, message in (
        ({"count": 0}, "count must be at least 1 and at most 9, but is 0"),
        ({"count": 10}, "count must be at least 1 and at most 9, but is 10"),
        ({"rate": 0.0}, "rate must be more than 0 or left out, but is 0.0"),
        ({"kinds": ("a", "c")}, "kinds must be one of a, b, but is 'c'"),
        ({"kinds": ()}, "kinds must not be empty"),
    ):
        refused(message, Settings, **given)


@pytest.mark.parametrize("given", ["top:k=1", object(), BlockKeys])
def test_what_is_not_registered_has_no_text(given):
    refused("no registered intervention.*register its class", interventions.as_text, given)
