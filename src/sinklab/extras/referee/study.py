"""The referee as a study: how far rounding moves a score, and whether two runs differ by more."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import studies
from sinklab.lab.studies.base import Study, deferred


@dataclass(frozen=True)
class RefereeSettings(Checked):
    """Settings of the referee: the runs, and the number of texts."""

    runs: tuple[str, ...] = limited((), positional=True)
    """A run folder of `sinklab eval` or `sinklab trace`, and another one to compare it with, item
    by item.
    """
    texts: int = limited(16, at_least=0)
    """Write the first so many texts of RUN again, with its model and settings, and measure the
    margin of every choice; 0 compares the recorded results, and needs no model.
    """
    forced: int = limited(24, at_least=0)
    """Near ties, a sample of the nearest tenth, at which the runner-up is written and decoding goes
    on.
    """
    batch: int = limited(8, at_least=1)
    """Texts that are written together."""
    device: str | None = None
    """Device of the model; that of the run when left out."""
    seed: int | None = 0
    """Seed of the jitter and of the sample of near ties."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.runs) > 2:
            raise ValueError(
                f"the referee judges one run or compares two, got {len(self.runs)}; give RUN or "
                "RUN OTHER"
            )


@studies.register("referee")
class Referee(Study):
    """How far does rounding move a run, and do two differ by more?

    The first texts of RUN are written again and the margin of every choice is measured: in token
    (logit of the token less that of the runner-up), in order (score of the last position chosen
    less that of the best not chosen) and, with a threshold, the distance to it. A jitter of known
    size says how much rounding moves each margin of this model; the effects of the attention
    backend, the batch and the type of the numbers were measured on small models, and anything
    beyond, such as another device, is labelled as extrapolated. At near ties the runner-up is
    written and decoding goes on: that says how many flips become another answer. The variance of
    the score is then told in parts. With OTHER the items that both answered are compared in pairs
    (exact McNemar test), and it is said whether rounding can give this difference.
    docs/reproducibility.md explains each number.

    Try
        sinklab referee runs/eval
        sinklab referee runs/eval runs/eval-bfloat16 --out runs/verdict
        sinklab referee runs/h200 runs/a100 --texts 0
    """

    Settings = RefereeSettings
    listed: ClassVar[dict[str, Any]] = {
        "group": "check",
    }
    model = ""

    amount = deferred("sinklab.extras.referee.run:amount")
    prepare = deferred("sinklab.extras.referee.run:prepare")
    run = deferred("sinklab.extras.referee.run:judge")
    sentences = deferred("sinklab.extras.referee.run:sentences")

    def about(self, loaded: Any, plan: Any) -> dict[str, Any]:
        """The model of the first run, as it says."""
        return {
            name: value
            for name, value in plan.runs[0].info.model.items()
            if not name.startswith("recorded_")
        }
