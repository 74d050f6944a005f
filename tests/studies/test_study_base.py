"""The base of all studies: conformance, settings in groups, names of folders, a plug-in and its
command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from commands import cli, error_of, out_of
from conformance.runs import check_study
from refusals import refused
from sinklab.core.errors import Checked, limited
from sinklab.core.registry import interventions
from sinklab.lab.cli.command import conduct
from sinklab.lab.measures import MaskSinks
from sinklab.lab.records import open_run
from sinklab.lab.registry import studies
from sinklab.lab.studies.base import Study
from sinklab.lab.studies.curve import Curve, CurveSettings
from sinklab.lab.studies.settings import kept_record
from sinklab.lab.studies.trace.study import StudySettings, Trace
from tiny_diffusion import save_tiny, tiny_loaded

pytestmark = pytest.mark.usefixtures("heldout")

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_a_study.py"


@dataclass(frozen=True)
class Edited(Checked):
    """Settings with a value of a registry."""

    texts: int = limited(3, at_least=1)
    edits: tuple[Any, ...] = field(default=(MaskSinks(k=2),), metadata={"registry": interventions})


class Toy(Study):
    """A study that writes one table."""

    Settings = CurveSettings

    def run(self, work):
        work.run.table("toy", {"rows": [work.settings.rows]})


@pytest.mark.slow
def test_the_studies_of_the_package_conform():
    texts = {"prompts": ("The sea", "A"), "new_tokens": 2, "edits": ("block_keys:keys=top:k=2",)}
    check_study(Trace(), tiny_loaded(1), StudySettings(**texts, layers=(-1,)))
    text = {"heldout": "held.txt", "rows": 2, "length": 16, "by": "layer"}
    check_study(Curve(), tiny_loaded(), CurveSettings(ks=(1,), twin=True, **text))


def test_a_plugin_is_a_command(scratch, capsys):
    scratch(studies, example="add_a_study")
    model = str(save_tiny(Path("model")))
    asked = f"lengths --model {model} --plugin {EXAMPLE} --texts 'The sea' Sea --out out"
    assert "run folder: out" in out_of(asked, capsys)
    assert open_run("out").info.settings == {"texts": ["The sea", "Sea"]}
    assert cli(f"lengths --model {model} --plugin={EXAMPLE} --config out --out again") == 0
    assert open_run("again").table("lengths").equals(open_run("out").table("lengths"))
    assert "texts must not be empty" in error_of(
        f"lengths --plugin {EXAMPLE} --texts --out third", capsys
    )
    assert "Count the tokens of some texts." in out_of(f"list studies --plugin {EXAMPLE}", capsys)


def test_settings_are_text_in_a_run_folder():
    assert kept_record(Edited(texts=4)) == {"texts": 4, "edits": ["block_keys:keys=top:k=2"]}


def test_shards_need_a_study_that_knows_them():
    refused("toy is written by one process", Toy(), tiny_loaded(), "run", shard="0/2")


def test_folders_that_are_taken_show_before_a_model_is_read():
    class Several(Toy):
        """For two models."""

        model = ("a", "b")

    Path("b").mkdir()
    Path("b/notes.txt").write_text("mine")
    refused(
        "b is taken",
        conduct,
        Several(),
        ("no-such-model/a", "no-such-model/b"),
        Path(),
        CurveSettings(),
    )


def test_models_that_are_not_there_show_before_the_first_is_run():
    model = str(save_tiny("model"))
    refused(
        "loaded from 'tiny-snik'",
        conduct,
        Curve(),
        (model, "tiny-snik"),
        Path("out"),
        CurveSettings(),
    )
    assert not Path("out").exists()
