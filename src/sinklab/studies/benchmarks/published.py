"""What the two papers print, for tables that set it beside what was measured here."""

from __future__ import annotations

import re
from dataclasses import dataclass

KS = (0, 1, 5, 10)
"""Numbers of masked sinks in the analysis paper's Table 1; 0 is its row «unmasked»."""

# arXiv 2510.15731v2, Table 1: share of right answers and what is printed behind ±, by number of masked sinks.
TABLE1: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "gsm8k": {
        "Dream-7B": ((0.82, 0.01), (0.79, 0.01), (0.78, 0.01), (0.75, 0.01)),
        "LLaDA-8B": ((0.76, 0.01), (0.75, 0.01), (0.73, 0.01), (0.55, 0.01)),
        "MMaDA-8B": ((0.54, 0.01), (0.53, 0.01), (0.54, 0.01), (0.37, 0.01)),
        "Llama-3.1-8B": ((0.85, 0.01), (0.02, 0.00), (0.02, 0.00), (0.01, 0.03)),
    },
    "humaneval": {
        "Dream-7B": ((0.60, 0.03), (0.64, 0.03), (0.61, 0.03), (0.57, 0.03)),
        "LLaDA-8B": ((0.37, 0.03), (0.37, 0.03), (0.39, 0.03), (0.35, 0.03)),
        "MMaDA-8B": ((0.16, 0.02), (0.16, 0.03), (0.18, 0.03), (0.09, 0.02)),
        "Llama-3.1-8B": ((0.66, 0.04), (0.00, 0.00), (0.00, 0.00), (0.00, 0.00)),
    },
}
TABLE1_NOTE = (
    "Published: arXiv 2510.15731v2, Table 1. Llama-3.1-8B on GSM8K with 10 masked sinks is printed as 0.01 ± 0.03; the "
    "binomial standard error of 0.01 at 1,319 questions is 0.003, so the 0.03 is presumably a misprint."
)

_TASKS = {"humaneval_instruct": "humaneval", "gsm8k_cot": "gsm8k", "gsm8k_cot_zeroshot": "gsm8k"}


def published_table1(task: str) -> dict[str, tuple[tuple[float, float], ...]]:
    """The paper's cells of the benchmark that this task of lm-eval asks in some form; none for another one."""
    return TABLE1.get(_TASKS.get(task, task), {})


# Which of the paper's models a name on the Hub or a folder stands for; the first pattern that is found counts.
_MODELS = (
    (r"mmada", "MMaDA-8B"),
    (r"llada(?!.*(1[._]5|2[._]|v\b|moe))", "LLaDA-8B"),
    (r"dream(?!.*coder)", "Dream-7B"),
    (r"llama-?3\.1-8b", "Llama-3.1-8B"),
)


def published_model(name: str) -> str | None:
    """The model of the analysis paper's Table 1 that this name stands for, or None."""
    return next((model for pattern, model in _MODELS if re.search(pattern, name.lower())), None)


@dataclass(frozen=True)
class PaperRow:
    """One row of a table of «One Token Is Enough»."""

    name: str
    """What the paper calls it."""
    variant: str
    """The variant of the model, in the words of `variant`."""
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

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        """(name, variant) of the rows, once each."""
        return tuple(dict.fromkeys((row.name, row.variant) for rows in self.blocks.values() for row in rows))


ALL = ("ARC-e", "ARC-c", "HellaSwag", "PIQA", "RACE", "SIQA", "LAMBADA", "GSM8K")
FIVE = ("ARC-e", "ARC-c", "RACE", "HellaSwag", "PIQA")
PLAIN, SINK, GATE = "DLM", "DLM + extra token", "DLM + GA"

ONE_TOKEN = (
    PaperTable(
        1,
        "Diffusion models made of autoregressive ones",
        "autoregressive",
        ALL,
        {
            "Qwen2.5-0.5B, 30B tokens": (
                PaperRow(PLAIN, "plain", (44.70, 27.13, 35.21, 55.28, 31.29, 40.28, 44.09, 46.92)),
                PaperRow(SINK, "sink", (55.47, 32.17, 48.91, 63.44, 33.79, 37.82, 45.24, 49.20)),
                PaperRow(GATE, "gate", (47.85, 29.27, 41.95, 61.92, 34.07, 36.08, 45.10, 47.01)),
            ),
            "Qwen2.5-1.5B, 100B tokens": (
                PaperRow(PLAIN, "plain", (65.49, 41.47, 59.50, 66.49, 37.80, 36.18, 66.58, 57.77)),
                PaperRow(SINK, "sink", (68.18, 43.43, 61.31, 68.17, 37.61, 39.97, 66.41, 58.45)),
                PaperRow(GATE, "gate", (53.03, 32.27, 52.90, 60.33, 37.42, 38.26, 51.10, 52.35)),
            ),
        },
    ),
    PaperTable(
        2,
        "Diffusion models from scratch",
        "scratch",
        ALL,
        {
            "0.5B, 100B tokens": (
                PaperRow(PLAIN, "plain", (32.20, 25.09, 31.56, 54.08, 31.77, 35.98, 29.26, 34.95)),
                PaperRow(SINK, "sink", (40.91, 22.35, 40.43, 62.24, 32.73, 37.92, 47.16, 35.17)),
                PaperRow(GATE, "gate", (36.28, 23.46, 37.61, 57.07, 33.68, 34.44, 42.27, 36.39)),
            )
        },
    ),
    PaperTable(
        3,
        "Where the sink token stands",
        "autoregressive",
        FIVE,
        {
            "Qwen2.5-0.5B, 30B tokens": (
                PaperRow("Front", "sink", (55.47, 32.17, 33.79, 48.91, 63.44)),
                PaperRow("End", "sink at the end", (56.14, 32.51, 31.77, 48.16, 64.31)),
            )
        },
    ),
    PaperTable(
        4,
        "How many sink tokens",
        "autoregressive",
        FIVE,
        {
            "Qwen2.5-0.5B, 30B tokens": (
                PaperRow("0", "plain", (44.70, 27.13, 31.29, 35.21, 55.28)),
                PaperRow("1", "sink", (55.47, 32.17, 33.79, 48.91, 63.44)),
                PaperRow("2", "2 sinks", (54.76, 32.42, 32.89, 48.94, 63.66)),
                PaperRow("4", "4 sinks", (55.39, 31.47, 33.06, 48.45, 62.62)),
            )
        },
    ),
    PaperTable(
        5,
        "A sink token whose values are zero",
        "autoregressive",
        FIVE,
        {
            "Qwen2.5-0.5B, 30B tokens": (
                PaperRow("Stable sink token", "sink", (55.47, 32.17, 33.79, 48.91, 63.44)),
                PaperRow("Zero-value token", "zero-value sink", (55.68, 32.94, 32.87, 48.81, 64.09)),
            )
        },
    ),
)
"""Tables 1 to 5 of the sink-token paper."""
