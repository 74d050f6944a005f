"""Elements of a run folder: names, atomic writing, arrays as they are stored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sinklab.core.errors import known_fields, one_of
from sinklab.lab.files import writing

if TYPE_CHECKING:
    import torch


SCHEMA = 3
"""Version of the form in which run folders are written."""
RUN_FILE = "run.json"
"""File of a run folder that says what it holds."""
PART_SUFFIX = ".part"
DIMS_KEY = "dims"

_NAME = re.compile(r"(?!.*-\d{4,}$)[a-z0-9][a-z0-9_-]*")
_BESIDE = re.compile(rf"\..+\.[0-9a-f]{{8}}{re.escape(PART_SUFFIX)}")
"""Names of the files through which `write_beside` writes."""


class Kind(NamedTuple):
    """Kind of file in a run folder."""

    suffix: str
    what: str
    """in words"""

    def file(self, name: str, part: int | None = None) -> str:
        """``tokens.parquet``, or ``tokens-0007.parquet`` for part 7."""
        if part is None:
            return f"{name}{self.suffix}"
        return f"{name}-{part:04d}{self.suffix}"


TABLES = Kind(".parquet", "table")
ARRAYS = Kind(".safetensors", "file of arrays")


def checked_name(name: str, what: str) -> str:
    """``name`` if it can be a file name of a run folder, ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"The name of a {what} is made of lower-case letters, digits, '_' and '-', without the "
            f"number of a part: got {name!r}. It becomes a file name."
        )
    return name


def write_beside(target: Path, write: Callable[[Path], object]) -> None:
    """Write through a file beside ``target`` and rename it: ``target`` is either whole or
    unchanged.

    Any error of ``write`` passes through, and the file beside is removed. Several processes may
    write the same file, each beside the others.

    Args:
        target: the file.
        write: takes the path to write to.

    Raises:
        OSError: for a disk that refuses, a full one among others, with the name of the file.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        part.touch()
        mode = part.stat().st_mode
        with writing(target):
            write(part)
        # some writers (safetensors) make files that only their owner may read
        part.chmod(mode)
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
    for leftover in path.glob(f".*{PART_SUFFIX}"):
        if _BESIDE.fullmatch(leftover.name) and leftover.is_file():
            leftover.unlink()


def remove_leftovers(run: Path) -> None:
    """Remove half-written files in a run folder, including temporary folders of lm-eval and
    temporary files of safetensors.
    """
    for leftover in [*run.glob(f".*{PART_SUFFIX}"), *run.glob(".tmp??????")]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


class Arrays(NamedTuple):
    """Dense arrays or tensors that are written together.

    Floats are stored as ``dtype``, one for all or one per key; None, or a key that is not named,
    means float16, or float32 with a warning if float16 would overflow.
    """

    values: Mapping[str, Any]
    dims: Mapping[str, tuple[str, ...]] = {}
    """names of the axes of each"""
    dtype: str | Mapping[str, str] | None = None


class Contents(NamedTuple):
    """Tables and arrays of one sample, by name."""

    tables: Mapping[str, Any] = {}
    """columns, rows or data frames"""
    arrays: Mapping[str, Arrays] = {}


def dense(name: str, given: Arrays) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
    """Arrays as they are stored, and the names of their axes. Raises ValueError for missing or
    contradictory dims, arrays of text, and an explicit dtype that would turn a finite number into
    infinity.
    """
    dtypes: dict[str, Any] = dict.fromkeys(given.values, given.dtype)
    if isinstance(given.dtype, Mapping):
        dtypes = dict(given.dtype)
    known_fields(f"the file of arrays {name!r}", dtypes, given.values)
    arrays = {key: to_numpy(value, key) for key, value in given.values.items()}
    dims = checked_dims(arrays, given.dims)
    return {key: stored(array, key, dtypes.get(key)) for key, array in arrays.items()}, dims


def write_arrays(
    target: Path, arrays: Mapping[str, np.ndarray], dims: Mapping[str, tuple[str, ...]]
) -> None:
    """Write a safetensors file of `dense` arrays. Raises as `write_beside`."""
    from safetensors.numpy import save_file

    noted = {DIMS_KEY: json.dumps(dims)}
    write_beside(target, lambda beside: save_file(dict(arrays), beside, metadata=noted))


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_numpy(value: Any, key: str) -> np.ndarray:
    """``value`` (array, tensor on any device, number) as a C-contiguous numpy array of numbers or
    booleans.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16.
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"Arrays of a run folder hold numbers or booleans: {key!r} has dtype {array.dtype}. "
            "Put text into a table."
        )
    return np.require(array, requirements="C")


def stored(array: np.ndarray, key: str, dtype: str | None) -> np.ndarray:
    """``array`` as it is written: integers and booleans as they are, floats in ``dtype``.

    ``dtype`` None means float16, and float32 with a warning if float16 would turn a finite number
    into infinity.
    """
    one_of(f"dtype of {key!r}", dtype, (None, "float16", "float32", "float64"))
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype or "float16")
    if not np.any(np.isinf(narrow) & np.isfinite(array)):
        return narrow
    largest = float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))
    fact = (
        f"the largest magnitude in {key!r} is {largest:.6g}, which {dtype or 'float16'} cannot hold"
    )
    if dtype is not None:
        raise ValueError(
            f'Stored numbers must stay finite: {fact}. Use dtype="float64" or rescale it.'
        )
    warnings.warn(f"Stored as float32 instead of float16: {fact}.", UserWarning, stacklevel=3)
    return stored(array, key, "float32")


def checked_dims(
    arrays: Mapping[str, np.ndarray], dims: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Names of the axes of every array; ValueError when one is missing or a name stands for two
    lengths.
    """
    dims = dict(dims)
    if set(dims) != set(arrays):
        raise ValueError(
            f"Every array needs the names of its axes: arrays {sorted(arrays)}, dims "
            f"{sorted(dims)}. "
            'Pass dims={"received": ("step", "layer", "head", "key")}.'
        )
    lengths: dict[str, tuple[int, str]] = {}
    for key, array in arrays.items():
        axes = dims[key] = tuple(dims[key])
        if len(axes) != array.ndim or len(set(axes)) != len(axes):
            raise ValueError(
                f"One different name per axis: {key!r} has shape {array.shape} and dims {axes}."
            )
        for axis, length in zip(axes, array.shape, strict=True):
            before, owner = lengths.setdefault(axis, (length, key))
            if before != length:
                raise ValueError(
                    f"A dimension has one length in a file: {axis!r} is {before} in {owner!r} and "
                    f"{length} in {key!r}. Name the axes apart, pad with NaN, or write two files."
                )
    return dims


def weights_hash(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) of the names, dtypes, shapes and bytes of ``state_dict``; the order of the
    entries does not count.

    Raises ValueError when an entry is not a tensor.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"weights_hash needs a mapping of names to tensors: {name!r} is a "
                f"{type(tensor).__name__}. Pass model.state_dict()."
            )
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
