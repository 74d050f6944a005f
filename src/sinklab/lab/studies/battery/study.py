"""The reasoning battery as a study: its settings, its command, and the function that Python
calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.core.errors import Checked, limited, near
from sinklab.core.registry import interventions, registered, rules, studies
from sinklab.core.sampling import DecodingSettings
from sinklab.lab.data import LEVELS, SKILLS
from sinklab.lab.measures import PROTOCOLS
from sinklab.lab.studies import Block, ScoredStudy, deferred, from_zero, with_matched

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded
    from sinklab.lab.records import Run


ALL = "all"
"""Value in the column of skills for all of them together."""
BLOCKED = ("sinks", "random", "matched", "equal_mass")


def control_name(control: str, protocol: str) -> str:
    """Name of a control under a protocol in run folders: "random", "random_held", "held",
    "clean_pass", ….
    """
    own = {"paper": "", "clean": "clean_pass"}.get(protocol, protocol)
    if not own:
        return control
    if control == "sinks":
        return own
    return f"{control}_{own}"


CONTROLS = {
    control_name(control, protocol): (control, protocol)
    for control, protocol in product(BLOCKED, PROTOCOLS)
}
"""Name -> choice of keys to block, and protocol, as in `by_protocol`."""
BESIDE = {
    control_name(control, protocol): (control_name(other, protocol),)
    for control, other in (("sinks", "random"), ("matched", "equal_mass"))
    for protocol in PROTOCOLS
} | {"clean_pass": ("random_clean_pass", "random")}
"""Controls that each choice of blocked keys is compared with; if the first was not run, the next
stands in.
"""
ORDERS = ("low_confidence", "left_to_right", "random", "entropy")
NUMBERED = ("blocks", "window")
CLEAN = ("clean_pass", "random_clean_pass")


@dataclass(frozen=True)
class Condition:
    """Way to write a text: its order of decoding and how far attention reaches."""

    name: str
    order: str | None = None
    """One of `ORDERS`; None for an autoregressive model."""
    block_length: int | None = None
    window: int | None = None

    @classmethod
    def named(cls, name: str) -> Condition:
        """Read a condition off its name: an order (or ``pure``, which is low_confidence over one
        block) or ``greedy``, ``blocks-N`` and ``window-N``, joined by ``+`` if there are several.

        Raises:
            ValueError: for a part that is none of these or said twice, naming the near one.
        """
        order, numbers = "low_confidence", {}
        seen = []
        for part in name.split("+"):
            what, _, number = part.rpartition("-")
            if what in NUMBERED and number.isdecimal() and int(number) > 0:
                numbers[what] = int(number)
            elif part in (*ORDERS, "greedy", "pure"):
                order, what = {"pure": order}.get(part, part), "order"
            else:
                known = ("pure", "greedy", *ORDERS, *(f"{kind}-N" for kind in NUMBERED))
                hint = near(part, known, cutoff=0.4) or "such as blocks-6+window-8"
                raise ValueError(
                    f"a condition is made of {', '.join(known)}, joined by +, got {name!r}; {hint}"
                )
            if what in seen:
                raise ValueError(
                    f"a condition says each thing once, got {name!r}; leave out {part}"
                )
            seen.append(what)
        if order != "greedy":
            return cls(name, order, numbers.get("blocks"), numbers.get("window"))
        if "blocks" in numbers:
            raise ValueError(
                f"greedy is token after token, without blocks, got {name!r}; left_to_right is the "
                "order of a diffusion model"
            )
        return cls(name, window=numbers.get("window"))

    @property
    def edits(self) -> tuple[Any, ...]:
        """The interventions that it stands for."""
        if self.window is None:
            return ()
        return (interventions.make("window_attention", radius=self.window),)

    def decoding(self, seed: int) -> DecodingSettings:
        """Decoding settings: one token a step; a row is over at the end of its answer."""
        return DecodingSettings(
            rule=self.order or "low_confidence",
            block_length=self.block_length,
            stop_at_eos=True,
            seed=seed,
        )


def known_conditions(field: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names of conditions, each once. Raises ValueError as `Condition.named` does."""
    return tuple({Condition.named(name).name: None for name in names})


@dataclass(frozen=True)
class BatterySettings(Checked):
    """Problems of a battery run, how they are answered, and the keys blocked meanwhile.

    Raises ValueError for names and numbers that make no sense with any model.
    """

    skills: tuple[str, ...] = limited(tuple(SKILLS), one_of=SKILLS, needed=True)
    """Kinds of problems: arithmetic, deduction, planning, rewriting, retrieval, copying."""
    levels: tuple[int, ...] = limited(LEVELS, one_of=LEVELS, needed=True)
    """Levels of difficulty, 1 is easy."""
    problems: int = limited(100, at_least=1)
    """Problems of each skill and level, from the test split, the same for every model."""
    ks: tuple[int, ...] = limited((0, 1, 2, 5, 10), at_least=0, read=from_zero)
    """Numbers of blocked keys per layer and head; 0 is always among them."""
    protocols: tuple[str, ...] = limited(("paper",), one_of=PROTOCOLS, needed=True)
    """How keys are blocked, side by side: paper (those most attended at the step before, closed
    loop), held (those chosen first stay blocked), rule (sinks by the rule, which stay blocked),
    clean (chosen by a clean pass of the same step)."""
    controls: tuple[str, ...] = limited(
        ("sinks", "clean_pass", "random"), one_of=(*BLOCKED, *CLEAN)
    )
    """Keys to block by each protocol: sinks (the keys that it names), as many random other keys, or
    equal_mass, keys that are no sinks and together receive as much, beside matched, the protocol's
    keys in the same heads. clean_pass and random_clean_pass are sinks and random by the protocol
    clean.
    """
    sink_rule: Any = registered(rules, None)  # noqa: RUF009
    """Rule for sinks, e.g. excess:epsilon=3, the default."""
    conditions: tuple[str, ...] = limited((), read=known_conditions)
    """How texts are written: pure (most confident first, one block), left_to_right, random,
    entropy, greedy (autoregressive models), with blocks-N and window-N joined by +, e.g.
    blocks-6+window-8; pure or greedy when left out."""
    new_tokens: int = limited(18, at_least=1)
    """Tokens to write per answer."""
    batch: int = limited(100, at_least=1, free=True)
    """Problems that are written together; draws of a random control or order depend on it."""
    seed: int = 0
    """Seed of the choice of problems and of all draws."""
    twin: bool | None = limited(None, free=True)
    """Let two controls answer the same problems too, the model with shuffled weights and with fresh
    ones; their numbers stand beside its own. When left out, if both take less than a minute.
    """

    def hidings(self) -> list[tuple[str, int]]:
        """(control, k) of one condition, nothing blocked first."""
        names = []
        for control, protocol in product(with_matched(self.controls), self.protocols):
            name = control
            if control in BLOCKED:
                name = control_name(control, protocol)
            names.append(name)
        return [("none", 0), *((name, k) for k in self.ks[1:] for name in dict.fromkeys(names))]


def of_kind(family: str, conditions: Sequence[str]) -> tuple[str, ...]:
    """The conditions that a model of this family can have: orders of decoding are for those that
    denoise.
    """
    return tuple(
        name
        for name in conditions
        if (Condition.named(name).order is not None) == (family == "diffusion")
    )


@studies.register("battery")
class Battery(ScoredStudy):
    """Six skills at four levels, for small models trained on them.

    The reasoning battery is scored with and without the most attended keys. Arithmetic, deduction,
    planning, rewriting, retrieval and copying: problems are made by rule, and their answers are
    known. Each is answered with nothing blocked, then with k keys blocked in every layer and head:
    those that receive most, or others; beside each score stands how many of them were sinks by the
    rule, and their attention. The result is the difference on the same problems, and only if the
    model is able at all: train one with `sinklab train battery`, and its autoregressive twin with
    `sinklab train battery-causal`; models that never saw such problems answer none. Writes a run
    folder per model below OUT, tables (CSV, Markdown) and figures into OUT/report. Of the
    conditions each model takes those of its kind.

    Try
        sinklab train battery-start && sinklab train battery && sinklab train battery-causal
        sinklab battery --model runs/battery/model runs/battery-causal/model
        sinklab battery --model runs/battery/model --conditions pure blocks-6 left_to_right \\
            random --ks 10 --levels 1 2
        sinklab battery --model runs/battery/model --protocols paper held rule --controls sinks \\
            random --ks 1 5
        sinklab battery --model tiny tiny-sink --skills copying --levels 1 --problems 4 --ks 5 \\
            --out runs/first
    """

    Settings = BatterySettings
    model = ()
    positional = True
    place = "battery-scores"
    parts = "answers"
    read_samples = deferred("sinklab.lab.studies.battery.run:read_samples")
    arms = deferred("sinklab.lab.studies.battery.run:arms")
    blocks = deferred("sinklab.lab.studies.battery.run:blocks")
    measure = deferred("sinklab.lab.studies.battery.run:measure")
    contrasts = deferred("sinklab.lab.studies.battery.run:contrasts")
    sentences = deferred("sinklab.lab.studies.battery.figures:battery_sentences")
    draw = deferred("sinklab.lab.studies.battery.figures:draw_battery")

    def of_models(self, models: Sequence[str], settings: BatterySettings) -> list[BatterySettings]:
        """Settings for each model, with the conditions of its kind. Raises ValueError for a
        condition that none of the models can have.
        """
        if not settings.conditions:
            return [settings] * len(models)
        from sinklab.lab.checkpoints import describe

        found = [of_kind(describe(model).family, settings.conditions) for model in models]
        untaken = set(settings.conditions).difference(*found)
        if untaken:
            raise ValueError(
                f"every condition needs a model of its kind, but none of {', '.join(models)} can "
                f"have {', '.join(sorted(untaken))}: greedy is for autoregressive models, the "
                "others are for those that denoise; leave it out, or name such a model"
            )
        return [replace(settings, conditions=conditions) for conditions in found]

    def fit(self, loaded: Loaded, settings: BatterySettings) -> BatterySettings:
        """The settings with a condition of the model's kind if none was given."""
        names = settings.conditions or of_kind(loaded.family, ("pure", "greedy"))
        return replace(settings, conditions=names)

    def steps(self, settings: BatterySettings, block: Block) -> int:
        """Every step of every batch of problems."""
        return math.ceil(len(block.rows) / settings.batch) * settings.new_tokens

    def record(self, settings: BatterySettings) -> dict[str, Any]:
        """The record of the settings, with the size of a batch if draws depend on it."""
        record = super().record(settings)
        if any("random" in name for name in (*settings.controls, *settings.conditions)):
            record["batch"] = settings.batch
        return record

    def closing(self, runs: list[Run], drawn: list[Path]) -> list[str]:
        """The line that names their folder."""
        return [f"tables and figures: {drawn[0].parent} ({len(drawn)} files)"]


score_battery = Battery()
"""Write a run folder of kind "battery", one part a (condition, control, k, skill, level).

Tables: ``answers``, every text that was written; ``accuracy``, shares with Wilson intervals (`low`,
`high`), and the differences to nothing blocked (`delta`) and to the control (`BESIDE`; `beyond`) on
the same problems, each with its interval and `_p` of the exact McNemar test, by skill and level,
over all levels (level 0) and all skills; ``removed``, by layer the dose (`share` of attention,
number of `keys`) and its state when chosen (`mass` held, keys `chosen`, `sinks` by the rule among
them, `matched` heads); ``skipped``, the cells that k keys do not fit into; and of controls
``answers-permuted``, ``accuracy-permuted``, …

Args:
    loaded: a diffusion model, or an autoregressive one, which writes greedily.
    settings: the problems and how they are answered.
    out: folder to write; it must be empty or absent, or hold this very run to resume.
    progress: shows how far it is; a function is called with a short text at each stage.
    resume: continue an interrupted run.

Raises:
    ValueError: for a model without tokenizer or mask token, a condition of the other kind of model,
        and questions that do not fit.
"""
