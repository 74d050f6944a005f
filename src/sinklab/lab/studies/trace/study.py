"""The trace as a study: a model recorded while it writes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sinklab.core.errors import limited, one_of
from sinklab.core.registry import interventions, registered
from sinklab.core.registry import statistics as known_statistics
from sinklab.core.subject import DecodingSettings
from sinklab.lab.records.info import ALL_QUERIES, FAST, OWN, SO_FAR
from sinklab.lab.registry import studies
from sinklab.lab.studies import Study, Work, describe

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded
    from sinklab.lab.records import Contents, Run


PROMPTS = (
    "It was a dark and stormy night, and",
    '"My dear sir," said the old man,',
    "The house stood at the end of a",
)
STATISTICS = (
    "received",
    "value_norm",
    "key_norm",
    "row_entropy",
    "row_logsumexp",
    "output_norm",
    "noop_bound",
    "massive_activations",
    "received_by_state",
)
"""Statistics recorded by default, but for the last; any other registered statistic can be added."""


@dataclass(frozen=True)
class StudySettings(DecodingSettings):
    """Texts of a study, their decoding, and the statistics to record and score.

    Raises ValueError for unknown statistics and for numbers that make no sense with any model.
    """

    prompts: tuple[str, ...] = PROMPTS
    """Prompts that the model continues, one sample each."""
    chat: bool = False
    """Put each prompt into the model's chat format; the tokens around it are recorded as
    template.
    """
    new_tokens: int = limited(64, at_least=0)
    """Tokens to write per sample; 0 fills the masks of the prompt."""
    block_length: int | None = 32
    """Tokens per block (semi-autoregressive decoding); None decodes everything as one block."""
    seed: int | None = 0
    """Random seed; each sample has its own, derived from this one and its number."""
    statistics: tuple[str, ...] = STATISTICS[:-1]
    """Statistics to record: received (always), value_norm, key_norm, row_entropy, row_logsumexp,
    output_norm, noop_bound, massive_activations (a table), received_by_state, or all; and any other
    registered statistic. Statistics per query are averaged over the queries of each state. By
    default all but received_by_state, which is three times as large as received.
    """
    layers: tuple[int, ...] = ()
    """Layers to record, -1 the last; all when left out."""
    heads: tuple[int, ...] = ()
    """Query heads to record; all when left out."""
    every: int = limited(1, at_least=1)
    """Record every n-th step, starting with the first."""
    exact: bool = False
    """Measure the model's own forward, bit for bit; by default a fast decoder writes where there
    is one, and no edit, and is measured where it attends: numbers are equal within rounding.
    """
    maps: tuple[str, ...] = ()
    """Record whole attention maps, query × key, for these "step:layer:head", e.g. 3:5:2."""
    keep_arrays: bool = True
    """Keep the arrays, which the explorer shows and another sink rule needs; without them a run has
    its facts alone, and is many times smaller.
    """
    edits: tuple[Any, ...] = registered(interventions, ())
    """Decode under these interventions, e.g. block_keys:keys=top:k=5 or
    window_attention:radius=16, in this order.
    """
    full_forward: bool = False
    """Autoregressive models: recompute the whole text at every step instead of the last token on
    top of the KV cache. The record is the same, unless edits act otherwise on rows that are
    computed again.
    """
    twin: bool | None = limited(None, free=True)
    """Run two controls on all canvases too, the model with shuffled weights and with fresh ones;
    their numbers stand beside its own; of a run that is there too. When left out, the
    first question alone has a control: shuffled weights, on a few canvases."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("received", *self.statistics)
        if "all" in names:
            names = STATISTICS
        mine = [name for name in STATISTICS if name in names]
        for name in names:
            if name not in STATISTICS:
                known = sorted({*STATISTICS, *known_statistics, "all"})
                one_of("statistic", name.partition(":")[0], known)
                # as the trace labels them: "k=3" of a field that is a float is "k=3.0"
                mine.append(known_statistics.as_text(known_statistics.parse(name)))
        object.__setattr__(self, "statistics", tuple(dict.fromkeys(mine)))
        wrong = [text for text in self.maps if not re.fullmatch(r"\d+:-?\d+:\d+", str(text))]
        if wrong:
            raise ValueError(
                f"maps are written step:layer:head, such as 3:5:2, got {wrong[0]!r}; write three "
                "numbers"
            )

    @cached_property
    def map_keys(self) -> tuple[tuple[int, int, int], ...]:
        """`maps` as (step, layer, head)."""
        keys: Any = (tuple(map(int, text.split(":"))) for text in self.maps)
        return tuple(keys)

    @property
    def has_every_canvas(self) -> bool:
        """Whether a control could follow the recorded canvases: a cache is followed step by
        step.
        """
        return self.every == 1 or self.values()["cache"] is None

    def check_controls(self) -> None:
        """Raises ValueError if no control could follow the recorded canvases."""
        if not self.has_every_canvas:
            raise ValueError(
                f"controls follow a cache step by step, but with cache={self.cache} only "
                "some steps are recorded; leave out every, or the cache, or the twins"
            )

    def records(self, step: int) -> bool:
        """Whether this step is recorded."""
        return step % self.every == 0 or any(step == key[0] for key in self.map_keys)


@studies.register("trace")
class Trace(Study):
    """Record the attention that tokens receive while a model writes.

    Of every token at every denoising step, in a run folder: it holds run.json, Parquet tables and
    safetensors arrays; `sinklab report` turns it into a page, pandas reads it as it is. Samples
    are saved in parts of up to 16: an interrupted run can be read, and the same command goes on.
    Autoregressive models are traced too, on top of their own KV cache. Two controls are
    asked for (--twin).

    Try
        sinklab trace "The house stood at the end of a" --out runs/house && sinklab report \\
            runs/house
        sinklab trace "The house stood at the end of a" --twin --out runs/more
        sinklab trace --model tiny-sink --new-tokens 96 --rule random --out runs/sink
        sinklab trace --model tiny-sink --cache dual --statistics all --layers 0 -1 --every 4 \\
            --out runs/dual
        sinklab trace --prompts questions.jsonl --samples 30 --chat --model \\
            /models/LLaDA-8B-Instruct --dtype bfloat16
        sinklab trace "The house" --edits block_keys:keys=top:k=5 window_attention:radius=16 \\
            --maps 3:5:2 --out runs/edited
        sinklab trace --prompts questions.jsonl --device cuda --shard 0/4 --out runs/many
    """

    Settings: ClassVar[type] = StudySettings
    group = "watch"
    kind = "study"
    shards = True
    together = 4

    def prepare(self, loaded: Loaded, settings: StudySettings) -> Any:
        """The texts to write. Raises ValueError for what can be refused without the model."""
        from sinklab.lab.studies.trace.run import prepare

        return prepare(loaded, settings)

    def make(self, work: Work, samples: Sequence[int]) -> dict[int, Contents]:
        """Texts, written under observation."""
        from sinklab.lab.studies.trace.run import make

        return make(work, samples)

    def part_size(self, plan: Any) -> int:
        """Samples of a part: few, if their attention is large."""
        from sinklab.lab.studies.trace.run import part_size

        return part_size(plan)

    def finish(self, work: Work) -> None:
        """Controls, and what follows from all samples."""
        from sinklab.lab.studies.trace.again import finish

        finish(work)

    def samples(self, plan: Any) -> int:
        """Number of samples: one per prompt."""
        return len(plan.tasks)

    def about(self, loaded: Loaded, plan: Any) -> dict[str, Any]:
        """The model, with the layers and heads that are recorded, which queries are read
        (`reading_of`), and whose forward (`OWN` or `FAST`).
        """
        about = describe(loaded, plan.selection.layers, plan.selection.heads)
        about |= {"reading": SO_FAR, "forward": OWN}
        if loaded.is_diffusion:
            about["reading"] = ALL_QUERIES
        if plan.tasks[0].is_fast:
            about["forward"] = FAST
        return about

    def results(self, runs: list[Run], out: Path, settings: StudySettings) -> list[str]:
        """The commands that go on from here: to see the run, to run its controls, to block its
        sinks.
        """
        from sinklab.lab.reports.study import reading_words

        # names of a run folder that came from elsewhere are not for the shell to read
        reading, path = reading_words(runs[0].info.model), shlex.quote(str(runs[0].path))
        again = f"sinklab trace {reading} --config {path} --out"
        lines = [f"next: sinklab report {path}"]
        if "twins" not in runs[0].tables and settings.has_every_canvas:
            lines.append(
                f"controls of every number, with shuffled and with fresh weights: {again} {path} "
                "--twin"
            )
        if not runs[0].info.settings["edits"]:
            # an autoregressive model begins with the keys of its prompt, which may be few
            k = 1 if runs[0].info.model["family"] == "autoregressive" else 5
            masked, edit = shlex.quote(f"{runs[0].path}-masked"), f"block_keys:keys=top:k={k}"
            lines.append(f"what it writes with sinks blocked: {again} {masked} --edits {edit}")
        curve = f"sinklab curve {reading}"
        return [*lines, f"what blocking them costs: {curve}; head by head: {curve} --by head"]


study = Trace()
"""Trace a model while it writes and keep everything.

Arrays ``attention``, ``measures`` (and ``maps``); tables ``tokens``, ``steps``, ``facts``,
``massive_activations``, ``generations`` (``removals`` and ``clipped`` under edits), ``control``.

Args:
    loaded: a diffusion model, or an autoregressive one, which writes through its own cache.
    out: folder to write: empty, absent, or with this very run, which goes on.
    settings: of the study.
    progress: shows the progress; a function is called with a short text at each stage.

Raises:
    ValueError: for a prompt that does not fit, and settings that the model or the decoder refuse.
"""
