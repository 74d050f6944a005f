"""The weight files of a checkpoint folder, read a tensor at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sinklab.lab.files import read_json, refused

FLOATING = ("F64", "F32", "F16", "BF16")
PICKLED = (".bin", ".pth", ".pt")
"""Ends of the names of weight files that may run code when they are read."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, read when it is asked for as transformers asks: ``stored[...]``."""

    name: str
    file: Path
    opened: Any
    shape: tuple[int, ...]

    def __getitem__(self, everything: Any) -> Tensor:
        return self.opened.get_tensor(self.name)


Weights = Mapping[str, Stored]


def open_weights(folder: Path, name: str) -> Weights:
    """The weights of a folder: headers now, contents on request.

    Args:
        folder: a checkpoint.
        name: for messages.

    Raises:
        ValueError: if there are none, only pickles, a file that is damaged, a tensor in two files,
            or one that is not of floating point numbers.
    """
    files = _files(folder, name)
    fault = f"the weights of {name} cannot be read, the file may be cut short or damaged"
    with refused(fault, SafetensorError, OSError, RuntimeError, EOFError):
        # not mapped: pages that were read would stay in memory beside the copy
        opened = {file: safe_open(file, "pt", backend="pread") for file in files}
    weights: dict[str, Stored] = {}
    for file, tensors in opened.items():
        for one in tensors.keys():  # noqa: SIM118 (no mapping)
            if one in weights:
                raise ValueError(
                    f"the tensor {one} is in {weights[one].file.name} and in {file.name}"
                )
            piece = tensors.get_slice(one)
            if piece.get_dtype() not in FLOATING:
                raise ValueError(
                    f"the tensor {one} holds {piece.get_dtype()}, but sinklab reads "
                    f"{', '.join(FLOATING)}; take a checkpoint that is not quantised"
                )
            weights[one] = Stored(one, file, tensors, tuple(piece.get_shape()))
    return weights


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
