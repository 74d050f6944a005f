import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sinklab
from sinklab.models import DiffusionLM, Loaded
from sinklab.models.loading import PACKAGED, load
from tiny_diffusion import save_tiny, tiny_model, tiny_tokenizer


def save_llama(folder: Path, **fields: object) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=280,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **fields,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("sink", [0, 2])
def test_a_folder_comes_back_bit_for_bit(tmp_path: Path, sink: int) -> None:
    model = tiny_model(sink, gate="elementwise")
    save_tiny(tmp_path / "m", sink, gate="elementwise")
    loaded = sinklab.load(tmp_path / "m")
    assert isinstance(loaded, Loaded)
    assert isinstance(loaded.model, DiffusionLM)
    assert (loaded.family, loaded.name, loaded.revision) == ("diffusion", str(tmp_path / "m"), None)
    assert not loaded.model.training
    assert loaded.tokenizer.mask_token_id == loaded.model.config.mask_token_id
    ours, theirs = loaded.model.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)


def test_the_dtype_is_the_callers(tmp_path: Path) -> None:
    save_tiny(tmp_path / "m", 1)
    model = load(tmp_path / "m", dtype=torch.bfloat16, device="cpu").model
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in load(tmp_path / "m").model.parameters()} == {torch.float32}


def test_an_autoregressive_model_is_a_baseline(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "llama")
    loaded = load(tmp_path / "llama")
    assert loaded.family == "autoregressive"
    assert type(loaded.model) is LlamaForCausalLM
    ids = torch.arange(3, 12)[None]
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-snik", r"no model can be loaded from 'tiny-snik'.*did you mean 'tiny-sink'\?"),
        ("tny", r"no model can be loaded from 'tny'.*did you mean 'tiny'\?"),
        ("./no/such/folder", r"from './no/such/folder'.*'tiny' or 'tiny-sink', a folder"),
        ("gpt2", r"from 'gpt2': it is no folder and no name on the Hub"),
        ("GSAI-ML/LLaDA-8B-Instuct", r"did you mean 'GSAI-ML/LLaDA-8B-Instruct'\?"),
        ("someone/something-else", r"'tiny' or 'tiny-sink', a folder, or a Hub name"),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_ones(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load(name)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)no model can be loaded from .*config.json"):
        load(tmp_path)


def test_an_architecture_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"'gpt2' model \(GPT2LMHeadModel\), but sinklab loads LLaDAModelLM, .*llama, qwen2"
    ):
        load(tmp_path)


def test_missing_surplus_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    weights = save_tiny(tmp_path, 1) / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in [
        ({key: value for key, value in tensors.items() if key != name}, f"missing: {name}"),
        ({key: value for key, value in tensors.items() if key != "sink_embeddings"}, "missing: sink_embeddings"),
        ({**tensors, "model.layers.2.extra": torch.zeros(2)}, "unexpected: model.layers.2.extra"),
        ({**tensors, name: torch.zeros(2, 3)}, rf"mismatched: .*{name}"),
    ]:
        save_file(change, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"do not fit its config \(.*{message}.*belong together"):
            load(tmp_path)


def test_surplus_tensors_of_a_baseline_are_refused_too(tmp_path: Path) -> None:
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "sink_embeddings": torch.zeros(1, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected: sink_embeddings"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    weights = save_tiny(tmp_path) / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="cannot be read, the file may be cut short or damaged"):
        load(tmp_path)


def test_absent_weights_are_refused(tmp_path: Path) -> None:
    (save_tiny(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"weights of .* cannot be read"):
        load(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    model = tiny_model()
    (save_tiny(tmp_path) / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled \(pytorch_model.bin\), and unpickling can run code"):
        load(tmp_path)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    for text, message in [("{", "config.json is damaged"), ("[]", "holds no object"), ("{}", "is a None model")]:
        (save_tiny(tmp_path) / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.tokenizer is None
    assert loaded.special.mask == model.config.mask_token_id
    with pytest.raises(ValueError, match=r"has no tokenizer files, so it takes token ids .* put its tokenizer\.json"):
        loaded.needed_tokenizer()
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path).needed_tokenizer().mask_token_id == model.config.mask_token_id
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="a model but no tokenizer that can be read"):
        load(tmp_path)


@pytest.mark.parametrize("ours", [True, False])
def test_the_code_of_a_checkpoint_is_never_run(tmp_path: Path, ours: bool) -> None:
    """It is imported by nobody, whatever its config asks for."""
    save_tiny(tmp_path) if ours else save_llama(tmp_path)
    ran = tmp_path / "ran"
    for module in ("modeling_x", "configuration_x", "tokenization_x"):
        (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\nraise RuntimeError('code was run')")
    edit(
        tmp_path / "config.json",
        auto_map={
            "AutoConfig": "configuration_x.Config",
            "AutoModel": "modeling_x.Model",
            "AutoModelForCausalLM": "modeling_x.Model",
        },
    )
    edit(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.Tokenizer", None]})
    loaded = load(tmp_path)
    assert loaded.family == ("diffusion" if ours else "autoregressive")
    assert not ran.exists()


def test_an_architecture_that_comes_as_code_is_refused_and_not_run(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "configuration_x.py").write_text(f"open({str(ran)!r}, 'w')\nraise RuntimeError('code was run')")
    edit(
        tmp_path / "config.json",
        model_type="newcomer",
        architectures=["X"],
        auto_map={"AutoConfig": "configuration_x.Config"},
    )
    with pytest.raises(ValueError, match=r"'newcomer' model \(X\), but sinklab loads"):
        load(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("name", PACKAGED)
def test_the_packaged_pair_loads_and_writes(name: str) -> None:
    try:
        loaded = load(name)
    except ValueError as error:
        if (Path(sinklab.__file__).parent / "models" / "packaged" / name / "config.json").exists():
            raise
        pytest.skip(f"the packaged models are not there yet: {error}")
    assert loaded.family == "diffusion"
    assert loaded.model.config.sink_count == (1 if name == "tiny-sink" else 0)
    ids = loaded.tokenizer("It was a dark and", return_tensors="pt")["input_ids"]
    written = loaded.model.generate(ids, max_new_tokens=6)
    assert loaded.tokenizer.mask_token_id not in written
    assert torch.equal(written[:, : ids.shape[1]], ids)
