"""`sinklab eval` as a study: benchmarks through lm-eval."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.registry import studies
from sinklab.studies.base import Study
from sinklab.studies.benchmarks.settings import EvalSettings

if TYPE_CHECKING:
    from sinklab.records.reading import Run


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

    def __call__(self, loaded: Any, out: str | Path, settings: Any = None, **how: Any) -> Path:
        """As `sinklab.studies.benchmarks.run.evaluate`, whose processes share a folder."""
        # read when tqdm is imported: the bars of lm-eval and datasets would run through ours
        os.environ.setdefault("TQDM_DISABLE", "1")
        from sinklab.studies.benchmarks.run import evaluate

        settings, resume = settings or EvalSettings(), how.pop("resume", False)
        return evaluate(dataclasses.replace(settings, resume=settings.resume or resume), loaded, out, **how)

    def sentences(self, runs: list[Run]) -> list[str]:
        from sinklab.studies.benchmarks.tables import score_lines

        return [line for run in runs for line in score_lines(run)]
