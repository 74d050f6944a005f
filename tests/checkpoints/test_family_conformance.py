"""The conformance suites of `sinklab.testing`, over every built-in and every example."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import published_toys as toys
from sinklab.checkpoints import load
from sinklab.probing import CallView, KeyIntervention, KeyScores, LayerIntervention, Statistic
from sinklab.registry import Registry, families, interventions, load_plugin, statistics
from sinklab.testing import check_family, check_intervention, check_statistic
from tiny_diffusion import save_tiny, tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES = {
    "dream": lambda folder: toys.dream(folder)[0],
    "llada": lambda folder: toys.llada(folder)[0],
    "llama": lambda folder: LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder),
    "mmada": lambda folder: toys.llada(folder, architectures=["MMadaModelLM"], codebook_size=40, mask_token_id=240)[0],
    "qwen2": lambda folder: Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder),
    "qwen3": lambda folder: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).save_pretrained(folder),
    "sinklab": lambda folder: save_tiny(folder, 2, gate="elementwise"),
    "smdm": lambda folder: toys.smdm(folder, sink=1, gate=True)[0],
}


def test_every_built_in_family_is_checked():
    built_in = {name for name, kind in families.items() if kind.__module__.startswith("sinklab.checkpoints.")}
    assert built_in == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_conforms(tmp_path, name):
    FAMILIES[name](tmp_path / "m")
    check_family(name, tmp_path / "m")


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A checkpoint of the example's family, which is forgotten afterwards."""
    monkeypatch.setattr(families, "_classes", {**families._all()})
    monkeypatch.delitem(sys.modules, "sinklab_plugin_add_a_family", raising=False)
    load_plugin(EXAMPLES / "add_a_family.py")
    plan = (family := families["toy"]()).read({"width": 32, "depth": 2, "heads": 4, "words": 50}, None)
    tensors = {
        family.source(plan, name)[0]: tensor for name, tensor in LlamaForCausalLM(plan.backbone).state_dict().items()
    }
    config = {"architectures": ["ToyDLM"], "width": 32, "depth": 2, "heads": 4, "words": 50}
    return toys.write(tmp_path / "toy", config, tensors)


def test_the_family_of_the_example_conforms(toy):
    check_family("toy", toy)


def test_a_family_that_is_not_there_is_refused_with_the_remedy(tmp_path):
    toys.write(tmp_path, {"architectures": ["ToyDLM"]}, {})
    with pytest.raises(ValueError, match=r"ToyDLM.*if a plug-in defines its family, install that or .*--plugin"):
        load(tmp_path)


def test_two_families_that_claim_a_checkpoint_are_refused(toy, monkeypatch):
    other = type("Other", (families["toy"],), {})
    monkeypatch.setitem(families._classes, "other", other)
    with pytest.raises(ValueError, match=r"\(ToyDLM\) is claimed by the families other and toy; leave out"):
        load(toy)


class Forgetful(families["llada"]):
    def source(self, plan, target):
        name, take = super().source(plan, target)
        return name.replace("k_proj", "q_proj"), take


class Lenient(families["llada"]):
    represented = {"alibi": (False, "a value that no checkpoint has")}  # noqa: RUF012


@pytest.mark.parametrize(
    ("wrong", "message"), [(Forgetful, "other tensors than"), (Lenient, "alibi .* is not refused")]
)
def test_a_family_that_does_not_conform_is_seen(tmp_path, monkeypatch, wrong, message):
    monkeypatch.setattr(families, "_classes", {**families._all(), "llada": wrong})
    with pytest.raises(AssertionError, match=message):
        check_family("llada", toys.llada(tmp_path / "m")[0])


INTERVENTIONS = [
    "mask_sinks:k=2",
    "mask_sinks:epsilon=1,removal=zero_value",
    "mask_sinks:k=1,control=random,source=carried,limit=3,layers=1",
    "mask_sinks:k=2,source=clean_pass,heads=0+3,shared=layer",
    "mask_sinks:k=2,source=now,removal=evict",
    "mask_positions:positions=1+4,steps=1+none",
    "truncate_context:start=2,stop=5,step=1",
    "window_attention:radius=2,keep=0..2,heads=1",
]


def built_in(registry: Registry) -> set[str]:
    return {name for name, kind in registry.items() if kind.__module__.startswith("sinklab.")}


@pytest.fixture
def plugin(monkeypatch):
    """What loads an example; what it registers is forgotten afterwards."""
    for registry in (interventions, statistics):
        monkeypatch.setattr(registry, "_classes", dict(registry._all()))

    def loaded(name):
        monkeypatch.delitem(sys.modules, f"sinklab_plugin_{name}", raising=False)
        load_plugin(EXAMPLES / f"{name}.py")

    yield loaded
    for name in [name for name in sys.modules if name.startswith("sinklab_plugin_")]:
        del sys.modules[name]


@pytest.mark.parametrize("text", INTERVENTIONS)
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_built_in_intervention_conforms(text, sinks):
    check_intervention(interventions.parse(text), tiny_model(sinks))


def test_every_built_in_intervention_is_checked():
    assert built_in(interventions) == {text.partition(":")[0] for text in INTERVENTIONS}


@pytest.mark.parametrize("source", ["now", "closed_loop", "carried,limit=9", "clean_pass"])
def test_the_intervention_of_the_example_conforms(plugin, source):
    plugin("add_a_intervention")
    check_intervention(interventions.parse(f"mask_shared_sinks:share=0.25,rule=excess:epsilon=0.5,source={source}"))


@pytest.mark.parametrize("name", sorted(built_in(statistics)))
def test_a_built_in_statistic_conforms(name):
    check_statistic(name, tiny_model(2))


def test_the_statistic_of_the_example_conforms(plugin):
    plugin("add_a_statistic")
    check_statistic("largest_share")


@dataclass(frozen=True)
class Hot(LayerIntervention):
    """Flattens every attention row."""

    factor: float = 0.5

    def edit(self, call, site):
        scale = call.query_BHQD.shape[-1] ** -0.5 if call.scale is None else call.scale
        return replace(call, scale=scale * self.factor)


@dataclass(frozen=True)
class Careless(Hot):
    """Changes a weight on the way."""

    def edit(self, call, site):
        call.query_BHQD.mul_(0.5)
        LAST.weight.data.add_(1e-3)
        return call


@dataclass(frozen=True)
class Idle(KeyIntervention):
    """Takes no key."""

    def select(self, keys: KeyScores):
        return torch.zeros_like(keys.received_BHS, dtype=torch.bool)


LAST = torch.nn.Linear(1, 1)


def test_an_intervention_on_calls_conforms(plugin):
    interventions.register("hot")(Hot)
    check_intervention(Hot(), tiny_model())
    check_intervention(Hot(layers=(1,)), tiny_model())


def test_an_intervention_that_does_not_conform_is_seen(plugin, monkeypatch):
    model = tiny_model()
    monkeypatch.setitem(globals(), "LAST", model.model.layers[0].mlp.up_proj)
    for kind, message in ((Idle, "changes no output"), (Careless, "outputs differ from run to run")):
        interventions.register(kind.__name__)(kind)
        with pytest.raises(AssertionError, match=message):
            check_intervention(kind(), model)


class Unfinished(Statistic):
    """Has another shape than it says."""

    axes = ("batch", "layer", "key")

    def measure(self, view: CallView):
        return view.of_heads(view.call.received_BHS)


class Sloppy(Unfinished):
    """Has NaN."""

    def measure(self, view: CallView):
        return view.call.received_BHS[:, 0].masked_fill(view.call.received_BHS[:, 0] < 1, torch.nan)


class Blind(Unfinished):
    """Pays no heed to the chosen heads."""

    axes = ("batch", "layer", "head")

    def measure(self, view: CallView):
        return view.call.received_BHS[:, :2].amax(-1)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Unfinished, ValueError, "axes .*'batch', 'key'.* for each layer, but measured one of shape"),
        (Sloppy, AssertionError, "not finite"),
        (Blind, AssertionError, "shape .* for the axes"),
    ],
)
def test_a_statistic_that_does_not_conform_is_seen(plugin, kind, error, message):
    statistics.register(kind.__name__)(kind)
    with pytest.raises(error, match=message):
        check_statistic(kind.__name__, tiny_model())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("add_a_*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= 40
