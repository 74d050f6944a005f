"""Elements of a run folder: names, atomic writing, arrays as they are stored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sinklab.lab.files import writing

if TYPE_CHECKING:
    import torch


SCHEMA = 3
"""Version of the form in which run folders are written."""
RUN_FILE = "run.json"
"""File of a run folder that says what it holds."""
PART_SUFFIX = ".part"
DIMS_KEY = "dims"


TABLES = ".parquet"
ARRAYS = ".safetensors"


def file_of(name: str, suffix: str, part: int | None = None) -> str:
    """``tokens.parquet``, or ``tokens-0007.parquet`` for part 7."""
    if part is None:
        return f"{name}{suffix}"
    return f"{name}-{part:04d}{suffix}"


def write_beside(target: Path, write: Callable[[Path], object]) -> None:
    """Write through a file beside ``target`` and rename it: ``target`` is either whole or
    unchanged. Several processes may write the same file, each beside the others.

    Any error of ``write`` passes through, and the file beside is removed.

    Args:
        target: the file.
        write: takes the path to write to.

    Raises:
        OSError: for a disk that refuses, a full one among others, with the name of the file.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        with writing(target):
            write(part)
        with open(part, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_text(target: Path, text: str) -> None:
    """Write a text in UTF-8, as `write_beside` writes."""
    write_beside(target, lambda part: part.write_text(text, encoding="utf-8", newline="\n"))


def remove_half_written(path: Path) -> None:
    """Remove the files that an interrupted `write_beside` left in a folder; nobody may be writing
    there.
    """
    for leftover in path.glob(f".*.{8 * '[0-9a-f]'}{PART_SUFFIX}"):
        leftover.unlink(missing_ok=True)


class Arrays(NamedTuple):
    """Dense arrays or tensors that are written together, each in its own type."""

    values: Mapping[str, Any]
    dims: Mapping[str, tuple[str, ...]] = {}
    """names of the axes of each"""


class Contents(NamedTuple):
    """Tables and arrays of one sample, by name."""

    tables: Mapping[str, Any] = {}
    """columns, rows or data frames"""
    arrays: Mapping[str, Arrays] = {}


def dense(given: Arrays) -> Arrays:
    """The arrays as numpy's, bfloat16 as float32. Raises ValueError unless every axis has a
    name.
    """
    values = {key: _to_numpy(value) for key, value in given.values.items()}
    for key, array in values.items():
        axes = given.dims.get(key, ())
        if len({*axes}) != array.ndim:
            raise ValueError(
                f"every axis of an array needs a name of its own, but {key!r} has shape "
                f'{array.shape} and dims {axes}; pass dims={{"received": ("step", "layer", "key")}}'
            )
    return Arrays(values, {key: given.dims[key] for key in values})


def write_arrays(target: Path, arrays: Arrays) -> None:
    """Write a safetensors file of `dense` arrays. Raises as `write_beside`."""
    from safetensors.numpy import save

    # its own writer leaves files of other names, which their owner alone may read
    whole = save(dict(arrays.values), metadata={DIMS_KEY: json.dumps(arrays.dims)})
    write_beside(target, lambda beside: beside.write_bytes(whole))


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16.
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
    return np.require(value, requirements="C")


def weights_hash(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) of the names, dtypes, shapes and bytes of ``state_dict``; the order of the
    entries does not count.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name]
        # The length of the header is hashed too, so that no two state dicts spell the same stream
        # of bytes.
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        # of torchao's kinds of tensor the numbers that they stand for
        if type(tensor).__module__.startswith("torchao"):
            tensor = tensor.dequantize()
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
