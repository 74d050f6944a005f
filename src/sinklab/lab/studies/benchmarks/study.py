"""`sinklab eval` as a study: benchmarks through lm-eval, with all choices in a frozen dataclass."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import interventions, registered, rules
from sinklab.core.subject import DecodingSettings
from sinklab.lab.measures.names import ARMS, PROTOCOLS
from sinklab.lab.registry import studies
from sinklab.lab.scoring.settings import ESTIMATORS, NOISES
from sinklab.lab.studies import Study, Work, ascending

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded
    from sinklab.lab.records import Contents, Run

MASKING = {
    "mask_sinks": None,
    "control": "sinks",
    "protocol": "paper",
    "sink_rule": None,
}
"""The settings of masking, and their defaults."""
TWO_STAGE = "gsm8k_two_stage"
"""The sink-token paper's own protocol."""
TOKENS = {"gsm8k": 256, "humaneval": 512, "humaneval_instruct": 512}
"""Tokens to write per answer, as in the paper (section 4.3); other tasks say it themselves."""
FEWSHOT_SEED = 1234
"""lm-eval's own, so that the worked examples in a prompt are the ones that others meet."""
NO_ANSWER = "[invalid]"
"""Result of filters, those of lm-eval too, if an answer lacks their pattern."""


@dataclass(frozen=True)
class EvalSettings(DecodingSettings):
    """Tasks of an evaluation, the interventions, and how texts are written and likelihoods
    estimated.

    Raises ValueError for numbers and names that make no sense with any model.
    """

    tasks: tuple[str, ...] = ("gsm8k",)
    """Benchmarks, separated by commas or spaces: gsm8k, humaneval, hellaswag, arc_easy,
    arc_challenge, piqa, social_iqa, race, lambada_openai, lambada_standard, humaneval_instruct,
    gsm8k_two_stage.
    """
    mask_sinks: int | None = limited(None, at_least=1)
    """Block this many of the most attended keys per layer and head while the model writes and
    scores, sinks or not (with protocol rule, at most so many, and sinks alone); none when left out.
    """
    control: str = limited("sinks", one_of=ARMS)
    """With mask_sinks, the keys to block: sinks (the keys that the protocol names); as many random
    keys that are not among them (all of those in a text that has fewer); equal_mass, keys that are
    no sinks and together receive as much; or matched, the protocol's keys in those heads alone that
    have such a control.
    """
    protocol: str = limited("paper", one_of=PROTOCOLS)
    """With mask_sinks, which keys and when: paper, those most attended at the step before (closed
    loop: a given key is blocked at every other step); held, the keys chosen first stay blocked;
    rule, those of them that the sink rule names; clean, chosen at the same step by a pass with
    nothing blocked. Likelihoods have no step before: there it is always a clean pass."""
    sink_rule: Any = registered(rules, None)
    """Rule for sinks, e.g. excess:epsilon=3 (the default) or gu: protocol rule blocks nothing else,
    with the others the dose says how many of the blocked keys were sinks.
    """
    edits: tuple[str, ...] = ()
    """Further interventions, e.g. window_attention:radius=16, applied after mask_sinks."""
    limit: int | None = limited(None, at_least=1)
    """Score the first so many documents of each task; all when left out."""
    num_fewshot: int | None = limited(None, at_least=0)
    """Worked examples in front of each question; the task's own number when left out."""
    data: str | None = None
    """Folder with the benchmarks' files; the Hub when left out."""
    new_tokens: int | None = limited(None, at_least=1)
    """Tokens to write per answer; the task's own number, else 256, when left out."""
    block_length: int | None = 32
    """Semi-autoregressive blocks of this many tokens (as in arXiv 2510.15731); None writes
    everything as one block.
    """
    stop_at_eos: bool = True
    """End a row once end of text stands with nothing open to its left, if the model names an end of
    text: tokens to its right never count.
    """
    seed: int | None = 0
    """Seed of all noise; each request has its own, which follows from this one and the request."""
    estimator: str = limited("auto", one_of=ESTIMATORS)
    """Likelihood of a continuation under a diffusion model: monte_carlo, chain_rule, or auto
    (monte_carlo).
    """
    noise: str = limited("llada", one_of=NOISES)
    """Noise of the Monte Carlo estimate: llada (number of masks) or smdm (time)."""
    mc_samples: int = limited(128, at_least=1)
    """Noisy copies per continuation (LLaDA 128, SMDM 1024)."""
    likelihood_cfg_scale: float = 0.0
    """Classifier-free guidance of likelihoods; 0 is off."""
    batch: int = limited(8, at_least=1, free=True)
    """Prompts that are written together, at most 32, if their answers do not depend on it
    (gsm8k_two_stage: 64).
    """
    likelihood_batch: int = limited(32, at_least=1, free=True)
    """Rows per forward of a likelihood estimate."""
    chat: bool = False
    """Put each prompt, with its worked examples, into the model's chat format."""
    run_code: bool = False
    """Run the programs that the model writes (HumanEval), inside bubblewrap with limits; where that
    cannot be had they are kept.
    """
    record_sinks: int | None = limited(16, at_least=0)
    """Watch the attention of the first so many documents of each task; None watches all, 0 none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(
            dict.fromkeys(name for text in self.tasks for name in text.replace(",", " ").split())
        )
        object.__setattr__(self, "tasks", names)
        if not names:
            raise ValueError(
                "an evaluation needs at least one task, got none; give --tasks gsm8k, for example"
            )
        values = vars(self)
        said = [name for name, default in MASKING.items() if values[name] != default]
        if said and self.mask_sinks is None:
            raise ValueError(
                f"{said[0]}={values[said[0]]} says which keys are blocked and how, but "
                "mask_sinks is not given; give mask_sinks, how many keys"
            )

    def interventions(self) -> tuple[Any, ...]:
        """The edits, that of mask_sinks first."""
        edits = tuple(map(interventions.parse, self.edits))
        if self.mask_sinks is not None:
            from sinklab.lab.measures.protocols import by_protocol

            k, rule = self.mask_sinks, self.sink_rule
            # questions may be shorter than twice k
            edit = by_protocol(self.protocol, k, rule, control=self.control, fewer=True)
            edits = (edit, *edits)
        return edits

    def watches(self, document: int) -> bool:
        """Whether the attention of this document's runs is recorded: by its number, in whichever
        process it is.
        """
        return self.record_sinks is None or document < self.record_sinks


def with_matched(controls: Iterable[str]) -> tuple[str, ...]:
    """Choices of keys to block, once each: keys of equal mass are compared in the heads that have
    them, "matched".
    """
    found = []
    for name in controls:
        if name == "equal_mass":
            found.append("matched")
        found.append(name)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Plan(Checked):
    """Cells of Table 1 of the analysis paper.

    Raises ValueError for numbers and controls that make no sense with any model.
    """

    ks: tuple[int, ...] = limited(
        (0, 1, 5, 10), at_least=0, read=lambda name, given: ascending(name, [0, *given])
    )
    """Numbers of blocked keys; 0 is the run without that the others are compared with, and always
    there.
    """
    protocols: tuple[str, ...] = limited(("paper",), one_of=PROTOCOLS, needed=True)
    """How they are blocked, side by side as columns: paper (the most attended keys of the step
    before, closed loop), held (those chosen first stay blocked), rule (sinks by the rule, which
    stay blocked), clean (chosen by a clean pass of the same step). Tasks that ask for likelihoods
    know the clean pass alone.
    """
    controls: tuple[str, ...] = limited(
        ("sinks",), one_of=ARMS, needed=True, read=lambda name, given: with_matched(given)
    )
    """Keys to mask: sinks (the keys that the protocol names); as many random keys; equal_mass, keys
    that are no sinks and receive as much together, beside matched, the protocol's keys in the same
    heads.
    """
    sink_rule: Any = registered(rules, None)
    """Rule for sinks, e.g. excess:epsilon=3, the default."""


@studies.register("eval")
class Evaluation(Study):
    """Benchmarks, with the most attended keys or without them.

    Prompts, metrics and filters are lm-eval's own. Diffusion models write by denoising and score
    continuations by a Monte Carlo bound; autoregressive ones write token after token and score
    exactly. --mask-sinks K blocks the K keys that received most at the step before from every head
    while the model writes (for likelihoods: that receive most in a clean pass over the same text),
    sinks or not; --protocol names other ways. Beside each masked score stands its dose: keys
    blocked, how many of them a rule calls sinks, the attention they held, and the share really
    removed. The run folder holds the scores, every prompt and answer, and the facts of the sinks in
    the very runs that were scored. Answers are kept in parts of 32 documents: the same
    command goes on after an interruption.

    Benchmarks are read from files below --data, or from the Hub when it is left out. `python -m
    sinklab.lm_eval run --model sinklab …` is lm-eval's own command line, also for task files of
    your own (--include_path). HumanEval runs the model's programs, inside bubblewrap and only with
    --run-code; where bubblewrap cannot be had they are kept in the run folder, and `sinklab
    score RUN` runs them elsewhere.

    Try
        sinklab eval --tasks gsm8k --data benchmarks --limit 8 --num-fewshot 0 --new-tokens 64
        sinklab eval --tasks piqa,arc_easy --data benchmarks --limit 20 --mc-samples 16 --out \\
            runs/choices
        sinklab eval --model tiny-sink --tasks gsm8k --data benchmarks --mask-sinks 5 --limit 8 \\
            --out runs/masked
        sinklab eval --tasks gsm8k --data benchmarks --mask-sinks 5 --protocol rule --limit 8 \\
            --out runs/by-rule
        sinklab eval --tasks humaneval --data benchmarks --run-code --limit 4 --out runs/code
        sinklab eval --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --tasks \\
            gsm8k --chat
        sinklab eval --tasks hellaswag --device cuda --shard 0/4 --out runs/hellaswag
    """

    Settings = EvalSettings
    group = "evaluate"
    kind = "benchmark"
    shards = True

    def __init__(self, tasks: Sequence[Any] | None = None) -> None:
        """
        Args:
            tasks: of lm-eval, or dicts of their configuration, to score in place of
                ``settings.tasks``.
        """
        self.given = tasks
        self.tasks: dict[str, Any] = {}
        """Tasks of the run, as lm-eval's `evaluate` takes them, once they are read."""

    def __call__(self, loaded: Any, out: str | Path, settings: Any = None, **how: Any) -> Path:
        """Write a run folder. The tasks are read before the model."""
        settings = settings or EvalSettings()
        self.read(settings)
        if self.given is not None:
            settings = replace(settings, tasks=tuple(self.tasks["tasks"]))
        return super().__call__(loaded, out, settings, **how)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        # a worker reads the tasks by itself
        return type(self), (self.given,)

    def read(self, settings: EvalSettings) -> None:
        """Read the tasks."""
        # read when tqdm is imported: the bars of lm-eval and datasets would run through ours
        os.environ.setdefault("TQDM_DISABLE", "1")
        # a pool of processes for resamples would copy the model's memory
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        from sinklab.lab.studies.benchmarks.run import read_tasks

        self.tasks = read_tasks(settings, self.given)

    def prepare(self, loaded: Loaded, settings: EvalSettings) -> Any:
        """The model as lm-eval asks it, with its tasks. Raises ValueError for a model that cannot
        serve them.
        """
        from sinklab.lab.studies.benchmarks.harness_model import SinklabLM

        if not self.tasks:
            self.read(settings)
        model = SinklabLM(loaded, settings=settings)
        model.ask(self.tasks)
        return model

    def samples(self, plan: Any) -> int:
        """Parts of the requests."""
        return len(plan.asked)

    def about(self, loaded: Loaded, plan: Any) -> dict[str, Any]:
        """The model as the run folder describes it: no layers or heads are chosen."""
        facts = super().about(loaded, plan).items()
        return {name: value for name, value in facts if not name.startswith("recorded_")}

    def make(self, work: Work, samples: Sequence[int]) -> dict[int, Contents]:
        """Answers of some parts."""
        from sinklab.lab.studies.benchmarks.run import contents

        return {part: contents(work.plan, work.plan.asked[part], work.progress) for part in samples}

    def finish(self, work: Work) -> None:
        """Write scores, answers and doses."""
        from sinklab.lab.studies.benchmarks.run import conclude

        conclude(work)

    def results(self, runs: list[Run], out: Path, settings: EvalSettings) -> list[str]:
        """Scores and doses."""
        from sinklab.lab.studies.benchmarks.tables import score_sentences

        return [line for run in runs for line in score_sentences(run)]
