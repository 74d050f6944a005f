"""From a name to a folder: the packaged pair, a folder, or a repository on the Hub."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from sinklab.models import published

PACKAGED = ("tiny", "tiny-sink")
DATA = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")
"""Files of a repository that are read besides its weights."""


def find(name: str, revision: str | None, weights: tuple[str, ...]) -> Path:
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
        return Path(str(resources.files("sinklab.models").joinpath("packaged", name)))
    # without a slash it is no Hub name, and nobody else need hear of a slip of the pen
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        raise ValueError(f"no model can be loaded from {name!r}: it is no folder and no name on the Hub; {_hint(name)}")
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        snapshot_download,
        try_to_load_from_cache,
    )

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            # one question without retries: a download asks for half a minute, and says so, when nobody answers
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
        config = hf_hub_download(name, "config.json", revision=revision)
        if not weights:
            return Path(config).parent
        wanted = [*DATA, *weights]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as error:  # those of the HTTP library, whose name depends on the version of huggingface_hub
        raise ValueError(f"no model can be loaded from {name!r}: {_hint(name)} ({error})") from error


def _hint(name: str) -> str:
    near = published.nearest(name, PACKAGED)
    if near and near != name:
        return f"did you mean {near!r}?"
    return f"use {' or '.join(map(repr, PACKAGED))}, a folder, or a Hub name"
