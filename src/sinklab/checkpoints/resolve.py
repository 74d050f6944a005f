"""From the name of a model to its folder and its plan: a folder, the packaged pair, or a repository of the Hub."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

from sinklab.checkpoints import families
from sinklab.checkpoints.families import CheckpointPlan
from sinklab.checkpoints.published import known
from sinklab.errors import near

PACKAGED = ("tiny", "tiny-sink")
DATA = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")
"""Files of a repository that are read besides its weights."""


def resolve(name: str, revision: str | None, weights: tuple[str, ...]) -> Path:
    """The folder of a model, fetched from the Hub if need be.

    Args:
        name: ``tiny`` or ``tiny-sink``, a folder, or ``owner/name`` on the Hub.
        revision: commit, branch or tag on the Hub.
        weights: patterns of the weight files wanted; () fetches the config alone.

    Raises:
        ValueError: if there is no such model, with the nearest known name.
    """
    if Path(name).is_dir():
        return Path(name)
    if name in PACKAGED:
        return Path(str(resources.files("sinklab.checkpoints").joinpath("packaged", name)))
    hint = "" if name in known() else near(name, (*PACKAGED, *known()))
    hint = hint or f"use {' or '.join(map(repr, PACKAGED))}, a folder, or a Hub name"
    # without a slash it is no Hub name, and a mistyped one is not sent to the Hub
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        raise ValueError(f"no model can be loaded from {name!r}: it is no folder and no name on the Hub; {hint}")
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        snapshot_download,
        try_to_load_from_cache,
    )

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            # one question without retries: without a network a download asks, and prints, for half a minute
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
        config = hf_hub_download(name, "config.json", revision=revision)
        if not weights:
            return Path(config).parent
        wanted = [*DATA, *weights]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as error:  # those of the HTTP library, whose name depends on the version of huggingface_hub
        raise ValueError(f"no model can be loaded from {name!r}: {hint} ({error})") from error


def read_plan(name: str, revision: str | None = None) -> tuple[CheckpointPlan, dict[str, Any], Path]:
    """What the config of a model says, without its weights: the plan, the config itself, and the file it is in.

    Args:
        name: as for :func:`resolve`, or a ``config.json`` itself.
        revision: commit, branch or tag on the Hub.
    """
    file = Path(name) if Path(name).is_file() else resolve(name, revision, ()) / "config.json"
    config = families.read_config(file, name)
    return families.read(config, name), config, file
