"""The weight files of a checkpoint folder, read a tensor at a time; pickles only on request."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sinklab.lab.checkpoints.families import Shapes
from sinklab.lab.files import read_json, refused

FLOATING = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
MAPPED_BYTES = 2**28
UNREADABLE = "the weights of {} cannot be read, the file may be cut short or damaged"
SAFE = ("*.safetensors",)
"""Names of weight files."""
PICKLED = ("*.bin", "*.pth", "*.pt")
"""Names of weight files that may run code when they are read."""


class Weights:
    """Tensors by name, each read when it is asked for; ``shapes`` are known before.

    Raises:
        ValueError: for a tensor in two files, and for one that is not of floating point numbers.
    """

    def __init__(self, tensors: Mapping[str, Tensor], files: Sequence[Path] = ()) -> None:
        self.tensors = tensors
        self.files: dict[str, Path] = {}
        kinds = {name: tensor.dtype for name, tensor in tensors.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    if name in self.files:
                        raise ValueError(
                            f"the tensor {name} is in {self.files[name].name} and in {file.name}"
                        )
                    piece = opened.get_slice(name)
                    self.files[name] = file
                    kinds[name] = FLOATING.get(piece.get_dtype(), piece.get_dtype())
                    shapes[name] = tuple(piece.get_shape())
        for name, kind in kinds.items():
            if kind not in FLOATING.values():
                raise ValueError(
                    f"the tensor {name} holds {kind}, but sinklab reads {', '.join(FLOATING)}; "
                    "take a checkpoint that is not quantised"
                )
        self.shapes: Shapes = shapes
        self._opened: tuple[Path, Any] | None = None
        self._left = 0

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, in memory or mapped."""
        if name in self.tensors:
            return self.tensors[name]
        file = self.files[name]
        # opened anew now and then: the pages of its mapping, which count as resident, are released
        if self._opened is None or self._opened[0] != file or self._left < 0:
            self._opened, self._left = (file, safe_open(file, "pt")), MAPPED_BYTES
        tensor = self._opened[1].get_tensor(name)
        self._left -= tensor.nbytes
        return tensor


def _unpickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled state dict, unpickled with ``weights_only=True`` and mapped if the
    format allows it.
    """
    with refused(
        f"{file.name} is damaged or holds more than tensors and was not unpickled, since that "
        "could run code"
    ):
        # the format before torch 1.6, which is no archive, cannot be mapped
        content = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    for key in ("model", "state_dict"):
        # lit-gpt keeps the weights beside the state of the optimizer
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise ValueError(
            f"{file.name} holds no state dict: expected names and tensors, found "
            f"{type(content).__name__}"
        )
    return content


def open_weights(folder: Path, name: str, allow_pickle: bool = False) -> Weights:
    """The weights of a folder: headers now, contents on request.

    Args:
        folder: a checkpoint.
        name: for messages.
        allow_pickle: read ``.bin``, ``.pth`` or ``.pt`` files if there is no safetensors file.

    Raises:
        ValueError: if there are none, only pickles that were not allowed, or a file that is
            damaged.
    """
    files = _files(folder, name)
    pickled = files[0].suffix != ".safetensors"
    if pickled and not allow_pickle:
        raise ValueError(
            f"the weights of {name} are pickled ({files[0].name}), and unpickling can run code; "
            "convert them to "
            "safetensors, or pass allow_pickle=True to read them with weights_only=True"
        )
    with refused(UNREADABLE.format(name), SafetensorError, OSError, RuntimeError, EOFError):
        if not pickled:
            return Weights({}, files)
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= _unpickle(file)
        return Weights(tensors)


def _files(folder: Path, name: str) -> list[Path]:
    for single, patterns in (("model.safetensors", SAFE), ("pytorch_model.bin", PICKLED)):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _shards(index, name)
        found = sorted(
            path for pattern in patterns for path in folder.glob(pattern) if path.is_file()
        )
        if len(found) > 1:
            listed = ", ".join(path.name for path in found[:4])
            raise ValueError(
                f"{name} has several weight files and no index that says which belong together: "
                f"{listed}"
            )
        if found:
            return found
    raise ValueError(
        f"the weights of {name} cannot be read: there is no .safetensors file in {folder}, nor "
        ".bin, .pth or .pt (from the Hub, pickled weights are fetched with allow_pickle=True only)"
    )


def _shards(index: Path, name: str) -> list[Path]:
    with refused(f"the index {index.name} of {name} is damaged"):
        listed: Any = read_json(index)["weight_map"]
        shards = sorted({str(shard) for shard in listed.values()})
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ValueError(f"the index {index.name} of {name} points out of its folder: {outside[0]}")
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        raise ValueError(
            f"the weights of {name} cannot be read: {len(absent)} of {len(shards)} shards are not "
            f"there ({', '.join(absent[:3])}); fetch the checkpoint again"
        )
    return [index.parent / shard for shard in shards]
