"""The weight files of a checkpoint folder, read a tensor at a time."""

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
PICKLED = (".bin", ".pth", ".pt")
"""Ends of the names of weight files that may run code when they are read."""


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


def open_weights(folder: Path, name: str) -> Weights:
    """The weights of a folder: headers now, contents on request.

    Args:
        folder: a checkpoint.
        name: for messages.

    Raises:
        ValueError: if there are none, only pickles, or a file that is damaged.
    """
    files = _files(folder, name)
    with refused(UNREADABLE.format(name), SafetensorError, OSError, RuntimeError, EOFError):
        return Weights({}, files)


def _files(folder: Path, name: str) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / f"{single.name}.index.json"
    if index.is_file():
        return _shards(index, name)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(found) > 1:
        listed = ", ".join(path.name for path in found[:4])
        raise ValueError(
            f"{name} has several weight files and no index that says which belong together: "
            f"{listed}"
        )
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled and not found:
        raise ValueError(
            f"the weights of {name} are pickled ({pickled[0]}), and unpickling can run code; "
            "convert them where you trust them: safetensors.torch.save_file(torch.load("
            f"{pickled[0]!r}, weights_only=True), 'model.safetensors'), of SMDM's .pth the entry "
            "'model'"
        )
    if not found:
        raise ValueError(
            f"the weights of {name} cannot be read: there is no .safetensors file in {folder}"
        )
    return found


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
