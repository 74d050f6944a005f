"""Contents of sinks, as a study: its settings, its command, and the function that Python calls."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sinklab.core.errors import limited, unknown
from sinklab.core.registry import rules, studies
from sinklab.core.sampling import DecodingSettings
from sinklab.lab.studies import Study, deferred

TARGETS = ("token", "progress", "position", "block", "committed", "next")
"""Targets of probes: the token finally written at the position; the share of the completion that is
masked; the position; the block that is written now; the mean embedding of the tokens written so
far; that of the tokens finally written in the next block.
"""


STRONGEST = "strongest"
"""Chosen in place of a rule."""


def chosen_rule(choose: str, epsilon: float) -> Any:
    """The rule that is called ``choose`` in the settings; None stands for the strongest keys, sinks
    or not.

    Raises:
        ValueError: for an unknown rule, and values that the rule refuses, such as a negative
            epsilon.
    """
    if choose == STRONGEST:
        return None
    name = choose.partition(":")[0]
    if name not in rules:
        raise unknown("way to choose sinks", name, (*rules, STRONGEST))
    return rules.make("excess", epsilon=epsilon) if choose == "excess" else rules.parse(choose)


@dataclass(frozen=True)
class ContentsSettings(DecodingSettings):
    """Texts to write, states to sample from them, and how they are read.

    Raises ValueError for numbers that make no sense with any model.
    """

    full_forward: ClassVar[bool] = False
    """Texts are denoised (see `sinklab.lab.scoring.task.Task`)."""
    prompts: tuple[str, ...] = ()
    """Beginnings that the model continues, one text each; taken from a corpus when left out."""
    heldout: str | None = None
    """Corpus the beginnings are taken from; None takes the excerpt inside the package."""
    rows: int = limited(48, at_least=1)
    """Beginnings to take from the corpus, spread over it."""
    prompt_tokens: int = limited(32, at_least=0)
    """Tokens of each of them."""
    chat: bool = False
    """Put each prompt into the model's chat format."""
    new_tokens: int = limited(96, at_least=1)
    """Tokens to write after each prompt."""
    block_length: int | None = 32
    """Write block after block of this many tokens; None writes everything as one block, which
    leaves no future.
    """
    temperature: float = 1.0
    """0 takes the most probable token; small models then write alike texts, from which a probe
    learns little.
    """
    seed: int | None = 0
    """Seed of all noise; each text has its own, which follows from this one and its number."""
    choose: str = "excess"
    """Choice of sinks: keys that a rule names in some head (excess, with epsilon; or another one as
    text, such as gu:weight=0.3), or strongest (in each head the key of each place that receives
    most, however little).
    """
    epsilon: float = 3.0
    """With choose=excess: sinks receive more than 1 + epsilon (S - 1) / S times an even share."""
    every: int = limited(4, at_least=1)
    """Sample states at every n-th step, beginning with the first."""
    pairs: int = limited(2, at_least=1)
    """Sinks to sample of each place, step and layer at most, each with a matched position."""
    layers: tuple[int, ...] = ()
    """States to read: 0 enters the first layer, and the number of layers leaves the last; all when
    left out.
    """
    folds: int = limited(5, at_least=3)
    """Parts that the texts are dealt to; each is predicted from the others."""
    classes: int = limited(16, at_least=2)
    """Probes for the token tell so many tokens apart, the most frequent ones, and all others as
    one.
    """
    components: int = limited(256, at_least=1)
    """States wider than this are turned onto their leading principal directions before a probe is
    fitted.
    """
    resamples: int = limited(1000, at_least=1)
    """Resamples of the texts behind an interval."""
    twin: bool | None = limited(None, free=True)
    """Let two controls read the same texts too, the model with shuffled weights and with fresh
    ones; their numbers stand beside its own. When left out, if both take less than a minute.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts and self.heldout is not None:
            raise ValueError(
                "beginnings come as prompts or from a corpus, but there are both; leave one of "
                "them out."
            )
        if self.cache != "none":
            raise ValueError(
                f"states are read at all positions of a step, but cache={self.cache} computes some "
                "of them; decode without a cache"
            )
        chosen_rule(self.choose, self.epsilon)


@studies.register("probe")
class Probe(Study):
    """The text that hidden states at sinks encode.

    Those of sinks among the still-masked positions above all. While the model writes, states of
    sinks are kept beside states of positions that are like them: of the same step, layer and place
    (prompt, committed, block, future), with the same token if there is one, as near as can be. The
    logit lens applies the model's own head to them; ridge probes, tested on texts they have not
    seen, predict from them the token finally written there, how much is still masked, the position,
    the block, the tokens written, and those that come next. Everything is in a run folder, with a
    figure a place beside it; intervals are over texts. Results of controls stand beside it.

    Sinks are few: if none is found among the masked positions, --choose strongest takes in each
    head the key of each place that receives most.

    Try
        sinklab probe --rows 16 --out runs/probe
        sinklab probe --model tiny-sink --choose strongest --rows 24 --every 8 --out runs/strongest
        sinklab probe --rows 12 --layers 0 3 6 --block-length 16 --new-tokens 48 --every 2 --out \\
            runs/some
        sinklab probe --prompts questions.jsonl --samples 64 --chat --temperature 0 --layers 0 8 \\
            16 24 32
            --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --out runs/llada
    """

    Settings = ContentsSettings
    kind = "contents"
    parts = "texts"
    prepare = deferred("sinklab.lab.studies.contents.run:prepare")
    run = deferred("sinklab.lab.studies.contents.run:write_texts")
    finish = deferred("sinklab.lab.studies.contents.run:read_states")
    sentences = deferred("sinklab.lab.studies.contents.figures:contents_sentences")
    draw = deferred("sinklab.lab.studies.contents.figures:draw_contents")

    def samples(self, plan: Any) -> int:
        """Number of samples: one per text."""
        return len(plan.tasks)


sink_contents = Probe()
"""Write a run folder of kind "contents": readings of the logit lens and of linear probes at sinks
and beside them.

Tables ``samples`` (a row a sampled state), ``looks`` (sinks of each place, step and layer),
``texts``, ``lens`` and ``probes`` (means and scores with 95 % intervals over texts; "difference" is
sinks less matched positions), and ``added`` for models with added sinks; arrays ``states``, one
part a text; and of controls that read the same texts, under names such as
``probes-permuted``. A state of layer l is its input: the keys and values of its attention are made
of it; the last one leaves the last layer.

Args:
    loaded: a diffusion model.
    out: folder to write; it must be empty or absent, or hold this very run to resume.
    settings: of the study.
    progress: shows how far it is; a function is called with a short text at each stage.
    resume: continue an interrupted run.

Raises:
    ValueError: for an autoregressive model, a cache, fewer texts than folds, and anything that the
        decoder refuses.
"""
