"""What the two papers print (published.toml), for tables that set it beside what was measured here."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_PRINTED: dict[str, Any] = tomllib.loads((files(__package__) / "published.toml").read_text("utf-8"))

KS: tuple[int, ...] = tuple(_PRINTED["masked_sinks"]["ks"])
"""Numbers of masked sinks in the analysis paper's Table 1; 0 is its row «unmasked»."""
TABLE1: dict[str, dict[str, list[list[float]]]] = _PRINTED["masked_sinks"]["cells"]
"""Task -> model -> by number of masked sinks the share of right answers and what is printed behind ±."""
TABLE1_NOTES: list[str] = _PRINTED["masked_sinks"]["notes"]
TITLES: dict[str, str] = _PRINTED["masked_sinks"]["titles"]
_TASKS = {"humaneval_instruct": "humaneval", "gsm8k_cot": "gsm8k", "gsm8k_cot_zeroshot": "gsm8k"}


def published_table1(task: str) -> dict[str, list[list[float]]]:
    """The paper's cells of the benchmark that this task of lm-eval asks in some form; none for another one."""
    return TABLE1.get(_TASKS.get(task, task), {})


def published_model(name: str) -> str | None:
    """The model of the analysis paper's Table 1 that a name on the Hub or a folder stands for, or None."""
    names: dict[str, str] = _PRINTED["masked_sinks"]["names"]
    return next((model for pattern, model in names.items() if re.search(pattern, name.lower())), None)


@dataclass(frozen=True)
class PaperRow:
    """One row of a table of «One Token Is Enough»."""

    name: str
    """What the paper calls it."""
    variant: str
    """The variant of the model, in the words of `sinklab.reports.training.variant`."""
    scores: tuple[float, ...]
    """Percent right, in the order of the table's benchmarks."""


@dataclass(frozen=True)
class PaperTable:
    """One table of «One Token Is Enough» (arXiv 2601.19657)."""

    number: int
    title: str
    start: str
    """How the models began: "autoregressive" or "scratch"."""
    benchmarks: tuple[str, ...]
    blocks: dict[str, tuple[PaperRow, ...]]
    """Rows by size and number of training tokens."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> PaperTable:
        """From the file."""
        blocks = {
            block["models"]: tuple(PaperRow(name, variant, tuple(scores)) for name, variant, *scores in block["rows"])
            for block in given["blocks"]
        }
        return cls(**given | {"benchmarks": tuple(given["benchmarks"]), "blocks": blocks})

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        """(name, variant) of the rows, once each."""
        return tuple(dict.fromkeys((row.name, row.variant) for rows in self.blocks.values() for row in rows))


ONE_TOKEN_FACTS: dict[str, Any] = _PRINTED["one_token"]
"""notes, recipes, variants and columns."""
ONE_TOKEN = tuple(PaperTable.of(table) for table in ONE_TOKEN_FACTS["tables"])
"""Tables 1 to 5 of the sink-token paper."""
