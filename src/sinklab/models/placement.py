"""Where the tensors of a model go: one device, or a map made by accelerate."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from sinklab.models.config import SINK_NAMES

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
    ours = ("gates", *SINK_NAMES)
    places = {name: device for name, device in places.items() if not name.startswith(ours)}
    for index in range(len(getattr(model, "gates", ()))):
        places[f"gates.{index}"] = device_in(places, f"model.layers.{index}")
    for name in SINK_NAMES:
        if hasattr(model, name):
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
    """The function from tensor names to devices that :func:`sinklab.models.filling.fill` wants."""
    return lambda name: torch.device(device_in(places, name))


def dispatch(model: PreTrainedModel, places: dict[str, Any]) -> PreTrainedModel:
    """Let accelerate move activations between the devices of the map."""
    from accelerate import dispatch_model

    with warnings.catch_warnings():
        # it expects modules alone; the sinks are a parameter, and the names have been checked
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        return dispatch_model(model, places)
