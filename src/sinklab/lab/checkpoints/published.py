"""Published checkpoints by name: their known facts, and the way from a name to a folder and a plan.

The weights' own config always has the last word; known facts fill in its gaps, and only if the
sizes of the vocabulary agree.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sinklab.core.compat import stated
from sinklab.core.errors import near
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.lab.checkpoints import adapters, families, gguf_files
from sinklab.lab.checkpoints.families import (
    PUBLISHED,
    CheckpointPlan,
    Published,
    known_families,
)
from sinklab.lab.checkpoints.tokens import special_ids
from sinklab.lab.files import ordinary_files, refused

PACKAGED = ("tiny", "tiny-sink", "tiny-causal")
DATA = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
"""Files of a repository that are read besides its weights."""
# with the modules of families come their rows
known_families()


def row_of(
    name: str, said: object, plan: CheckpointPlan
) -> tuple[Published | None, tuple[str, ...]]:
    """Known facts of a checkpoint, and notes on how it was found.

    Args:
        name: the name it was loaded by. A folder whose name is a checkpoint's (LLaDA-8B-Instruct)
            is taken for it if family and vocabulary are its too, and a note says so.
        said: the ``_name_or_path`` of its config.
        plan: of the checkpoint.
    """
    vocabulary, folder = plan.backbone.vocab_size, Path(name)
    for known_name, row in PUBLISHED.items():
        if known_name in (name, said) and row.vocabulary in (None, vocabulary):
            return row, ()
        is_called_so = folder.is_dir() and folder.name == known_name.rpartition("/")[2]
        if is_called_so and (row.family, row.vocabulary) == (plan.family.name, vocabulary):
            note = f"taken for {known_name}: matched by folder name, family and vocabulary"
            return row, (note,)
    return None, ()


def facts_of(
    name: str,
    raw: Mapping[str, Any],
    plan: CheckpointPlan,
    config: Any,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Published | None, dict[str, Any]]:
    """Known facts of a checkpoint by its name, and the fields that both `Loaded` and `ModelInfo`
    hold.
    """
    row, notes = row_of(name, raw.get("_name_or_path"), plan)
    family = "diffusion"
    if plan.whole is not None:
        config = plan.backbone
    elif not isinstance(config, DiffusionLMConfig):
        family = "autoregressive"
    # the number the authors state, and no more than the positions allow
    positions = stated(config, "max_position_embeddings")
    if isinstance(config, DiffusionLMConfig):
        positions = config.text_positions
    limits = [stated(config, "context"), positions]
    if row is not None:
        limits.append(row.context)
    special = special_ids(config, tokenizer, row, plan.family)
    notes = (*plan.notes, *notes)
    return row, {
        "family": family,
        "published_family": plan.family.name,
        "special": special,
        "context": min(limit for limit in limits if limit is not None),
        "notes": notes,
    }


def resolve(name: str, revision: str | None, weights: tuple[str, ...]) -> Path:
    """The folder of a model, fetched from the Hub if need be; or its GGUF file.

    Args:
        name: ``tiny``, ``tiny-sink`` or ``tiny-causal``, a folder, a name that `gguf_files.find`
            knows, or ``owner/name`` on the Hub.
        revision: commit, branch or tag on the Hub.
        weights: patterns of the weight files wanted; () fetches none.

    Raises:
        ValueError: if there is no such model, with the nearest known name.
    """
    file = gguf_files.find(name)
    if file is not None:
        return file
    if Path(name).is_dir():
        return ordinary_files(Path(name))
    if name in PACKAGED:
        return Path(str(resources.files("sinklab.lab.checkpoints").joinpath("packaged", name)))
    meant = ""
    if name not in PUBLISHED:
        meant = near(name, (*PACKAGED, *adapters.PACKAGED, *gguf_files.PACKAGES, *PUBLISHED))
    hint = meant or f"use {', '.join(map(repr, PACKAGED))}, a folder, a GGUF file, or a Hub name"
    # a mistyped name of a packaged model is not sent to the Hub
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) or (meant and "/" not in name):
        raise families.unloadable(name, f"it is no folder and no name on the Hub; {hint}")
    import huggingface_hub as hub

    # those of the HTTP library, whose name depends on the version of huggingface_hub
    with refused(f"no model can be loaded from {name!r}; {hint}"):
        folder = hub.snapshot_download(
            name, revision=revision, allow_patterns=[*DATA, *weights], ignore_patterns=["*/*"]
        )
    return Path(folder)


def read_plan(name: str, revision: str | None = None) -> tuple[CheckpointPlan, dict[str, Any]]:
    """Read the config of a model, without its weights: the plan, and the config itself.

    Args:
        name: as for :func:`resolve`, or a ``config.json`` itself.
        revision: commit, branch or tag on the Hub.
    """
    if name in adapters.PACKAGED:
        return _adapted_plan(name)
    path = Path(name)
    if path.is_file() and path.suffix != gguf_files.SUFFIX:
        config = families.read_config(path, name)
    else:
        config = config_of(resolve(name, revision, ()), name)
    return families.read(config, name), config


def config_of(place: Path, name: str) -> dict[str, Any]:
    """The config in the place that :func:`resolve` found. Raises ValueError if it is unreadable."""
    if place.suffix == gguf_files.SUFFIX:
        return gguf_files.read_config(place, name)
    return families.read_config(place / "config.json", name)


def _adapted_plan(name: str) -> tuple[CheckpointPlan, dict[str, Any]]:
    """The plan of packaged adapters, and the config of their base."""
    facts, _ = adapters.read_adapters(adapters.packaged_file(name))
    plan, config = read_plan(adapters.PACKAGED[name])
    plan.backbone.vocab_size = facts.base_rows
    if facts.mask_token_id is not None:
        plan.backbone.vocab_size = max(facts.base_rows, facts.mask_token_id + 1)
    return replace(plan, settings={"mask_token_id": facts.mask_token_id, **facts.settings}), config
