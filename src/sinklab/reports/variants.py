"""Which training runs are the same experiment, and what the variant of a model is called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sinklab.records import Run

# Settings that may differ between repeats: the seed, and how a run runs and what it tells.
FREE = frozenset({
    "seed", "out", "resume", "threads", "compile", "gradient_checkpointing", "head_chunk", "liger", "micro_batch",
    "workers", "log_every", "eval_every", "save_every", "keep", "spike", "log_to", "monitor_every", "monitor_rows",
})  # fmt: skip
KINDS = {"zero": "zero-value ", "kv": "key/value "}


def variant(model: Mapping[str, Any]) -> str:
    """The variant of a model in words: plain, sink, 2 sinks, zero-value sink, sink at the end, gate, sink and gate."""
    count = int(model.get("sink_count") or 0)
    words = []
    if count:
        kind = KINDS.get(str(model.get("sink_kind")), "")
        place = " at the end" if model.get("sink_side") == "end" else ""
        words.append(f"{count} {kind}sinks{place}" if count > 1 else f"{kind}sink{place}")
    if model.get("gate", "none") != "none":
        words.append("gate")
    return " and ".join(words) or "plain"


def repeats(runs: list[Run], names: list[str]) -> list[str]:
    """For each run what it has in common with its repeats, which differ in their seed alone.

    That is the variant, where it says which runs are repeats, and else the name of each run.
    """
    settings = [{key: value for key, value in run.info.settings.items() if key not in FREE} for run in runs]
    keys = [json.dumps(each, sort_keys=True) for each in settings]
    words = [variant(run.info.model) for run in runs]
    of_word = {word: {key for key, other in zip(keys, words, strict=True) if other == word} for word in words}
    return words if len(set(keys)) < len(keys) and all(len(same) == 1 for same in of_word.values()) else names
