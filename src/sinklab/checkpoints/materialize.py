"""Building a model without memory and filling it tensor by tensor, so that the host never holds it twice."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sinklab.checkpoints import families
from sinklab.checkpoints.weights import Part, Plan, Weights
from sinklab.models import diffusion_lm
from sinklab.models.config import DiffusionLMConfig
from sinklab.models.diffusion_lm import DiffusionLM
from sinklab.models.sinks.base import known_tensors, tensors_of

DeviceMap = str | dict[str, Any]


def plan_devices(
    model: PreTrainedModel, device_map: DeviceMap, dtype: torch.dtype, max_memory: dict[Any, Any] | None = None
) -> dict[str, Any]:
    """A full device map for a hollow model.

    Args:
        model: on the meta device.
        device_map: ``auto``, ``balanced``, ``balanced_low_0`` or ``sequential`` (accelerate measures the devices), or
            module names and devices.
        dtype: of the weights.
        max_memory: as accelerate takes it.

    Raises:
        ValueError: for an unknown word, a module without a device, a device that is not there, or weights on disk.
    """
    if isinstance(device_map, dict):
        for device in device_map.values():
            # accelerate's word for the disk is refused below, with its own remedy
            if str(device) != "disk":
                usable(device)
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if isinstance(device_map, str):
        words = ("auto", "balanced", "balanced_low_0", "sequential")
        if device_map not in words:
            raise ValueError(
                f"device_map must be one of {', '.join(words)} or a dict of modules and devices, but is "
                f"{device_map!r}; for one device use device="
            )
        whole: Any = {"no_split_module_classes": list(model._no_split_modules or ()), "dtype": dtype}
        memory = max_memory
        if device_map != "sequential":
            low = device_map == "balanced_low_0"
            memory = get_balanced_memory(model, max_memory=max_memory, low_zero=low, **whole)
        places = dict(infer_auto_device_map(model, max_memory=memory, **whole))
    else:
        places = dict(device_map)
    if "disk" in map(str, places.values()):
        raise ValueError(
            "some of the weights would go to disk, which sinklab does not do; use a smaller dtype or model"
        )
    places = _beside_their_layers(model, places)
    known = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    if unknown := [name for name in places if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"device_map names {unknown[0]!r}, which the model does not have{hint}")
    for name in model.state_dict():
        device_in(places, name)
    return places


def usable(device: torch.device | str | int) -> torch.device:
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


def _beside_their_layers(model: PreTrainedModel, places: dict[str, Any]) -> dict[str, Any]:
    """A gate multiplies inside its layer, and the sinks enter like embeddings: they live where those do."""
    if "" in places:
        return places
    sinks = tensors_of(model.config)
    ours = ("gates", *sinks)
    places = {name: device for name, device in places.items() if not name.startswith(ours)}
    for index in range(len(getattr(model, "gates", ()))):
        places[f"gates.{index}"] = device_in(places, f"model.layers.{index}")
    for name in sinks:
        places[name] = device_in(places, "model.embed_tokens")
    return places


def device_in(places: dict[str, Any], name: str) -> Any:
    """The device of a tensor or module: that of the longest name in the map that contains it."""
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        if (prefix := ".".join(parts[:end])) in places:
            return places[prefix]
    raise ValueError(f"device_map does not cover the model: it has no device for {name}")


def lookup(places: dict[str, Any]) -> Callable[[str], torch.device]:
    """The function from tensor names to devices that :func:`sinklab.checkpoints.materialize.fill` wants."""
    return lambda name: torch.device(device_in(places, name))


def dispatch(model: PreTrainedModel, places: dict[str, Any]) -> PreTrainedModel:
    """Let accelerate move activations between the devices of the map."""
    from accelerate import dispatch_model

    with warnings.catch_warnings():
        # it expects modules alone; the sinks are a parameter, and the names have been checked
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        return dispatch_model(model, places)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def hollow(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """The model of a config on the meta device: shapes and names, no memory. Its attention is always sdpa.

    Raises:
        ValueError: if transformers cannot build it, with the ``name`` of the checkpoint.
    """
    build: Any = DiffusionLM if isinstance(config, DiffusionLMConfig) else AutoModelForCausalLM.from_config
    for one in (config, getattr(config, "backbone", None)):
        if one is not None:
            # another name may be a repository of compiled kernels, to be fetched and imported
            one._attn_implementation = "sdpa"
    with families.blamed_on(name), torch.device("meta"):
        return build(config)


def names_to_fill(model: PreTrainedModel) -> list[str]:
    """Tensors that a checkpoint of this model has; a head tied to the embedding is none."""
    tied = {HEAD} if model.config.tie_word_embeddings else set()
    return [name for name in model.state_dict() if name not in tied]


def complete_plan(
    plan: Plan | None, model: PreTrainedModel, weights: Weights, asked: Collection[str]
) -> tuple[Plan, set[str]]:
    """The plan for this model, and the tensors of ours that no checkpoint has and that start anew.

    A source with no places in the plan is left out: that of a sink or gate that was to go.

    Args:
        plan: of the recipe; None for a checkpoint with the model's own names.
        model: from :func:`hollow`.
        weights: of the checkpoint.
        asked: names of the caller's settings. A sink or gate that was asked for may be absent; one that was asked to
            go may be there.
    """
    names = names_to_fill(model)
    plan = plan or {name: (Part(name),) for name in {**dict.fromkeys(names), **_removed(model, weights.shapes, asked)}}
    gone = _removed(model, (part.target for parts in plan.values() for part in parts), asked)
    plan = {source: tuple(part for part in parts if part.target not in gone) for source, parts in plan.items()}
    filled = {part.target for source, parts in plan.items() if source in weights.shapes for part in parts}
    ours = (*tensors_of(model.config), "gates.")
    start_new = bool({"sink_kind", "sink_count", "gate", "gate_bias"} & {*asked})
    new = {name for name in names if start_new and name.startswith(ours) and name not in filled}
    return {source: parts for source, parts in plan.items() if not new & {part.target for part in parts}}, new


def _removed(model: PreTrainedModel, targets: Iterable[str], asked: Collection[str]) -> dict[str, None]:
    """Those of these tensors that belong to a sink or gate which the caller's settings took away."""
    gone: set[str] = set()
    if {"sink_kind", "sink_count"} & {*asked}:
        gone |= {*known_tensors()} - {*tensors_of(model.config)}
    if "gate" in asked and not hasattr(model, "gates"):
        gone |= {f"gates.{layer}.{kind}" for layer in range(len(model.model.layers)) for kind in ("weight", "bias")}
    return {name: None for name in targets if name in gone}


def check(plan: Plan, model: PreTrainedModel, weights: Weights, name: str) -> None:
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
    plan: Plan,
    weights: Weights,
    dtype: torch.dtype,
    device_of: Callable[[str], torch.device],
) -> None:
    """Give every tensor of the plan its memory and contents, one at a time, and tie what is tied."""
    for source, parts in plan.items():
        for part in parts:
            target = torch.empty(model.get_parameter(part.target).shape, dtype=dtype, device=device_of(part.target))
            if part.take is None and target.ndim:
                for rows, piece in weights.pieces(source):
                    target[rows] = piece
            else:
                whole = weights.whole(source)
                target.copy_(part.take(whole) if part.take else whole)
            _put(model, part.target, target)
    diffusion_lm.rebuild(model.model, device_of("model.rotary_emb"))
    model.tie_weights()
    if model.config.tie_word_embeddings and HEAD in weights.shapes and HEAD not in plan:
        _check_tied(model, weights)


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


def start(
    model: PreTrainedModel, names: set[str], dtype: torch.dtype, device_of: Callable[[str], torch.device]
) -> None:
    """Initialise sinks and gates that the checkpoint does not have."""
    for name in sorted(names):
        _put(model, name, torch.empty(model.get_parameter(name).shape, dtype=dtype, device=device_of(name)))
    owners = {name.rpartition(".")[0] for name in names}
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        for leaf, parameter in module.named_parameters(recurse=False):
            # as transformers marks what is not to be initialised: a gate that only gets a bias keeps its weight
            parameter._is_hf_initialized = f"{owner}.{leaf}".lstrip(".") not in names  # type: ignore[attr-defined]
        model._init_weights(module)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
