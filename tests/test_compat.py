"""Private names of other packages still do what `sinklab.core.compat` and
`sinklab.lab.checkpoints.materialize` expect of them.
"""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers import initialization as init

from sinklab.core import compat

CONFIG = LlamaConfig(
    vocab_size=20,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    attn_implementation="eager",
)


def test_an_attention_is_chosen_without_a_look_at_the_hub():
    config = LlamaConfig(**CONFIG.to_dict())
    config._attn_implementation = "sdpa"
    assert LlamaForCausalLM(config).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_function_that_a_model_asks_for_is_wrapped(name):
    config, seen = LlamaConfig(**CONFIG.to_dict() | {"attn_implementation": name}), []
    model = LlamaForCausalLM(config).eval()
    plain = model(torch.arange(6)[None]).logits
    compat.wrap_attention(lambda name, function: seen.append((name, function)) or function)
    try:
        assert torch.equal(model(torch.arange(6)[None]).logits, plain)
    finally:
        compat.wrap_attention(None)
    assert len(seen) == config.num_hidden_layers and {asked for asked, _ in seen} == {name}
    model(torch.arange(6)[None])
    assert len(seen) == config.num_hidden_layers
    assert compat.attention_of(config) == name and compat.attention_of(None) is None


# attention that no tap would hear: in a class of a text model, or in one that it is made of
_UNHEARD = re.compile(r"scaled_dot_product_attention\(|ALL_ATTENTION_FUNCTIONS\[[^\]]*\]\s*$", re.M)


@pytest.mark.slow
def test_text_models_attend_as_they_declare():
    """Classes of a file that calls attention itself: none is part of a text model that declares."""
    found = set()
    for path in sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py")):
        if not _UNHEARD.search(path.read_text("utf-8")):
            continue
        file = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for kind in vars(file).values():
            is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
            is_own = is_model and kind.__module__ == file.__name__
            if is_own and compat.declares_interface([object.__new__(kind)]):
                found.add(kind.__name__)
    # their vision encoders call SDPA; these are the decoders
    assert found <= {
        "DeepseekOcr2TextModel",
        "DeepseekOcr2TextPreTrainedModel",
        "Qwen2_5OmniThinkerTextModel",
        "UnlimitedOcrTextModel",
        "UnlimitedOcrTextPreTrainedModel",
    }


def test_a_model_that_is_built_follows_the_choice_of_experts():
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "moe_intermediate_size": 6,
        "num_hidden_layers": 1,
    }
    sizes |= {
        "vocab_size": 20,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts_per_tok=2)).double()
    model.config._experts_implementation = "eager"
    # the grouped product of torch takes no float64
    assert model(torch.arange(6)[None]).logits.isfinite().all()


def test_layers_that_may_not_be_divided_are_named():
    assert {*LlamaForCausalLM(CONFIG)._no_split_modules} == {"LlamaDecoderLayer"}


def test_what_is_marked_as_initialized_keeps_its_values():
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    layer.weight._is_hf_initialized = True
    layer.bias._is_hf_initialized = False
    init.zeros_(layer.weight)
    init.constant_(layer.bias, 3.0)
    assert torch.equal(layer.weight, before)
    assert (layer.bias == 3.0).all()


def test_the_keys_of_a_config_are_those_that_transformers_writes(tmp_path):
    config = LlamaConfig(attn_implementation="sdpa", torch_dtype="float32")
    config.save_pretrained(tmp_path)
    written = (
        json.loads((tmp_path / "config.json").read_text()).keys()
        - LlamaConfig.__annotations__.keys()
    )
    assert "transformers_version" in written and written <= compat.config_keys()
    assert "hidden_size" not in compat.config_keys()


def test_a_backward_pass_is_known_from_inside():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(compat.in_backward())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(compat.in_backward())
            nodes.append(compat.graph_node())
            return grad * 2

    nodes = [compat.graph_node()]
    Probe.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert seen == [False, True] and not compat.in_backward()
    assert nodes[0] == nodes[1] < compat.graph_node()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_known():
    plain, wrapped, compiled = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    compiled.compile()
    assert not compat.is_compiled(plain)
    assert compat.is_compiled(torch.compile(wrapped)) and compat.is_compiled(compiled)
    assert not compat.is_compiled(wrapped)


@pytest.mark.parametrize(
    "switch",
    [
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "pass",
    ],
)
def test_tf32_is_off_inside_the_block_and_as_it_was_behind_it(switch):
    def said():
        try:
            older = torch.get_float32_matmul_precision()
        except RuntimeError:
            older = "refused"
        return older, torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision

    untouched = said()
    try:
        exec(switch)
        before = said()
        with compat.without_tf32(torch.device("cuda")):
            assert torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")
        assert said() == before
        with compat.without_tf32(torch.device("cpu")):
            assert said() == before
    finally:
        torch.backends.fp32_precision = untouched[2]
        torch.set_float32_matmul_precision(untouched[0])
        torch.backends.cuda.matmul.fp32_precision = untouched[1]
