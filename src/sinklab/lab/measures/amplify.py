"""Amplification of hidden states: does a position whose numbers vary more become a sink?

arXiv 2605.06611 makes sinks of tokens of a causal model by o_k ← λ (o_k − μ) + μ, where λ o_k makes
none. Its summary says neither where o_k stands nor what μ is a mean over: here o_k is the hidden
state that leaves a decoder layer, and `mean` chooses between the two readings.
"""

# B batch, Q positions that run, D width of hidden states, M positions that are amplified
from dataclasses import MISSING, dataclass
from typing import ClassVar

from torch import Tensor

from sinklab.core.errors import limited, whole_numbers
from sinklab.core.instrument import Call, InterventionLog, Listener
from sinklab.core.instrument.edits.edit import Edit
from sinklab.core.registry import interventions
from sinklab.lab.measures.statistics import mean_over_positions
from sinklab.lab.scoring.hidden_states import Part, StateHandler


@interventions.register("amplify")
@dataclass(frozen=True, kw_only=True)
class Amplify(Edit):
    """Hidden states of chosen positions become λ (o − μ) + μ after each of `layers`.

    Raises ValueError for no position, and in a call for one that the canvas does not have.
    """

    positions: tuple[int, ...] = limited(MISSING, read=whole_numbers, needed=True)
    """Canvas positions, of which those that run are amplified."""
    scale: float = limited(MISSING, above=0)
    """Factor λ."""
    mean: str = limited("channels", one_of=("channels", "positions", "none"))
    """The mean μ: of a state over its channels, of each channel over the real positions that
    run, or none, which is the control λ o.
    """
    heads: ClassVar[None] = None  # type: ignore[misc]

    @property
    def extent(self) -> tuple[int, int]:
        """The first step in which it acts, and the last position that it names."""
        return 0, max(self.positions)

    def change(self, states_BQD: Tensor, call: Call) -> Part:
        """New hidden states of the positions that run."""
        place = call.positions_Q.tolist()
        run_M = [place.index(position) for position in self.positions if position in place]
        if not run_M:
            return None
        own_BMD = states_BQD[:, run_M]
        mean = own_BMD.new_zeros(())
        if self.mean == "channels":
            mean = own_BMD.mean(-1, keepdim=True)
        elif self.mean == "positions":
            mean = mean_over_positions(states_BQD.float(), call.visibility.real_BQ)[:, None]
        return (slice(None), run_M), self.scale * (own_BMD - mean) + mean

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this intervention out and writes into the log."""
        return StateHandler(self, log, forwards_per_step)
