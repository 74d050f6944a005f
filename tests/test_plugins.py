"""One of every kind that can be added, from an installed package and from a file: by name in Python
and in commands.

What is added are the files of examples/, as they stand.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from launched import launch
from sinklab.core import registry
from sinklab.lab.files import load_plugin
from sinklab.lab.records import open_run
from sinklab.lab.registry import families
from tiny_diffusion import save_tiny

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RUN = "--new-tokens 4 --block-length 4 --steps 2"
# kind -> its registry, the name that the example takes, and a command that reaches it
REACHED = {
    "rule": (
        "rules",
        "share",
        "trace Sea --edits 'block_keys:keys=(sinks:rule=share:part=0.2,k=2)' --model plain --out a "
        f"{RUN}",
    ),
    "statistic": (
        "statistics",
        "largest_share",
        f"trace Sea --statistics largest_share --model plain --out b {RUN}",
    ),
    "intervention": (
        "interventions",
        "temper",
        f"trace Sea --edits temper:temperature=3.0 --model plain --out c {RUN}",
    ),
    "selector": (
        "selectors",
        "shared_sinks",
        f"trace Sea --edits block_keys:keys=shared_sinks --model plain --out f {RUN}",
    ),
    "sink": ("sinks", "keys", f"trace Sea --model keys --out d {RUN}"),
    "unmasking_rule": (
        "unmasking_rules",
        "discounted",
        "generate Sea --rule discounted:discount=0.2 --model plain --new-tokens 4",
    ),
    "cache": (
        "caches",
        "near",
        "generate Sea --cache near:width=2 --model plain --new-tokens 4",
    ),
    "family": ("families", "toy", "generate '1 2 3' --model toy --new-tokens 4"),
    "figure": ("figures", "sinks_and_norms", "figures b --out page --formats svg"),
    "study": ("studies", "lengths", "lengths --texts 'The sea' --model plain --out e"),
}
SCRIPT = """
import json, shlex, sys
from launched import launch
from sinklab.core import registry
from sinklab.lab.cli import main

# as in a new interpreter
registry._load_plugins.cache_clear()
registry._load.cache_clear()
for kind, (known, name, command) in json.loads(sys.argv[1]).items():
    classes = registry.REGISTRIES[known]
    installed = kind in sys.argv[3:]
    plugin = [] if installed else ["--plugin", f"{sys.argv[2]}/add_a_{kind}.py"]
    assert (name in classes) == installed, f"{name}: {list(classes)}"
    assert main(shlex.split(command) + plugin) == 0, command
    print(f"{kind}: {getattr(classes[name], '__module__', '')}")
"""


def beside(installed, python, *arguments):
    """A process with the packages in a folder."""
    paths = os.pathsep.join([str(installed), *sys.path])
    return launch(python, *arguments, PYTHONPATH=paths, NO_COLOR="1")


def distribution(folder, name, **modules):
    """An installed package: modules by name, each an entry point of sinklab's plug-ins."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    lines = [f"[{registry.PLUGINS}]", *(f"{module} = {module}" for module in modules)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, "utf-8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with three models: one of the package, one with the sink kind and one of the family
    of the examples.
    """
    for kind, known in (("sink", registry.sinks), ("family", families)):
        monkeypatch.setattr(known, "_classes", dict(known._all()))
        sys.modules.pop(f"sinklab_plugin_add_a_{kind}", None)
        load_plugin(EXAMPLES / f"add_a_{kind}.py")
        del sys.modules[f"sinklab_plugin_add_a_{kind}"]
    save_tiny(tmp_path / "plain")
    save_tiny(tmp_path / "keys", sink_kind="keys", sink_count=1)
    config = {"architectures": ["ToyDLM"], "width": 32, "depth": 2, "heads": 4, "words": 50}
    plan = (family := families["toy"]()).read(config, None)
    state = LlamaForCausalLM(plan.backbone).state_dict()
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/config.json").write_text(json.dumps(config), "utf-8")
    save_file(
        {family.source(plan, name)[0]: state[name] for name in state},
        tmp_path / "toy/model.safetensors",
    )
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_one_of_every_kind_is_reached_by_name(here, python):
    """Every second one is installed, the others come from a file."""
    site, installed = here / "site", [*REACHED][::2]
    files = {f"add_a_{kind}": (EXAMPLES / f"add_a_{kind}.py").read_text() for kind in installed}
    distribution(site, "mine", **files)
    given = json.dumps(REACHED), str(EXAMPLES), *installed
    done = beside(site, python, "-c", SCRIPT, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+): (\w*add_a_\w+)$", done.stdout, re.M) == [
        (kind, f"{'' if kind in installed else 'sinklab_plugin_'}add_a_{kind}") for kind in REACHED
    ]
    runs = {name: open_run(here / name) for name in "abcdef"}
    assert runs["a"].info.settings["edits"] == ["block_keys:keys=(sinks:rule=share:part=0.2,k=2)"]
    assert runs["c"].info.settings["edits"] == ["temper:temperature=3.0"]
    assert runs["f"].info.settings["edits"] == ["block_keys:keys=shared_sinks"]
    assert "largest_share" in runs["b"].arrays("attention", sample=0)
    assert (runs["d"].info.model["sink_kind"], runs["e"].info.kind) == ("keys", "lengths")
    assert list((here / "page").glob("sinks_and_norms*.svg"))


RULE = """
from sinklab.core.registry import rules

@rules.register("{name}")
class Mine:
    "Of a test."
"""
ASK = "from sinklab.core.registry import rules; print('top' in rules, 'plugged' in rules)"


def test_a_broken_installed_plugin_is_named_and_left_out(tmp_path):
    distribution(tmp_path, "mine", bad_plugin="1 / 0", good_plugin=RULE.format(name="plugged"))
    done = beside(tmp_path, sys.executable, "-c", ASK)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
    assert (
        "the plug-in 'bad_plugin' (bad_plugin) is left out: ZeroDivisionError('division by zero')"
        in done.stderr
    )


@pytest.mark.parametrize(
    "modules",
    [
        {"first_plugin": RULE.format(name="top"), "good_plugin": RULE.format(name="plugged")},
        {"first_plugin": RULE.format(name="plugged"), "second_plugin": RULE.format(name="plugged")},
    ],
    ids=["of the package", "of another plug-in"],
)
def test_a_name_that_is_taken_is_an_error_each_time(tmp_path, modules):
    distribution(tmp_path, "mine", **modules)
    script = f"for _ in range(2):\n  try:\n    {ASK}\n  except ValueError as error: print(error)"
    done = beside(tmp_path, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second and re.fullmatch(
        r"the sink rule '(top|plugged)' is defined twice, in first_plugin and in "
        r"(sinklab\.lab\.analysis\.rules|second_plugin); rename one of them",
        first,
    )
