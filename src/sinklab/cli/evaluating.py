"""`sinklab eval`: benchmarks through lm-eval, with or without interventions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from sinklab.cli.progress import working
from sinklab.cli.watching import loaded_here, run_settings
from sinklab.cli.writing import Reading
from sinklab.evaluation.benchmark_settings import EvalSettings
from sinklab.evaluation.processes import Processes, refuse_taken


@dataclass(frozen=True)
class Evaluation(EvalSettings):
    """The settings of a benchmark run as the command line takes them."""

    def __post_init__(self) -> None:
        """Nothing is checked while arguments are parsed: the run makes its own settings, and says what is wrong in one
        line.
        """

    def checked(self) -> EvalSettings:
        """The settings themselves. Raises ValueError for what makes no sense."""
        return run_settings(EvalSettings, self)


def evaluate_command(
    model: str = "tiny",
    out: Path = Path("runs/eval"),
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008 (a frozen record)
    settings: tyro.conf.OmitArgPrefixes[Evaluation] = Evaluation(),
) -> None:
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

    Args:
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        out: folder to write; it must be empty or absent, but for --resume.
        reading: how the weights are read.
        settings: what to score, and how.
    """
    # read when tqdm is imported: the bars of lm-eval and datasets would run through ours
    os.environ.setdefault("TQDM_DISABLE", "1")
    checked = settings.checked()
    first = Processes.here().is_first
    if not checked.resume and first:
        refuse_taken(out)
    from sinklab.evaluation import evaluate, score_lines
    from sinklab.evaluation.offline import needs_lm_eval

    needs_lm_eval()
    with working() as progress:
        folder = evaluate(checked, lambda: loaded_here(model, reading), out, progress=progress)
    if first:
        print("\n".join([*score_lines(folder), f"run folder: {folder}"]))


evaluate_command.__name__ = "eval"
