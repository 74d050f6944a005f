"""The model of a run: new, or from another one; the optimizer of each of its parts; and how it is
saved.
"""

import copy
import math
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from sinklab.core.errors import one_of
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.core.subject.diffusion_lm import DiffusionLM
from sinklab.core.subject.sinks import tensors_of
from sinklab.lab.checkpoints import Loaded, check_vocabulary, from_causal, load, save_sink
from sinklab.lab.checkpoints.adapters import PROJECTIONS
from sinklab.lab.checkpoints.convert import MASK_TOKEN
from sinklab.lab.checkpoints.materialize import empty_model, filled
from sinklab.lab.checkpoints.published import read_plan
from sinklab.lab.files import refused
from sinklab.lab.records.storage import weights_hash
from sinklab.lab.training.checks import variant
from sinklab.lab.training.settings import TrainSettings


def started_from(settings: TrainSettings) -> Loaded:
    """The model that ``init_from`` names, with the variant of the settings; a new sink or gate
    depends on the seed.

    Raises:
        ValueError: if there is no such model, or it has a sink or gate other than the settings say.
    """
    name = str(settings.init_from)
    fields = variant(settings)
    if settings.logit_shift:
        fields["logit_shift"] = True
    torch.manual_seed(settings.seed)
    if settings.bf16 and settings.train_only != "all":
        # autocast computes with bfloat16 copies anyway: frozen weights that are bfloat16 on disk
        # need no float32 ones
        fields["dtype"] = "auto"
    # settings of a diffusion checkpoint besides its backbone; None for a causal one
    theirs = read_plan(name)[0].settings
    if settings.objective == "autoregressive" and (theirs or {}).get("block_length"):
        raise ValueError(
            f"{name} has attention in blocks of {(theirs or {})['block_length']}, which an "
            "autoregressive run has not; start from another model"
        )
    if settings.gate != "none" and (theirs or {}).get("gate", "none") == "none":
        # open: near 0.5 it would halve the attention of a trained backbone
        fields["gate_bias"] = 4.0
    if theirs is not None:
        _refuse_other_variant(name, theirs, fields)
        loaded = load(name, **fields)
    elif settings.objective == "autoregressive":
        loaded = from_causal(name, masked=False, **fields)
    else:
        loaded = from_causal(name, **fields)
    if loaded.tokenizer is not None:
        check_vocabulary(loaded.tokenizer, cast(Any, loaded.model.config).vocab_size)
    loaded.model.train()
    return loaded


def source_of(loaded: Loaded) -> dict[str, Any]:
    """Facts, for the run folder, of the model that a run starts from, before it is trained."""
    source = {"name": loaded.name, "revision": loaded.revision, "family": loaded.published_family}
    source["sha256"] = weights_hash(loaded.model.state_dict())
    return {"init_from": source, "notes": list(loaded.notes)}


def _refuse_other_variant(name: str, theirs: dict[str, Any], fields: dict[str, Any]) -> None:
    """A sink, gate or form of attention of the checkpoint is never removed or replaced silently."""
    names = ("sink_kind", "sink_count", "sink_side", "gate", "attention")
    plain = {None, "none", 0, "front", "full"}
    had = {key: theirs[key] for key in names if theirs.get(key) not in plain}
    if any(fields[key] != value for key, value in had.items()):
        has = ", ".join(f"{key}={value!r}" for key, value in had.items())
        flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in had.items())
        raise ValueError(
            "a run keeps sink, gate and attention of the model that it starts from, but "
            f"{name} has {has} and the settings say otherwise; give {flags}"
        )


def new_model(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> DiffusionLM:
    """A freshly initialised model; its backbone's weights depend on the seed and sizes, not on the
    variant.

    A tokenizer without a mask token is given one, with the id behind all others (Llama's: 32,000).

    Raises:
        ValueError: if the variant is unknown.
    """
    if tokenizer.mask_token_id is None and settings.objective != "autoregressive":
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    deviation = 0.02
    kind = settings.backbone
    if kind == "smdm":
        kind = "llama"
        deviation = math.sqrt(2 / (5 * settings.hidden_size))
    with refused("these sizes make no decoder", StrictDataclassError):
        backbone = AutoConfig.for_model(
            kind,
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.mlp_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads or settings.heads,
            max_position_embeddings=max(512, 2 * settings.length),
            tie_word_embeddings=settings.backbone != "smdm",
            rms_norm_eps=1e-5,
            initializer_range=deviation,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    fields = variant(settings, "logit_shift")
    config = DiffusionLMConfig(backbone=backbone, mask_token_id=tokenizer.mask_token_id, **fields)
    torch.manual_seed(settings.seed)
    model = DiffusionLM(config).train()
    for name, weight in model.named_parameters():
        # SMDM: from N(0, 2 / 5d) to N(0, 1 / (d · layers²)) where layers write to the residual
        # stream
        if settings.backbone == "smdm" and name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= math.sqrt(5 / 2) / settings.layers
    return model


def check_fit(
    model: DiffusionLM, tokenizer: PreTrainedTokenizerBase, settings: TrainSettings
) -> None:
    """Refuse text that the model cannot read.

    Raises:
        ValueError: if rows are longer than its context, the tokenizer has ids that its embedding
            has not, or they call different ids [MASK].
    """
    check_vocabulary(tokenizer, model.config.vocab_size)
    if settings.length > model.config.text_positions:
        raise ValueError(
            f"rows must fit the model's context of {model.config.text_positions} tokens, but "
            f"length is {settings.length}; give a shorter --length"
        )
    mask_id = model.config.mask_token_id
    if settings.objective == "autoregressive":
        return
    if mask_id is None or (
        tokenizer.mask_token_id is not None and tokenizer.mask_token_id != mask_id
    ):
        raise ValueError(
            f"[MASK] must be one id, but the model has {mask_id} and the tokenizer "
            f"{tokenizer.mask_token_id}; leave "
            "out the tokenizer of the settings, or set its mask_token"
        )


def save(
    model: DiffusionLM, tokenizer: PreTrainedTokenizerBase, folder: Path, settings: TrainSettings
) -> None:
    """Write ``model/``: weights, config, tokenizer and the hash of the weights; an autoregressive
    model as the plain decoder that it is. A sink that was trained alone gets a file of its own
    besides.
    """
    written: Any = model
    if settings.objective == "autoregressive":
        written = causal_model(model)
    beside = folder / ".model"
    shutil.rmtree(beside, ignore_errors=True)
    written.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    (beside / "weights.sha256").write_text(weights_hash(written.state_dict()) + "\n")
    for path in beside.iterdir():
        # the writers of safetensors make files that only their owner may read
        path.chmod((beside / "config.json").stat().st_mode)
    shutil.rmtree(folder / "model", ignore_errors=True)
    beside.rename(folder / "model")
    if settings.train_only == "sink":
        save_sink(model, folder / "sink.safetensors", name=str(settings.init_from))


def causal_model(model: DiffusionLM) -> PreTrainedModel:
    """The backbone as the causal Hugging Face model that it is without sink and gate; it shares the
    weights.
    """
    config = copy.deepcopy(model.config.backbone)
    config.is_causal = True
    name, device = config.model_type, model.lm_head.weight.device
    return filled(empty_model(config, name), model.state_dict(), name, model.dtype, {"": device})


PARTS = ("all", "sink", "lora")


def freeze(model: Any, train_only: str, lora_rank: int = 8) -> list[str]:
    """Leave only a part of the model trainable; for ``lora`` put adapters beside the attention's
    projections.

    Adapters start as nothing (Hu et al. 2021, §4.1): the model's outputs stay as they are. Their
    random half is drawn from torch's global generator. :func:`merge_lora` makes a plain model of it
    again, to be saved.

    Args:
        model: a `DiffusionLM`, or a causal model for ``all`` and ``lora``; changed in place.
        train_only: ``all``; ``sink``, the sink's tensors; ``lora``, adapters, and the sink's
            tensors.
        lora_rank: rank of the adapters; they are scaled by 2.

    Returns:
        the names of the trained parameters.

    Raises:
        ValueError: for another word, ``sink`` for a model that has none, a rank below 1, if
            ``peft`` is not installed, and for a model that has adapters already.
    """
    one_of("train_only", train_only, PARTS)
    if train_only == "lora":
        _add_adapters(model, lora_rank)
    trained = [name for name, _ in model.named_parameters()]
    if train_only != "all":
        sink: tuple[str, ...] = ()
        if isinstance(model, PreTrainedModel):
            sink = tensors_of(model.config)
        trained = [name for name in trained if name in sink or ".lora_" in name]
    if not trained:
        raise ValueError(
            "train_only='sink' needs a model with a sink, but this one has none; give it one with "
            "sink_kind='token' or 'kv' and sink_count=1"
        )
    chosen = set(trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    if train_only == "all":
        return trained
    # a tied head is the embedding, which decides the type of the states
    products = {id(one.weight) for one in model.modules() if isinstance(one, nn.Linear)}
    products -= {id(model.get_input_embeddings().weight)}
    for parameter in model.parameters():
        # what is trained is float32 at least, and what is no product's weight
        if parameter.requires_grad or id(parameter) not in products:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return trained


def _add_adapters(model: Any, rank: int) -> None:
    if type(rank) is not int or rank < 1:
        raise ValueError(f"lora_rank must be a whole number of at least 1, but is {rank!r}")
    if _adapters(model):
        raise ValueError(
            "this model has adapters already; merge them first, with merge_lora(model)"
        )
    if getattr(model, "gates", None) is not None:
        raise ValueError(
            "adapters are put beside the projections of a model without a gate; train all of it"
        )
    with refused(
        "train_only='lora' needs peft, which is not installed; pip install 'sinklab[train]'",
        ImportError,
    ):
        from peft import LoraConfig, inject_adapter_in_model
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(PROJECTIONS)),
        model.model,
    )


def merge_lora(model: Any) -> None:
    """Add the adapters to the weights they stand beside and take them out, in place; every
    parameter is trainable again. A model without adapters stays as it is.
    """
    for name, adapter in _adapters(model).items():
        base = adapter.get_base_layer()
        # a small change is lost in bfloat16
        base.weight.data = base.weight.data.to(
            torch.promote_types(base.weight.dtype, torch.float32)
        )
        adapter.merge()
        model.set_submodule(name, base)
    # left by peft, which would warn of it at the next adapters
    if "peft_config" in dir(model.model):
        del model.model.peft_config
    model.requires_grad_(True)


def _adapters(model: nn.Module) -> dict[str, Any]:
    """Adapted layers by name."""
    return {name: module for name, module in model.named_modules() if "lora_A" in module._modules}
