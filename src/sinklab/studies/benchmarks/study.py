"""`sinklab eval` as a study: benchmarks through lm-eval. What a run does is one frozen dataclass."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import Checked, free_fields, limited
from sinklab.registry import studies
from sinklab.sampling.settings import DecodingSettings
from sinklab.scoring.settings import ESTIMATORS, NOISES
from sinklab.studies.base import Study, deferred

if TYPE_CHECKING:
    from sinklab.records.reading import Run


CONTROLS = ("sinks", "random", "recent", "lowest")
TWO_STAGE = "gsm8k_two_stage"
"""The sink-token paper's own protocol, no task of lm-eval."""


@dataclass(frozen=True)
class EvalSettings(DecodingSettings, Checked):
    """What is scored, under which interventions, and how texts are written and likelihoods estimated.

    Raises ValueError for numbers and names that make no sense with any model.
    """

    tasks: tuple[str, ...] = ("gsm8k",)
    """Benchmarks, separated by commas or spaces: gsm8k, humaneval, hellaswag, arc_easy, arc_challenge, piqa,
    social_iqa, race, lambada_openai, gsm8k_two_stage, or any task of lm-eval."""
    mask_sinks: int | None = limited(None, at_least=1)
    """Hide this many sinks per layer and head while the model writes and scores; none when left out."""
    control: str = limited("sinks", one_of=CONTROLS)
    """With mask_sinks, what is hidden: sinks, or as many random, recent or lowest columns that are none."""
    edits: tuple[str, ...] = ()
    """Further interventions, e.g. window_attention:radius=16, applied after mask_sinks."""
    limit: int | None = limited(None, at_least=1)
    """Score the first so many documents of each task; all when left out."""
    num_fewshot: int | None = limited(None, at_least=0)
    """Worked examples in front of each question; what the task says when left out."""
    data: str | None = None
    """Folder with the benchmarks' files; the Hub when left out."""
    new_tokens: int | None = limited(None, at_least=1)
    """Tokens to write per answer; what the task asks for, else 256, when left out."""
    block_length: int | None = 32
    """Semi-autoregressive blocks of this many tokens (as in arXiv 2510.15731); None writes everything as one block."""
    stop_at_eos: bool = True
    """End a row once end of text stands with nothing open to its left, where the model names an end of text: what is
    to its right never counts."""
    seed: int | None = 0
    """Seed of all noise; each request has its own, which follows from this one and what is asked."""
    estimator: str = limited("auto", one_of=ESTIMATORS)
    """Likelihood of a continuation under a diffusion model: monte_carlo, chain_rule, or auto (monte_carlo)."""
    noise: str = limited("llada", one_of=NOISES)
    """Noise of the Monte Carlo estimate: llada (number of masks) or smdm (time)."""
    mc_samples: int = limited(128, at_least=1)
    """Noisy copies per continuation (LLaDA 128, SMDM 1024)."""
    likelihood_cfg_scale: float = 0.0
    """Classifier-free guidance of likelihoods; 0 is off."""
    batch: int = limited(8, at_least=1, free=True)
    """Prompts that are written together, where their answers do not depend on it (gsm8k_two_stage as published: 64)."""
    likelihood_batch: int = limited(32, at_least=1, free=True)
    """Rows per forward where likelihoods are estimated."""
    chat: bool = False
    """Put each prompt, with its worked examples, into the model's chat format."""
    run_code: bool = False
    """Run the programs that the model writes (HumanEval), in a subprocess with limits. Never without this flag."""
    published: bool = False
    """With gsm8k_two_stage: as the authors' code does it (drawn at temperature 0.1, ranked over batches of 64)."""
    record_sinks: int | None = limited(16, at_least=0)
    """Watch the attention of the first so many documents of each task; None watches all, 0 none."""
    resume: bool = limited(False, free=True)
    """Go on with an interrupted run; answers that are there are not asked for again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Checked.__post_init__(self)
        names = tuple(dict.fromkeys(name for text in self.tasks for name in text.replace(",", " ").split()))
        object.__setattr__(self, "tasks", names)
        if not names:
            raise ValueError("an evaluation needs at least one task, got none; give --tasks gsm8k, for example")
        if self.published and TWO_STAGE not in names:
            raise ValueError(f"published is a choice for the task {TWO_STAGE}, got the tasks {', '.join(names)}")
        if self.control != "sinks" and self.mask_sinks is None:
            raise ValueError(
                f"control={self.control} says what is hidden in place of sinks, but mask_sinks is not given; give "
                "mask_sinks, how many columns"
            )

    def specs(self, *, by_last_row: bool = False) -> tuple[str, ...]:
        """The interventions as text, mask_sinks first.

        Args:
            by_last_row: an autoregressive model writes: sinks are chosen by the last token's row of the step before.
        """
        masking = f"mask_sinks:k={self.mask_sinks},control={self.control}"
        specs = self.edits if self.mask_sinks is None else (masking, *self.edits)
        own = ",selector=last_row" if by_last_row else ""
        return tuple(
            spec + own if spec.startswith("mask_sinks:") and "selector" not in spec else spec for spec in specs
        )

    def watches(self, document: int) -> bool:
        """Whether the attention of this document's runs is recorded: by its number, in whichever process it is."""
        return self.record_sinks is None or document < self.record_sinks

    def kept(self) -> dict[str, Any]:
        """What a run folder keeps, and a resumed run must repeat: everything that an answer may depend on."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free_fields(self)}


@dataclass(frozen=True)
class Plan(Checked):
    """Which cells Table 1 of the analysis paper has.

    Raises ValueError for numbers and controls that make no sense with any model.
    """

    ks: tuple[int, ...] = limited((0, 1, 5, 10), at_least=0)
    """Numbers of masked sinks; 0 is the unmasked run that the others are compared with, and always there."""
    controls: tuple[str, ...] = limited(("sinks",), one_of=CONTROLS, needed=True)
    """What is masked: sinks, and as many random, recent or lowest columns beside them."""
    chat: bool | None = None
    """Put questions into the model's chat format; None: where the model has one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ks", tuple(sorted({0, *self.ks})))
        object.__setattr__(self, "controls", tuple(dict.fromkeys(self.controls)))

    def cells(self, tasks: Sequence[str]) -> Iterator[tuple[str, int, str]]:
        """(task, k, control), the unmasked ones first."""
        for task in tasks:
            yield task, 0, "sinks"
            yield from ((task, k, control) for control in self.controls for k in self.ks if k)


@studies.register("eval")
class Evaluation(Study):
    """Score a model on benchmarks, with its sinks or without them.

    Prompts, metrics and filters are lm-eval's own. Diffusion models write by denoising and score continuations by a
    Monte Carlo bound; autoregressive ones write token after token and score exactly. --mask-sinks K hides the K keys
    that received most at the step before from every head while the model writes (where it scores: that receive most in
    a clean pass over the same text). The run folder holds the scores, every prompt and answer, and what the sinks did
    in the very runs that were scored; lm-eval's own result files lie beside them. Every answer is kept as it comes:
    --resume goes on after an interruption. Under `accelerate launch` the documents are dealt to the processes.

    Benchmarks are read from files below --data, or from the Hub when it is left out. HumanEval runs what the model
    wrote, in a process of its own with limits, and only with --run-code.

    Try
        sinklab eval --tasks gsm8k --data benchmarks --limit 8 --num-fewshot 0 --new-tokens 64
        sinklab eval --tasks piqa,arc_easy --data benchmarks --limit 20 --mc-samples 16 --out runs/choices
        sinklab eval --model tiny-sink --tasks gsm8k --data benchmarks --mask-sinks 5 --limit 8 --out runs/masked
        sinklab eval --tasks humaneval --data benchmarks --run-code --limit 4 --out runs/code
        sinklab eval --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --tasks gsm8k --chat --resume
        accelerate launch --num_processes 4 -m sinklab.cli eval --tasks hellaswag --device cuda --out runs/hellaswag
    """

    Settings = EvalSettings
    kind = "benchmark"
    permissions = ("run_code",)
    shards = True
    _evaluate = deferred("sinklab.studies.benchmarks.run:evaluate")
    _lines = deferred("sinklab.studies.benchmarks.tables:score_lines")

    def __call__(self, loaded: Any, out: str | Path, settings: Any = None, **how: Any) -> Path:
        """As `sinklab.studies.benchmarks.run.evaluate`, whose processes share a folder."""
        # read when tqdm is imported: the bars of lm-eval and datasets would run through ours
        os.environ.setdefault("TQDM_DISABLE", "1")
        settings, resume = settings or EvalSettings(), how.pop("resume", False)
        return self._evaluate(dataclasses.replace(settings, resume=settings.resume or resume), loaded, out, **how)

    def sentences(self, runs: list[Run]) -> list[str]:
        return [line for run in runs for line in self._lines(run)]
