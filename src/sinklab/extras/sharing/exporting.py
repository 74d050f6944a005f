"""A Hugging Face folder that needs no sinklab: weights, tokenizer, and the core's own sources,
imported as siblings.
"""

import ast
import json
import os
import shutil
from dataclasses import asdict
from importlib import import_module, resources
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import transformers
from jinja2 import Environment, StrictUndefined
from transformers import GenerationConfig, PreTrainedTokenizerBase

from sinklab import __version__
from sinklab.core.errors import one_of
from sinklab.core.models.config import BACKBONES
from sinklab.core.models.diffusion_lm import DiffusionLM
from sinklab.core.registry import caches, schedules, sinks, unmasking_rules
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.files import writing

ENTRY = "sinklab.core.models.diffusion_lm"
"""The module that holds the model."""
MODELLING = "modeling_sinklab"
"""Name of its file in an exported folder."""
CLASSES = {
    "AutoConfig": f"{MODELLING}.DiffusionLMConfig",
    "AutoModel": f"{MODELLING}.DiffusionLM",
    "AutoModelForMaskedLM": f"{MODELLING}.DiffusionLM",
}
STRANGERS = ("_name_or_path", "auto_map", "custom_generate", "custom_pipelines")
"""Entries of a config that name places and code which are not in the folder."""
_KEPT = """
tokenizer_class backend model_max_length padding_side truncation_side model_input_names bos_token
eos_token unk_token sep_token pad_token cls_token mask_token additional_special_tokens
extra_special_tokens model_specific_special_tokens added_tokens_decoder add_bos_token add_eos_token
add_prefix_space clean_up_tokenization_spaces split_special_tokens spaces_between_special_tokens
legacy do_lower_case errors row_start
"""
KEPT = frozenset(_KEPT.split())
"""Settings of a tokenizer that an exported folder has. A chat format is a file of its own."""
HEAD = """# {} of sinklab {}, by `sinklab export`: its imports are siblings, all else is as it was.
# Copyright of the sinklab contributors. SPDX-License-Identifier: MIT
"""
MARKER = ".sinklab-export"
"""File in a folder that an export has begun, which may be removed therefore."""
DROPPED = ("if __name__ ==", "import sinklab", "AutoConfig.register", "AutoModel")
"""Beginnings of statements that are left out: classes of sinklab's own may be registered in the
same process.
"""
TAIL = """

# all files of this folder: transformers copies those that it finds in this form (which
# "from.errors" is not), here at once; what has a name registers it
{}

# one file for both, also where transformers saves the model again
DiffusionLMConfig.__module__ = __name__
"""


def export(loaded: Loaded, folder: str | Path) -> Path:
    """Write a model so that plain transformers loads it, with ``trust_remote_code=True`` and
    without sinklab.

    The folder has the weights (safetensors), config and tokenizer, a card, and the modules of
    sinklab's core that the model and its ``generate`` need. `sinklab.load` reads it, and runs none
    of them.

    Args:
        loaded: a diffusion model, with or without sink and gate, such as `sinklab.load` returns.
        folder: to write; absent or empty.

    Returns:
        the folder.

    Raises:
        ValueError: for a folder that is taken; a model that is no `DiffusionLM`, has a decoder that
            transformers lacks, or weights stored by a quantiser; a tokenizer
            that only code can read.
    """
    folder = Path(folder)
    model = loaded.model
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"an exported model has a folder of its own, but {folder} is taken; choose another one"
        )
    if type(model) is not DiffusionLM:
        raise ValueError(
            f"export is for models that sinklab runs itself, but {loaded.name} is a "
            f"{type(model).__name__}: transformers loads it as it is"
        )
    if loaded.stored:
        raise ValueError(
            f"the weights of {loaded.name} are stored in {loaded.stored}; load it with dtype='auto'"
        )
    one_of(
        f"to be exported, the decoder of {loaded.name}", model.config.backbone.model_type, BACKBONES
    )
    beside = _begun_beside(folder)
    try:
        with writing(folder):
            _write(loaded, model, beside)
        if folder.exists():
            folder.rmdir()
        os.replace(beside, folder)
        (folder / MARKER).unlink()
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _begun_beside(folder: Path) -> Path:
    """A new folder beside ``folder``, marked as that of an export; the remains of an earlier one
    there are removed.

    Raises ValueError for anything else that is in its place.
    """
    beside = folder.with_name(f".{folder.name}.partial")
    if (beside / MARKER).is_file() and not beside.is_symlink():
        shutil.rmtree(beside)
    try:
        beside.mkdir(parents=True)
    except FileExistsError as error:
        raise ValueError(
            f"an export is written in {beside} first, but something else is there; move it away, "
            "or choose another name"
        ) from error
    (beside / MARKER).touch()
    return beside


def _write(loaded: Loaded, model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    if loaded.tokenizer is not None:
        _write_tokenizer(loaded.tokenizer, folder)
    file = folder / "config.json"
    config = _without_strangers(json.loads(file.read_text("utf-8")))
    _write_json(file, config | {"auto_map": CLASSES})
    GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    ).save_pretrained(folder)
    for module, text in sources(model.config.sink).items():
        (folder / f"{_file_of(module)}.py").write_text(text, "utf-8")
    (folder / "README.md").write_text(_card(loaded, model.config), "utf-8")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer that transformers reads without any code: its files, and of its settings
    the `KEPT` ones.

    Raises ValueError for a class that only code has and that is not a tokenizer.json.
    """
    own = type(tokenizer).__name__
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = {
        name: one for name, one in json.loads(file.read_text("utf-8")).items() if name in KEPT
    }
    if getattr(transformers, own, None) is not type(tokenizer):
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                "an exported tokenizer is one of transformers' own or a tokenizer.json, but this "
                f"is a {own} of {type(tokenizer).__module__}; export the model without it, or with "
                "a tokenizer that transformers has"
            )
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(file, settings)


def _without_strangers(config: Any) -> Any:
    """A config without the places that it was read from, and without names of code."""
    if isinstance(config, dict):
        return {key: _without_strangers(one) for key, one in config.items() if key not in STRANGERS}
    if isinstance(config, list):
        return [_without_strangers(one) for one in config]
    return config


def card(template: str, **about: Any) -> str:
    """A Markdown card of this folder, filled in."""
    words = resources.files("sinklab.extras.sharing").joinpath(template).read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(words).render(version=__version__, **about)


def _card(loaded: Loaded, config: Any) -> str:
    name = loaded.name
    if Path(name).is_absolute() or name.startswith(".") or Path(name).exists():
        name = Path(name).name
    return card(
        "export.jinja",
        transformers=transformers.__version__,
        special=asdict(loaded.special),
        loaded=loaded,
        config=config,
        name=name,
    )


def sources(sink: Any = None) -> dict[str, str]:
    """Module -> its text as a sibling of the others: the model, its imports, and all modules named
    in options.

    Args:
        sink: the added sink of the model; its kind may be a plug-in's.
    """
    known = chain.from_iterable(
        registry.values() for registry in (sinks, unmasking_rules, schedules, caches)
    )
    kinds = [kind for kind in known if kind.__module__.startswith("sinklab.") or kind is type(sink)]
    todo = [ENTRY, *(kind.__module__ for kind in kinds)]
    found = dict[str, str]()
    while todo:
        module = todo.pop()
        if module not in found:
            found[module], needed = _as_sibling(module)
            todo += needed
    others = sorted(_file_of(module) for module in found if module != ENTRY)
    found[ENTRY] += TAIL.format("\n".join(f"from .{file} import __name__ as _" for file in others))
    return dict(sorted(found.items()))


def _file_of(module: str) -> str:
    """Name of a module's file, without its suffix: there are no folders, which transformers does
    not follow.
    """
    if module == ENTRY:
        return MODELLING
    return module.removeprefix("sinklab.").replace(".", "_")


def _as_sibling(module: str) -> tuple[str, tuple[str, ...]]:
    """The text of a module with imports of its siblings, and which modules these are.

    Raises ValueError for a plug-in that uses the package as a whole, which has no sibling.
    """
    spec: Any = find_spec(module)
    text = Path(spec.origin).read_text("utf-8")
    lines = text.splitlines()
    tree = ast.parse(text).body
    needed = list[str]()
    # statements that run only as a program are no part of a model
    dropped: list[Any] = [node for node in tree if lines[node.lineno - 1].startswith(DROPPED)]
    nodes: list[Any] = [node for top in tree if top not in dropped for node in ast.walk(top)]
    if any(isinstance(node, ast.Name) and node.id == "sinklab" for node in nodes):
        raise ValueError(
            f"{module} uses sinklab as a whole; to export it, let it import from sinklab what it "
            "needs"
        )
    changed: dict[int, tuple[int, list[str]]] = {
        node.lineno: (node.end_lineno, []) for node in dropped
    }
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sinklab":
            homes = [(*_home(str(node.module), alias.name), alias) for alias in node.names]
            needed += [home for home, *_ in homes]
            new = [" " * node.col_offset + _imported(*home) for home in homes]
            changed[node.lineno] = (node.end_lineno or node.lineno, new)
    # from the last one, so that numbers of lines stay true
    for first, (last, new) in sorted(changed.items(), reverse=True):
        lines[first - 1 : last] = new
    return HEAD.format(module, __version__) + "\n".join(lines).rstrip() + "\n", tuple(needed)


def _home(package: str, name: str) -> tuple[str, bool]:
    """The module that a name is imported from, or that it names, which is said."""
    holder = import_module(package)
    if not hasattr(holder, "__path__"):
        return package, False
    if find_spec(f"{package}.{name}"):
        return f"{package}.{name}", True
    return getattr(holder, name).__module__, False


def _imported(home: str, is_module: bool, alias: ast.alias) -> str:
    file = _file_of(home)
    if not is_module and alias.asname:
        return f"from.{file} import {alias.name} as {alias.asname}"
    if not is_module:
        return f"from.{file} import {alias.name}"
    return f"from . import {file} as {alias.asname or alias.name}"
