"""Short names of `BlockKeys`: `MaskSinks`, those for named positions, and the named protocols."""

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, cast

from sinklab.core.errors import Checked, limited, one_of
from sinklab.core.probing.interventions.block_keys import BlockKeys
from sinklab.core.probing.interventions.removals import Mask, Removal
from sinklab.core.probing.interventions.selectors import Positions, Selector, SinkKeys, TopKeys
from sinklab.core.probing.scope import whole_numbers
from sinklab.core.registry import interventions, registered, removals, rules
from sinklab.core.sinks import DEFAULT, Excess, Rule
from sinklab.lab.measures.controls import (
    COUNT_CONTROLS,
    ByLayer,
    EqualMass,
    Matched,
    Sparing,
    in_place_of,
)
from sinklab.lab.measures.names import CONTROLS, PROTOCOLS
from sinklab.lab.measures.values import MeanValue

SOURCES = {"now": "now", "closed_loop": "previous", "clean_pass": "clean", "carried": "kept"}
"""Values of ``source`` -> `BlockKeys.when`."""


def mask_sinks_fields(edit: Any) -> dict[str, Any] | None:
    """Fields of `MaskSinksOptions` that make this edit, those that differ from the defaults; None
    if none do.
    """
    if not isinstance(edit, BlockKeys):
        return None
    keys = edit.keys
    given: dict[str, Any] = {
        "layers": edit.layers,
        "heads": edit.heads,
        "removal": edit.how,
        "source": next((name for name, when in SOURCES.items() if when == edit.when), None),
        "selector": edit.scores,
        "queries": edit.queries,
        "limit": edit.limit,
        "counted_by": edit.counted_by,
        "seed": edit.seed,
    }
    if isinstance(keys, ByLayer):
        given["shared"] = "layer"
        keys = keys.like
    if isinstance(keys, Sparing):
        given |= {"spare": keys.positions, "spare_prefix": keys.prefix}
        keys = keys.like
    if isinstance(keys, EqualMass) and keys.rule == edit.counted_by:
        given["control"] = "equal_mass"
        keys = keys.like
    elif isinstance(keys, Matched) and keys.rule == edit.counted_by:
        given["matched"] = True
        keys = keys.like
    for name, kind in COUNT_CONTROLS.items():
        if isinstance(keys, kind) and keys == kind(keys.like):
            given["control"] = name
            keys = keys.like
    if isinstance(keys, SinkKeys) and edit.counted_by is None:
        given |= {"rule": keys.rule, "k": keys.k}
    elif isinstance(keys, TopKeys):
        given["k"] = keys.k
    else:
        return None
    given = not_default(MaskSinksOptions, given)
    # fields that the short name lacks, such as steps and beyond, would be lost
    return given if MaskSinks(**given) == edit else None


def not_default(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Values that differ from the defaults of a class, in the order of its fields."""
    own = [field for field in fields(kind) if field.name in given]
    return {one.name: given[one.name] for one in own if given[one.name] != one.default}


@interventions.register("mask_sinks", mask_sinks_fields)
@dataclass(frozen=True)
class MaskSinksOptions(Checked):
    """Short name of `BlockKeys` for sinks: the k keys that receive most, or those of a rule.

    Raises ValueError if neither k nor a rule is given, and for values outside those listed.
    """

    k: int | None = None
    """Keys a head: the k that receive most, or with a rule at most k of its sinks."""
    epsilon: float | None = limited(None, at_least=0)
    """Short for ``rule=Excess(epsilon)``."""
    _: KW_ONLY
    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    removal: Removal = registered(removals, Mask())
    """`BlockKeys.how`."""
    source: str | None = limited(None, one_of=SOURCES)
    """`BlockKeys.when`: "now", "closed_loop" (previous), "clean_pass" (clean), "carried" (kept)."""
    selector: str | None = None
    """`BlockKeys.scores`."""
    queries: str | None = None
    values: str | None = None
    """With the removal "mean_value": its file."""
    limit: int | None = None
    rule: Rule | None = registered(rules, None)
    """Takes `SinkKeys` in place of `TopKeys`."""
    control: str = limited("sinks", one_of=CONTROLS)
    """Other keys in their place: `Random`, `Recent`, `Lowest` or `EqualMass`."""
    matched: bool = False
    """Takes `Matched`, the arm that `EqualMass` is compared with."""
    counted_by: Rule | None = registered(rules, None)
    seed: int = 0
    spare_prefix: bool = False
    spare: tuple[int, ...] = ()
    """Takes `Sparing`, with `spare_prefix`."""
    shared: str = limited("head", one_of=("head", "layer"))
    """"layer": takes `ByLayer`."""

    def made(self) -> BlockKeys:
        """The edit."""
        rule = self.rule
        if rule is not None and (self.epsilon is not None or self.counted_by is not None):
            raise ValueError(
                f"rule={rule} says which keys are sinks, got epsilon={self.epsilon} and "
                f"counted_by={self.counted_by} beside it: leave them out"
            )
        if rule is None and (self.k is None) == (self.epsilon is None):
            raise ValueError(
                "MaskSinks takes k, how many keys, or epsilon, how far above an even share; got "
                f"k={self.k} and epsilon={self.epsilon}: give one of them, or a rule, with k or "
                "without"
            )
        if self.epsilon is not None:
            rule = Excess(self.epsilon)
        keys: Selector
        if rule is not None:
            keys = SinkKeys(rule, self.k)
        else:
            keys = TopKeys(cast("int", self.k))
        keys = in_place_of(keys, self.control, matched=self.matched, rule=self.counted_by)
        if len(self.spare) or self.spare_prefix:
            keys = Sparing(keys, self.spare, self.spare_prefix)
        if self.shared == "layer":
            keys = ByLayer(keys)
        return BlockKeys(
            keys,
            when=SOURCES.get(self.source or ""),
            how=removal_of(self.removal, self.values),
            scores=self.selector,
            queries=self.queries,
            limit=self.limit,
            counted_by=self.counted_by,
            seed=self.seed,
            layers=self.layers,
            heads=self.heads,
        )


def MaskSinks(k: int | None = None, epsilon: float | None = None, **options: Any) -> BlockKeys:
    """`BlockKeys` for sinks, by the fields of `MaskSinksOptions`: ``MaskSinks(k=5)``,
    ``MaskSinks(rule=Gu(0.3), control="random")``. Raises ValueError as that does.
    """
    return MaskSinksOptions(k, epsilon, **options).made()


def removal_of(removal: str | Removal, values: str | None = None) -> Removal:
    """Removal by its text, with the file of reference values that "mean_value" needs. Raises
    ValueError for a file that is not needed, or that is needed and not given.
    """
    found: Removal = removals.parse(removal)
    takes_file = isinstance(found, MeanValue) and not found.file
    if takes_file != (values is not None):
        raise ValueError(
            "values names a file of save_reference_values for removal='mean_value', which needs "
            f"it, got removal={removals.as_text(found)!r} and values={values!r}"
        )
    if values is None:
        return found
    return MeanValue(values)


def mask_positions_fields(edit: Any) -> dict[str, Any] | None:
    """Fields of `MaskPositionsOptions` that make this edit, those that differ from the defaults;
    None if none do.
    """
    if not isinstance(edit, BlockKeys) or not isinstance(edit.keys, Positions):
        return None
    given = {
        "positions": edit.keys.positions,
        "added": edit.keys.added,
        "removal": edit.how,
        "queries": edit.queries,
        "steps": edit.steps,
        "layers": edit.layers,
        "heads": edit.heads,
    }
    if edit != MaskPositions(**given):
        return None
    return not_default(MaskPositionsOptions, given)


@interventions.register("mask_positions", mask_positions_fields)
@dataclass(frozen=True)
class MaskPositionsOptions(Checked):
    """Short name of `BlockKeys` for the same canvas positions in every head, whatever they receive.

    Raises ValueError for no position, and in the run for positions the canvas never has.
    """

    positions: tuple[int, ...] = ()
    """Canvas positions, from 0."""
    _: KW_ONLY
    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    added: tuple[int, ...] = ()
    """Added sinks to take as well, from 0."""
    removal: Removal = registered(removals, Mask())
    """`BlockKeys.how`."""
    queries: str | None = None
    values: str | None = None
    """With the removal "mean_value": its file."""
    steps: tuple[int | None, ...] | None = None

    def made(self) -> BlockKeys:
        """The edit."""
        return BlockKeys(
            Positions(self.positions, self.added),
            when="now",
            how=removal_of(self.removal, self.values),
            queries=self.queries,
            steps=self.steps,
            layers=self.layers,
            heads=self.heads,
        )


def MaskPositions(positions: Any = (), **options: Any) -> BlockKeys:
    """`BlockKeys` for canvas positions, by the fields of `MaskPositionsOptions`. Raises ValueError
    as that does.
    """
    return MaskPositionsOptions(positions, **options).made()


@interventions.register("truncate_context", lambda edit: None)
@dataclass(frozen=True)
class TruncateContextOptions:
    """Short name of `BlockKeys` for truncation in the middle of a run: no query sees positions
    start, …, stop - 1 from a step on.

    These are canvas positions. Queries at them still run and see the others; their tokens are never
    attended. The share of attention the stretch held is `removed_BLH` of the first entry of the
    log.

    Raises ValueError for an empty stretch or negative numbers, and in the run for positions the
    canvas never has.
    """

    start: int
    """First blocked canvas position."""
    stop: int
    """The position after the last blocked one."""
    step: int
    """First step in which they are blocked, counted from 0 in each sequence."""

    def made(self) -> BlockKeys:
        """The edit."""
        whole_numbers("start, stop and step", (self.start, self.stop, self.step))
        if self.stop <= self.start:
            raise ValueError(
                f"stop is larger than start, but start={self.start} and stop={self.stop}: raise "
                "stop"
            )
        return MaskPositions(tuple(range(self.start, self.stop)), steps=(self.step, None))


def TruncateContext(start: int, stop: int, step: int) -> BlockKeys:
    """`BlockKeys` for a stretch of positions from a step on; see `TruncateContextOptions`."""
    return TruncateContextOptions(start, stop, step).made()


def by_protocol(
    protocol: str,
    k: int,
    rule: Rule | None = None,
    *,
    control: str = "sinks",
    matched: bool = False,
    fewer: bool = False,
    **options: Any,
) -> BlockKeys:
    """The edit of a named protocol, for at most `k` keys a head.

    "paper": the k keys that received most at the step before, whatever they hold (arXiv 2510.15731,
    section 4.3). A blocked key receives nothing and is not chosen again, so a lasting sink is
    blocked at every other step. "held": the k keys chosen first stay blocked. "rule": those keys,
    at most k, that the rule calls sinks, and they stay blocked. "clean": the k keys that receive
    most in an unedited forward of the same step.

    Args:
        protocol: one of `PROTOCOLS`.
        k: keys a head.
        rule: of protocol "rule"; with the others the log counts sinks by it.
        control: takes other keys in their place, as in `MaskSinks`; or "matched", the same as
            ``matched=True``.
        matched: as in `MaskSinks`.
        fewer: of a control, as in `Random`.
        options: further fields of `BlockKeys`.

    Raises:
        ValueError: for another name.
    """
    one_of("protocol", protocol, PROTOCOLS)
    counted_by = rule
    keys: Selector = TopKeys(k)
    if protocol == "rule":
        counted_by = None
        keys = SinkKeys(rule or DEFAULT, k)
    when = {"paper": "previous", "clean": "clean"}.get(protocol, "kept")
    if when == "kept":
        options["limit"] = k
    if control == "matched":
        control = "sinks"
        matched = True
    keys = in_place_of(keys, control, matched=matched, rule=counted_by, fewer=fewer)
    return BlockKeys(keys, when=when, counted_by=counted_by, **options)
