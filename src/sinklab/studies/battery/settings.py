"""What scoring the reasoning battery does: one frozen dataclass, written into its run folder. Costs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from sinklab.sampling.settings import DecodingSettings

SKILLS = ("arithmetic", "deduction", "planning", "rewriting", "retrieval", "copying")
LEVELS = (1, 2, 3, 4)
CONTROLS = {
    "sinks": "",
    "clean_pass": ",source=clean_pass",
    "random": ",control=random",
    "random_clean_pass": ",source=clean_pass,control=random",
}
"""What is hidden, and how `mask_sinks` is told."""
ORDERS = ("low_confidence", "left_to_right", "random", "entropy")
NUMBERED = ("blocks", "window")
PACE = ("batch",)
"""Fields that say how fast, not what; but for a random control or order, whose draws depend on the batch."""


@dataclass(frozen=True)
class Condition:
    """How a text is written: its order of decoding and how far attention reaches."""

    name: str
    order: str | None = None
    """One of `ORDERS`; None for an autoregressive model."""
    block_length: int | None = None
    window: int | None = None

    @classmethod
    def named(cls, name: str) -> Condition:
        """Read a condition off its name: an order (or ``pure``, which is low_confidence over one block) or ``greedy``,
        ``blocks-N`` and ``window-N``, joined by ``+`` where there are several.

        Raises:
            ValueError: for a part that is none of these or said twice, naming the near one.
        """
        order, numbers = "low_confidence", dict[str, int]()
        seen: list[str] = []
        for part in name.split("+"):
            what, dash, number = part.rpartition("-")
            if dash and what in NUMBERED and number.isdecimal() and int(number) > 0:
                numbers[what] = int(number)
            elif part in (*ORDERS, "greedy"):
                order, what = part, "order"
            elif part == "pure":
                what = "order"
            else:
                known = ("pure", "greedy", *ORDERS, *(f"{kind}-N" for kind in NUMBERED))
                near = difflib.get_close_matches(part, known, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]}?" if near else "such as blocks-6+window-8"
                raise ValueError(f"a condition is made of {', '.join(known)}, joined by +, got {name!r}; {hint}")
            if what in seen:
                raise ValueError(f"a condition says each thing once, got {name!r}; leave out {part}")
            seen.append(what)
        greedy = order == "greedy"
        if greedy and "blocks" in numbers:
            raise ValueError(
                f"greedy is token after token, without blocks, got {name!r}; left_to_right is the order of a diffusion "
                "model"
            )
        return cls(name, None if greedy else order, numbers.get("blocks"), numbers.get("window"))

    @property
    def edits(self) -> tuple[str, ...]:
        """The interventions that it stands for, as text."""
        return () if self.window is None else (f"window_attention:radius={self.window}",)

    def decoding(self, seed: int) -> DecodingSettings:
        """One token a step; a row is over where its answer ends."""
        return DecodingSettings(
            rule=self.order or "low_confidence", block_length=self.block_length, stop_at_eos=True, seed=seed
        )


@dataclass(frozen=True)
class BatterySettings:
    """Which problems are asked, how they are answered, and what is hidden meanwhile.

    Raises ValueError for names and numbers that make no sense with any model.
    """

    skills: tuple[str, ...] = SKILLS
    """Kinds of problems: arithmetic, deduction, planning, rewriting, retrieval, copying."""
    levels: tuple[int, ...] = LEVELS
    """Levels of difficulty, 1 is easy."""
    problems: int = 100
    """Problems of each skill and level, from the test split, the same for every model."""
    ks: tuple[int, ...] = (0, 1, 2, 5, 10)
    """Numbers of hidden columns per layer and head; 0 is always among them."""
    controls: tuple[str, ...] = ("sinks", "clean_pass", "random")
    """What is hidden: sinks of the step before (closed loop), of a whole second forward (clean_pass, which holds on to
    them), or as many random other columns (random, random_clean_pass)."""
    conditions: tuple[str, ...] = ()
    """How texts are written: pure (most confident first, one block), left_to_right, random, entropy, greedy
    (autoregressive models), with blocks-N and window-N joined by +, e.g. blocks-6+window-8; pure or greedy when left
    out."""
    new_tokens: int = 18
    """Tokens to write per answer."""
    batch: int = 100
    """Problems that are written together; draws of a random control or order depend on it."""
    seed: int = 0
    """Seed of the choice of problems and of all draws."""

    def __post_init__(self) -> None:
        for name in ("skills", "levels", "ks", "controls", "conditions"):
            given = getattr(self, name)
            object.__setattr__(self, name, tuple(dict.fromkeys((given,) if isinstance(given, str | int) else given)))
        _known("skills", self.skills, SKILLS)
        _known("controls", self.controls, tuple(CONTROLS))
        if not self.skills or not self.levels or not set(self.levels) <= set(LEVELS):
            raise ValueError(f"a battery needs skills, and levels among {LEVELS}, got {self.skills} and {self.levels}")
        for name in ("problems", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if wrong := [k for k in self.ks if k < 0]:
            raise ValueError(f"ks are numbers of hidden columns, at least 0, got {wrong[0]}")
        # whatever is hidden is compared with nothing hidden
        object.__setattr__(self, "ks", tuple(sorted({0, *self.ks})))
        for name in self.conditions:
            Condition.named(name)

    def hidings(self) -> list[tuple[str, int]]:
        """(control, k) of one condition, nothing hidden first."""
        return [("none", 0), *((control, k) for k in self.ks if k for control in self.controls)]


def hidden_edit(control: str, k: int, *, by_last_row: bool) -> tuple[str, ...]:
    """The intervention of a control as text; none for k = 0.

    Args:
        by_last_row: an autoregressive model writes: sinks are chosen by the last token's row of the step before.
    """
    if not k:
        return ()
    return (f"mask_sinks:k={k}{CONTROLS[control]}{',selector=last_row' if by_last_row else ''}",)


def _known(what: str, given: Iterable[str], choices: tuple[str, ...]) -> None:
    for name in given:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"did you mean {near[0]}?" if near else "choose among them"
            raise ValueError(f"{what} are among {', '.join(choices)}, got {name!r}; {hint}")
