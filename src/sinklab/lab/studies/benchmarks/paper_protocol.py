"""Table 1 of the analysis paper (arXiv 2510.15731) as its authors made it: models, settings, cost,
expected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.studies.benchmarks.asked import TOKENS
from sinklab.lab.studies.benchmarks.study import EvalSettings, Plan
from sinklab.lab.studies.benchmarks.table1_report import VERDICT, published_numbers, table1_text
from sinklab.lab.studies.benchmarks.tables import KS, TABLE1, published_model

MODELS = {
    "Dream-7B": "Dream-org/Dream-v0-Instruct-7B",
    "LLaDA-8B": "GSAI-ML/LLaDA-8B-Instruct",
    "MMaDA-8B": "Gen-Verse/MMaDA-8B-MixCoT",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B-Instruct",
}
"""Models of the table -> names on the Hub. The paper says «instruct» and no more; for MMaDA the
tuned one is taken.
"""
QUESTIONS = {"gsm8k": 1319, "humaneval": 164}
"""Documents of each benchmark."""
SETTINGS = EvalSettings(tasks=tuple(QUESTIONS))
"""Settings of every cell: blocks of 32, one token a step, temperature 0; `TOKENS` new ones (section
4.3).
"""
PLAN = Plan(ks=KS)
WEIGHTS = ("*.safetensors", "*.bin", "*.pth")
NOT_RUN = (
    "not run by the authors of this package, who had no such weights: the rows are the paper's own"
)
"""A line that stands below the expected rows."""


def whose(models: Sequence[str]) -> dict[str, str]:
    """Names or folders of models -> the models of the table that they stand for.

    Raises:
        ValueError: for one that stands for none of them.
    """
    found = {name: published_model(name) for name in models}
    for name, meant in found.items():
        if meant is None:
            raise ValueError(
                f"the paper's table has {', '.join(MODELS)}, got {name}; give folders that are "
                "called so, or leave out --paper"
            )
    return {name: str(meant) for name, meant in found.items()}


def expected(models: Sequence[str], tasks: Sequence[str]) -> pd.DataFrame:
    """The published rows of these models of the table, as people read them.

    Args:
        models: as in `MODELS`.
        tasks: those of other tasks are left out; the paper has none.
    """
    rows: list[dict[str, Any]] = []
    for task in tasks:
        rows += [row for row in published_numbers(task) if row["model"] in models]
    if not rows:
        return pd.DataFrame()
    table = table1_text(pd.DataFrame(rows).fillna({"verdict": "–"}))
    return table.drop(columns=["source", VERDICT])


def cost(tasks: Sequence[str], ks: Sequence[int]) -> str:
    """Cost of the whole protocol for one model, in words: questions, steps, evaluations."""
    parts = []
    evaluations = 0
    for task in tasks:
        if task in TABLE1:
            parts.append(f"{QUESTIONS[task]:,} questions of {task} × {TOKENS[task]} steps")
            evaluations += QUESTIONS[task] * TOKENS[task] * len(ks)
    asked = " and ".join(parts)
    return (
        f"the paper's protocol: {asked}, each with {len(ks)} numbers of keys: {evaluations:,} "
        "steps a model"
    )


def deviations(settings: EvalSettings, plan: Plan) -> list[str]:
    """The settings that are not the paper's, as «name=value»; if the paper gives none, compared
    with this package's default.
    """
    usual = SETTINGS.kept()
    kept = settings.kept()
    # tasks, folders and permissions change no score of a task
    free = {"tasks", "data", "run_code", "chat"}
    found = [
        f"{name}={kept[name]}"
        for name in sorted(kept.keys() - free)
        if kept[name] != usual.get(name)
    ]
    for name in ("ks", "protocols", "controls", "sink_rule"):
        value = getattr(plan, name)
        if value != getattr(PLAN, name):
            found.append(f"{name}={value}")
    return found


def check_weights(models: Sequence[str]) -> None:
    """Refuse models without weights on this machine: nothing of this size is fetched unasked.

    Args:
        models: folders, or names on the Hub that were fetched before.

    Raises:
        ValueError: naming all that are missing.
    """
    missing = [name for name in models if not _has_weights(name)]
    if missing:
        raise ValueError(
            f"the weights of {', '.join(missing)} are not on this machine; fetch them (hf download "
            "NAME, 15 to 17 GB each), then give their names or folders with --model"
        )


def _has_weights(name: str) -> bool:
    folder = Path(name)
    if not folder.is_dir():
        import huggingface_hub as hub

        try:
            found = hub.try_to_load_from_cache(name, "config.json")
        except hub.errors.HFValidationError:
            return False
        if not isinstance(found, str):
            return False
        folder = Path(found).parent
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)
