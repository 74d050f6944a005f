"""`BlockKeys`, the edit of keys: which keys, for which queries, chosen when, taken away how.
block_handler.py carries it out.
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace

from sinklab.core.errors import limited
from sinklab.core.probing.call import Listener
from sinklab.core.probing.intervention import InterventionLog
from sinklab.core.probing.interventions.base import LayerIntervention
from sinklab.core.probing.interventions.block_handler import BlockHandler
from sinklab.core.probing.interventions.removals import Mask, Removal, check_queries, first_query
from sinklab.core.probing.interventions.selectors import SCORES, Selector
from sinklab.core.probing.scope import whole_numbers
from sinklab.core.registry import interventions, registered, removals, rules, selectors
from sinklab.core.sinks import Rule

WHEN = ("now", "previous", "clean", "kept")


@interventions.register("block_keys")
@dataclass(frozen=True)
class BlockKeys(LayerIntervention):
    """Take keys away, head by head: which keys, for which queries, chosen when, taken away how.

    By default the keys chosen in one step are removed in the next, so a single forward needs
    ``when="now"``::

        BlockKeys(TopKeys(5))                   # the paper's, MaskSinks(k=5)
        BlockKeys(SinkKeys("gu"), queries="from32", when="clean")
        BlockKeys(EqualMass(TopKeys(5)))        # a control of sinklab.lab.measures

    Raises ValueError for values outside those listed, and for ones that do not go together.
    """

    keys: Selector = registered(selectors)
    """Selector of the keys, or its text such as ``"top:k=5"``."""
    _: KW_ONLY
    queries: str | None = None
    """Queries for which keys are blocked: "all", "from32" (canvas positions from 32 on), "masked",
    "committed" or "prompt"; a query then never loses its own key. None: for all, their own key
    included (arXiv 2510.15731); one that would lose every key it may see keeps them.
    """
    beyond: int | None = limited(None, at_least=0)
    """Only for queries farther than so many positions from the key: nearer ones keep it, so that
    with ``keys="others:like=sinks"`` a query reads its neighbours and the sinks alone.
    """
    when: str | None = limited(None, one_of=WHEN)
    """Forward in which keys are chosen. "now": the one that loses them, from the call as it is
    given. "previous": the one before, of the same edited run; the first is unedited. "clean": one
    that is run unedited under `log.probing()`. "kept": as "previous", and a key once taken stays
    taken. None is "previous"; scores of whole texts (`sinklab.lab.scoring`), which have no step
    before, replace it by "clean".
    """
    how: Removal = registered(removals, Mask())
    """Removal, or its text: "mask", or one of `sinklab.lab.measures.values`: "zero_value",
    "shuffle_value", "mean_value:file=…".
    """
    scores: str | None = limited(None, one_of=SCORES)
    """Attention to choose by: column sums over all queries ("received"), or the last query's row
    ("last_row", the autoregressive reading). None is "received"; studies in which an
    autoregressive model writes replace it by "last_row".
    """
    limit: int | None = limited(None, at_least=1)
    """With "kept", whose sets grow: the most keys a head may have lost at a time."""
    steps: tuple[int | None, ...] | None = None
    """(start, stop): only in steps start, …, stop - 1 of the sequence; stop None means to the
    end.
    """
    counted_by: Rule | None = registered(rules, None)
    """Rule by which the log counts sinks among the chosen keys; None: that of the selector, or
    `DEFAULT`.
    """
    seed: int = 0
    """Seed of whatever is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queries(self.queries)
        if self.by_query and not self.how.blocks:
            raise ValueError(
                "queries and beyond say for whom a key is blocked, and a value is the same for "
                f"all, got queries={self.queries!r} and beyond={self.beyond} with "
                f"how={removals.as_text(self.how)!r}; take how='mask', or leave them out"
            )
        if self.limit is not None and self.when != "kept":
            raise ValueError(
                "limit says how many keys are blocked at a time where keys stay blocked, with "
                f"when='kept'; got limit={self.limit} with when={self.when!r}: leave it out"
            )
        if self.steps is not None:
            object.__setattr__(self, "steps", _span(self.steps))

    @property
    def by_query(self) -> bool:
        """Whether queries lose different keys of a head."""
        return self.queries is not None or self.beyond is not None

    @property
    def draws(self) -> bool:
        """Whether anything is drawn, so that equal rows may be edited differently."""
        return self.keys.draws or self.how.draws

    @property
    def extent(self) -> tuple[int, int]:
        """The first step in which it acts, and the last position that it names, of keys or of the
        first query (−1 for none).
        """
        last = max(self.keys.last_position, first_query(self.queries))
        return (self.steps or (0,))[0] or 0, last

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        edit = self
        if self.when is None:
            edit = replace(self, when="previous")
        return BlockHandler(edit, log, forwards_per_step)


def _span(steps: tuple[int | None, ...]) -> tuple[int | None, ...]:
    steps = tuple(steps) if isinstance(steps, Iterable) else (steps,)
    if len(steps) == 2 and steps[0] is not None:
        whole_numbers("steps", [number for number in steps if number is not None])
        if steps[1] is None or steps[1] > steps[0]:
            return steps
    raise ValueError(
        f"steps is (first, the one after the last), None for to the end; got {steps}: write (4, 8)"
    )
