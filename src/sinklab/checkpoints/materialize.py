"""Building a model without memory and filling it tensor by tensor, so that the host never holds it twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sinklab.checkpoints import families
from sinklab.checkpoints.families import CheckpointPlan
from sinklab.checkpoints.weights import Weights
from sinklab.compat import choose_attention, indivisible_layers, mark_initialized
from sinklab.errors import near
from sinklab.models.config import DiffusionLMConfig
from sinklab.models.diffusion_lm import DiffusionLM

DeviceMap = str | dict[str, Any]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BALANCED = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words of accelerate for device maps."""


@dataclass(frozen=True)
class Part:
    """One tensor of the model that a tensor of the checkpoint fills, or a part of it."""

    target: str
    """Name in the model's state dict."""
    take: Callable[[Tensor], Tensor] | None = None
    """What to take from the tensor; None takes all of it."""


TensorPlan = dict[str, tuple[Part, ...]]
"""Tensor name in the checkpoint -> the parts it fills; none for a sink or gate that the caller's settings remove."""


def plan_devices(model: PreTrainedModel, device_map: DeviceMap, dtype: torch.dtype) -> dict[str, Any]:
    """A full device map for a model on the meta device.

    Args:
        model: from :func:`empty_model`.
        device_map: one of :data:`BALANCED` (accelerate measures the devices), or module names and devices.
        dtype: of the weights.

    Raises:
        ValueError: for an unknown word, a module without a device, a device that is not there, or weights on disk.
    """
    if isinstance(device_map, dict):
        devices = dict(device_map)
        for device in devices.values():
            # accelerate's word for the disk is refused below, with its own remedy
            if str(device) != "disk":
                usable_device(device)
    else:
        devices = _balanced(model, device_map, dtype)
    if "disk" in map(str, devices.values()):
        raise ValueError(
            "some of the weights would go to disk, which sinklab does not do; use a smaller dtype or model"
        )
    devices = _beside_their_layers(model, devices)
    known = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    if strangers := [name for name in devices if name not in known]:
        hint = near(strangers[0], known)
        raise ValueError(
            f"device_map names {strangers[0]!r}, which the model does not have" + (f"; {hint}" if hint else "")
        )
    for name in model.state_dict():
        device_in(devices, name)
    return devices


def _balanced(model: PreTrainedModel, word: str, dtype: torch.dtype) -> dict[str, Any]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if word not in BALANCED:
        raise ValueError(
            f"device_map must be one of {', '.join(BALANCED)} or a dict of modules and devices, but is {word!r}; for "
            "one device use device="
        )
    whole: Any = {"no_split_module_classes": indivisible_layers(model), "dtype": dtype}
    memory = None
    if word != "sequential":
        memory = get_balanced_memory(model, low_zero=word == "balanced_low_0", **whole)
    return dict(infer_auto_device_map(model, max_memory=memory, **whole))


def usable_device(device: torch.device | str | int) -> torch.device:
    """This device, if there is one.

    Raises:
        ValueError: if its name is none, or this machine does not have it.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        reason = str(error).splitlines()[0].rstrip(". ")
        raise ValueError(
            f"device must be one that torch can use here ({' or '.join(kinds)}), but is {device!r} ({reason}); "
            "pass device='cpu', or install a torch that knows the device"
        ) from error
    return found


def _beside_their_layers(model: PreTrainedModel, devices: dict[str, Any]) -> dict[str, Any]:
    """A gate multiplies inside its layer, and the sinks enter like embeddings: they are on the device of those."""
    if "" in devices:
        return devices
    sinks = [name for name, _ in model.named_parameters(recurse=False)]
    devices = {name: device for name, device in devices.items() if not name.startswith(("gates", *sinks))}
    for index in range(len(getattr(model, "gates", ()))):
        devices[f"gates.{index}"] = device_in(devices, f"model.layers.{index}")
    return devices | {name: device_in(devices, "model.embed_tokens") for name in sinks}


def device_in(devices: Mapping[str, Any], name: str) -> Any:
    """The device of a tensor or module: that of the longest name in the map that contains it."""
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        if (prefix := ".".join(parts[:end])) in devices:
            return devices[prefix]
    raise ValueError(f"device_map does not cover the model: it has no device for {name}")


def dispatch(model: PreTrainedModel, devices: dict[str, Any]) -> PreTrainedModel:
    """Let accelerate move activations between the devices of the map."""
    from accelerate import dispatch_model

    with warnings.catch_warnings():
        # it expects modules alone; the sinks are a parameter, and the names have been checked
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        return dispatch_model(model, devices)


def empty_model(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """The model of a config on the meta device: shapes and names, no memory. Its attention is always sdpa.

    Raises:
        ValueError: if transformers cannot build it, with the ``name`` of the checkpoint.
    """
    build: Any = DiffusionLM if isinstance(config, DiffusionLMConfig) else AutoModelForCausalLM.from_config
    for one in (config, getattr(config, "backbone", None)):
        if one is not None:
            # another name may be a repository of compiled kernels, to be fetched and imported
            choose_attention(one, "sdpa")
    with families.blamed_on(name), torch.device("meta"):
        return build(config)


def names_to_fill(model: PreTrainedModel) -> list[str]:
    """Tensors that a checkpoint of this model has; a head tied to the embedding is none."""
    tied = {HEAD} if model.config.tie_word_embeddings else set()
    return [name for name in model.state_dict() if name not in tied]


def tensor_plan(
    plan: CheckpointPlan, model: PreTrainedModel, weights: Weights, overrides: Mapping[str, Any], name: str
) -> tuple[TensorPlan, set[str]]:
    """What fills each tensor of the model, and the tensors that no checkpoint has and that start anew.

    Args:
        plan: of the checkpoint.
        model: from :func:`empty_model`.
        weights: of the checkpoint.
        overrides: the caller's settings. What they add to the checkpoint's own model (a sink, a gate, its bias) may be
            absent; what they remove may be there.
        name: of the checkpoint, for messages.
    """
    names = dict.fromkeys(names_to_fill(model))
    before = dict(names)
    if changed := [one for one in overrides if one.startswith(("sink", "gate"))]:
        others = {} if plan.settings is None else {one: overrides[one] for one in overrides if one not in changed}
        before = dict.fromkeys(names_to_fill(empty_model(families.configured(plan, others, name), name)))
    found: dict[str, list[Part]] = {}
    new = set()
    for target in names | before:
        source, take = plan.family.source(plan, target)
        if target in names and target not in before and source not in weights.shapes:
            new.add(target)
        elif target in names or source in weights.shapes:
            found.setdefault(source, []).extend([Part(target, take)] if target in names else [])
    return {source: tuple(parts) for source, parts in found.items()}, new


def check(plan: TensorPlan, model: PreTrainedModel, weights: Weights, name: str) -> None:
    """Compare names and shapes, in the names of the checkpoint.

    Raises:
        ValueError: that names what is missing, surplus or misshapen.
    """
    shapes = {target: tuple(tensor.shape) for target, tensor in model.state_dict().items()}
    # old Llama files keep the rotary frequencies; some files of a tied model have its head all the same
    harmless = ("rotary_emb.inv_freq", *([HEAD] if model.config.tie_word_embeddings else []))
    wrong: dict[str, list[str]] = {
        "missing": [source for source in plan if source not in weights.shapes],
        "unexpected": [one for one in weights.shapes if one not in plan and not one.endswith(harmless)],
        "mismatched": [
            text
            for source, parts in plan.items()
            if source in weights.shapes and (text := _misfit(source, weights.shapes[source], parts, shapes))
        ],
    }
    listed = "; ".join(
        f"{key}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for key, names in wrong.items()
        if names
    )
    if listed:
        raise ValueError(
            f"the tensors of {name} do not fit its config ({listed}); check that weights and config belong together"
        )


def _misfit(source: str, shape: tuple[int, ...], parts: Iterable[Part], shapes: dict[str, tuple[int, ...]]) -> str:
    whole = torch.empty(shape, device="meta")
    for part in parts:
        try:
            taken = tuple((part.take(whole) if part.take else whole).shape)
        except (RuntimeError, IndexError):
            taken = ()
        if taken != shapes[part.target]:
            return f"{source} has shape {shape}, which does not give {part.target} {shapes[part.target]}"
    return ""


def fill(
    model: PreTrainedModel,
    plan: TensorPlan,
    weights: Weights,
    dtype: torch.dtype,
    devices: Mapping[str, Any],
) -> None:
    """Give every tensor of the plan its memory and contents, one at a time, and tie what is tied."""
    for source, parts in plan.items():
        for part in parts:
            target = torch.empty(
                model.get_parameter(part.target).shape, dtype=dtype, device=device_in(devices, part.target)
            )
            if part.take is None and target.ndim:
                for rows, piece in weights.pieces(source):
                    target[rows] = piece
            else:
                whole = weights.whole(source)
                target.copy_(part.take(whole) if part.take else whole)
            _put(model, part.target, target)
    compute_rotary(model.model, device_in(devices, "model.rotary_emb"))
    model.tie_weights()
    if model.config.tie_word_embeddings and HEAD in weights.shapes and HEAD not in plan:
        _check_tied(model, weights)


def compute_rotary(decoder: Any, device: torch.device | str) -> None:
    """Compute the rotary frequencies of a decoder whose buffers are on the meta device; they stay float32."""
    rotary = decoder.rotary_emb
    for name, buffer in type(rotary)(decoder.config).named_buffers():
        setattr(rotary, name, buffer.to(device))


def _check_tied(model: PreTrainedModel, weights: Weights) -> None:
    """A head that the file has all the same must be the embedding."""
    tied = model.get_parameter(EMBEDDING)
    same = weights.shapes[HEAD] == tuple(tied.shape) and all(
        torch.equal(tied[rows], piece.to(tied)) for rows, piece in weights.pieces(HEAD)
    )
    if not same:
        raise ValueError(
            f"config.json ties the head to the embedding (tie_word_embeddings), but {HEAD} of the checkpoint is "
            "another tensor; set tie_word_embeddings to false in config.json"
        )


def start(model: PreTrainedModel, names: set[str], dtype: torch.dtype, devices: Mapping[str, Any]) -> None:
    """Initialise sinks and gates that the checkpoint does not have."""
    for name in sorted(names):
        _put(model, name, torch.empty(model.get_parameter(name).shape, dtype=dtype, device=device_in(devices, name)))
    for owner in sorted({name.rpartition(".")[0] for name in names}):
        module = model.get_submodule(owner)
        for leaf, parameter in module.named_parameters(recurse=False):
            # a gate that only gets a bias keeps its weight
            mark_initialized(parameter, f"{owner}.{leaf}".lstrip(".") not in names)
        model._init_weights(module)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
