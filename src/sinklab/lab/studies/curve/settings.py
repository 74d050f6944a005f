"""Settings of the cost of blocking keys, and the base of its three kinds of run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.scope import CONTROLS, PROTOCOLS
from sinklab.core.registry import interventions, registered, rules
from sinklab.lab.studies.scored import ScoredStudy

KIND = ("by", "during")
"""Settings that say which kind of run it is."""
UNITS = ("model", "layer", "head")
REMOVALS = ("mask", "zero_value")


@dataclass(frozen=True)
class CurveSettings(Checked):
    """Keys to block, where and while the model does what, and the text.

    Raises ValueError for unknown names and for numbers that make no sense with any model.
    """

    by: str = limited("model", one_of=UNITS)
    """Block keys in the whole model, or map the cost of blocking them in one layer, or in one head,
    at a time.
    """
    during: str = limited("reading", one_of=("reading", "writing"), flag="while")
    """reading: held-out loss; writing: how far the texts are from those that the unedited model
    writes.
    """
    ks: tuple[int, ...] = limited((), at_least=0)
    """Numbers of keys to block per row, layer and query head; when left out 0 1 2 5 10 20 (0 is
    always scored), 1 by layer or head, 1 5 while writing.
    """
    controls: tuple[str, ...] = limited((), one_of=CONTROLS)
    """Keys to block: those that receive most (sinks), as many others drawn (random), others that
    are no sinks and together hold as much (equal_mass, compared in the heads that have some), the
    least attended (lowest), the last (recent). When left out the first three; sinks by layer or
    head, and while writing.
    """
    sink_rule: Any = registered(rules, None)  # noqa: RUF009
    """Rule for sinks, NAME:field=value: of the most attended keys only such are blocked, at most k.
    When left out all k are, and excess:epsilon=3 counts how many of them are sinks.
    """
    removals: tuple[str, ...] = limited((), one_of=REMOVALS)
    """Ways of removal: mask (before the softmax, the weight goes to other keys) or zero_value (the
    weight stays and adds nothing). mask when left out; both while writing.
    """
    layers: tuple[int, ...] = ()
    """Layers of a map; all when left out."""
    edits: tuple[Any, ...] = field(default=(), metadata={"registry": interventions})
    """Further edits to score, each by itself: NAME:field=value."""
    protocols: tuple[str, ...] = limited(("paper", "held", "clean"), one_of=PROTOCOLS, needed=True)
    """While writing, the choice of keys, and for how long: paper (the top k of the step before,
    arXiv 2510.15731), held (the first top k stay blocked), rule (those of them that are sinks stay
    blocked), clean (the top k of a clean pass at the same step).
    """
    heldout: str | None = None
    """Corpus to score, or to begin texts with; None uses the excerpt in the package."""
    rows: int | None = limited(None, at_least=1)
    """Rows of text; 48 when left out, 12 while writing."""
    length: int = limited(256, at_least=2)
    """Tokens in a row that is read."""
    prompt_tokens: int = limited(32, at_least=1)
    """Tokens that are given of a text to write."""
    new_tokens: int = limited(32, at_least=1)
    """Tokens to write, the most probable ones; a diffusion model writes one a step."""
    block_length: int | None = limited(None, at_least=1)
    """Tokens per block of a diffusion model that writes; one block when left out."""
    draws: int = limited(1, at_least=1)
    """Repetitions per row, each with its own noise and random columns; the mean counts."""
    batch: int | None = limited(None, at_least=1)
    """Rows per forward pass; 16 when left out, 12 while writing."""
    seed: int = 0
    """Seed of the noise and of random controls."""
    twin: bool | None = limited(None, free=True)
    """Score two controls on the same rows too, the model with shuffled weights and with fresh ones;
    their numbers stand beside its own. When left out, if both take less than a minute. A curve that
    is there gets none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("controls", "removals", "protocols"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))

    def own(self) -> CurveSettings:
        """The settings of `sinklab curve`, without what a short name of it adds."""
        names = [one.name for one in dataclasses.fields(CurveSettings)]
        return CurveSettings(**{name: getattr(self, name) for name in names})


class CostStudy(ScoredStudy):
    """One kind of run that `sinklab curve` makes."""

    Settings = CurveSettings
    defaults: ClassVar[dict[str, Any]]
    """Values of settings that are left out."""
    reads: ClassVar[tuple[str, ...]]
    """Settings that it has, beside those with defaults."""

    def filled(self, settings: CurveSettings) -> CurveSettings:
        """The settings with its defaults. Raises ValueError for settings of another kind."""
        own = (*self.defaults, *self.reads)
        for one in dataclasses.fields(CurveSettings):
            value = getattr(settings, one.name)
            if one.name not in own and one.name not in KIND and value != one.default:
                raise ValueError(
                    f"{one.name}={value} belongs to another kind of curve than by={settings.by}, "
                    f"during={settings.during}, whose settings are {', '.join(own)}; leave it out"
                )
        changes = {
            name: value
            for name, value in self.defaults.items()
            if getattr(settings, name) in (None, ())
        }
        return dataclasses.replace(settings, **changes)

    def record(self, settings: CurveSettings) -> dict[str, Any]:
        """Its own settings, as the run folder keeps them."""
        kept = super().record(settings)
        return {name: kept[name] for name in (*self.defaults, *self.reads) if name in kept}
