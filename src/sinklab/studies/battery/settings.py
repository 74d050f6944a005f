"""What scoring the reasoning battery does: one frozen dataclass, written into its run folder. Costs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinklab.errors import Checked, limited, near
from sinklab.registry import interventions
from sinklab.sampling.settings import DecodingSettings

SKILLS = ("arithmetic", "deduction", "planning", "rewriting", "retrieval", "copying")
LEVELS = (1, 2, 3, 4)
CONTROLS: dict[str, dict[str, Any]] = {
    "sinks": {},
    "clean_pass": {"source": "clean_pass"},
    "random": {"control": "random"},
    "random_clean_pass": {"source": "clean_pass", "control": "random"},
}
"""What is hidden, and the fields of the intervention `mask_sinks` that say so."""
ORDERS = ("low_confidence", "left_to_right", "random", "entropy")
NUMBERED = ("blocks", "window")


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
                hint = near(part, known, cutoff=0.4) or "such as blocks-6+window-8"
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
    def edits(self) -> tuple[Any, ...]:
        """The interventions that it stands for."""
        return () if self.window is None else (interventions.make("window_attention", radius=self.window),)

    def decoding(self, seed: int) -> DecodingSettings:
        """One token a step; a row is over where its answer ends."""
        return DecodingSettings(
            rule=self.order or "low_confidence", block_length=self.block_length, stop_at_eos=True, seed=seed
        )


@dataclass(frozen=True)
class BatterySettings(Checked):
    """Which problems are asked, how they are answered, and what is hidden meanwhile.

    Raises ValueError for names and numbers that make no sense with any model.
    """

    skills: tuple[str, ...] = limited(SKILLS, one_of=SKILLS, needed=True)
    """Kinds of problems: arithmetic, deduction, planning, rewriting, retrieval, copying."""
    levels: tuple[int, ...] = limited(LEVELS, one_of=LEVELS, needed=True)
    """Levels of difficulty, 1 is easy."""
    problems: int = limited(100, at_least=1)
    """Problems of each skill and level, from the test split, the same for every model."""
    ks: tuple[int, ...] = limited((0, 1, 2, 5, 10), at_least=0)
    """Numbers of hidden columns per layer and head; 0 is always among them."""
    controls: tuple[str, ...] = limited(("sinks", "clean_pass", "random"), one_of=CONTROLS)
    """What is hidden: sinks of the step before (closed loop), of a whole second forward (clean_pass, which holds on to
    them), or as many random other columns (random, random_clean_pass)."""
    conditions: tuple[str, ...] = ()
    """How texts are written: pure (most confident first, one block), left_to_right, random, entropy, greedy
    (autoregressive models), with blocks-N and window-N joined by +, e.g. blocks-6+window-8; pure or greedy when left
    out."""
    new_tokens: int = limited(18, at_least=1)
    """Tokens to write per answer."""
    batch: int = limited(100, at_least=1, free=True)
    """Problems that are written together; draws of a random control or order depend on it."""
    seed: int = 0
    """Seed of the choice of problems and of all draws."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("skills", "levels", "controls", "conditions"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        # whatever is hidden is compared with nothing hidden
        object.__setattr__(self, "ks", tuple(sorted({0, *self.ks})))
        for name in self.conditions:
            Condition.named(name)

    def hidings(self) -> list[tuple[str, int]]:
        """(control, k) of one condition, nothing hidden first."""
        return [("none", 0), *((control, k) for k in self.ks if k for control in self.controls)]


def of_kind(family: str, conditions: Sequence[str]) -> tuple[str, ...]:
    """The conditions that a model of this family can have: orders of decoding are for those that denoise."""
    return tuple(name for name in conditions if (Condition.named(name).order is not None) == (family == "diffusion"))
