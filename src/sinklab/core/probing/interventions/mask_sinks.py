"""Short names of `BlockKeys`: `MaskSinks`, and the named protocols."""

from __future__ import annotations

from typing import Annotated, Any, cast

from sinklab.core.errors import one_of
from sinklab.core.probing.interventions.block_keys import BlockKeys
from sinklab.core.probing.interventions.removals import Mask, MeanValue, Removal
from sinklab.core.probing.interventions.selectors import (
    ByLayer,
    CountControl,
    EqualMass,
    Lowest,
    Matched,
    Random,
    Recent,
    Selector,
    SinkKeys,
    Sparing,
    TopKeys,
)
from sinklab.core.probing.scope import CONTROLS, PROTOCOLS
from sinklab.core.registry import interventions, parameters, removals, rules
from sinklab.core.sinks.rules import DEFAULT, Excess, Rule

SOURCES = {"now": "now", "closed_loop": "previous", "clean_pass": "clean", "carried": "kept"}
"""Values of ``source`` -> `BlockKeys.when`."""
COUNT_CONTROLS: dict[str, type[CountControl]] = {
    "random": Random,
    "recent": Recent,
    "lowest": Lowest,
}


def mask_sinks_arguments(edit: Any) -> dict[str, Any] | None:
    """Arguments of `MaskSinks` that make this edit, those that differ from the defaults; None if
    none do.
    """
    if not isinstance(edit, BlockKeys) or edit.steps is not None:
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
    if isinstance(keys, EqualMass | Matched) and keys.rule == edit.counted_by:
        given |= {"control": "equal_mass"} if isinstance(keys, EqualMass) else {"matched": True}
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
    return {
        name: given[name]
        for name, one in parameters(MaskSinks).items()
        if name in given and given[name] != one.default
    }


@interventions.register("mask_sinks", mask_sinks_arguments)
def MaskSinks(
    k: int | None = None,
    epsilon: float | None = None,
    *,
    layers: tuple[int | str, ...] | None = None,
    heads: tuple[int, ...] | None = None,
    removal: Annotated[str | Removal, removals] = Mask(),  # noqa: B008
    source: str | None = None,
    selector: str | None = None,
    queries: str | None = None,
    values: str | None = None,
    limit: int | None = None,
    rule: Annotated[Rule | str | None, rules] = None,
    control: str = "sinks",
    matched: bool = False,
    counted_by: Annotated[Rule | str | None, rules] = None,
    seed: int = 0,
    spare_prefix: bool = False,
    spare: tuple[int, ...] = (),
    shared: str = "head",
) -> BlockKeys:
    """Short name of `BlockKeys` for sinks: the k keys that receive most, or those of a rule.

    Args:
        k: keys a head: the k that receive most, or with a rule at most k of its sinks.
        epsilon: short for ``rule=Excess(epsilon)``.
        rule: takes `SinkKeys` in place of `TopKeys`.
        source: "now", "closed_loop", "clean_pass" or "carried", which `BlockKeys.when` calls now,
            previous, clean and kept.
        control: "sinks", or "random", "recent", "lowest", "equal_mass" keys in their place.
        matched: takes `Matched`, the arm that ``control="equal_mass"`` is compared with.
        counted_by: without a rule, says which keys the log counts as sinks.
        seed: of a random control.
        spare_prefix: never choose added sinks.
        spare: canvas positions that are never chosen.
        shared: "layer" for the same keys in all heads.
        removal: `BlockKeys.how`.
        values: with ``removal="mean_value"``, its file.
        selector: `BlockKeys.scores`.
        queries: as in `BlockKeys`.
        limit: as in `BlockKeys`.
        layers: as in `BlockKeys`.
        heads: as in `BlockKeys`.

    Raises:
        ValueError: if neither k nor a rule is given, and for values outside those listed.
    """
    rule = rules.parsed(rule)
    counted_by = rules.parsed(counted_by)
    if rule is not None and (epsilon is not None or counted_by is not None):
        raise ValueError(
            f"rule={rule} says which keys are sinks, got epsilon={epsilon} and "
            f"counted_by={counted_by} beside it: leave them out"
        )
    if rule is None and (k is None) == (epsilon is None):
        raise ValueError(
            "MaskSinks takes k, how many keys, or epsilon, how far above an even share; got "
            f"k={k} and epsilon={epsilon}: give one of them, or a rule, with k or without"
        )
    if epsilon is not None:
        rule = Excess(epsilon)
    one_of("source", source, (*SOURCES, None))
    one_of("shared", shared, ("head", "layer"))
    keys: Selector = TopKeys(cast("int", k)) if rule is None else SinkKeys(rule, k)
    keys = in_place_of(keys, control, matched=matched, rule=counted_by)
    if len(spare) or spare_prefix:
        keys = Sparing(keys, spare, spare_prefix)
    return BlockKeys(
        ByLayer(keys) if shared == "layer" else keys,
        queries=queries,
        when=None if source is None else SOURCES[source],
        how=removal_of(removal, values),
        scores=selector,
        limit=limit,
        counted_by=counted_by,
        seed=seed,
        layers=layers,
        heads=heads,
    )


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
    return found if values is None else MeanValue(values)


def by_protocol(
    protocol: str,
    k: int,
    rule: Rule | None = None,
    *,
    control: str = "sinks",
    matched: bool = False,
    **fields: Any,
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
        control: takes other keys in their place, as in `MaskSinks`.
        matched: as in `MaskSinks`.
        fields: further fields of `BlockKeys`.

    Raises:
        ValueError: for another name.
    """
    one_of("protocol", protocol, PROTOCOLS)
    counted_by = None if protocol == "rule" else rule
    keys: Selector = SinkKeys(rule or DEFAULT, k) if protocol == "rule" else TopKeys(k)
    when = {"paper": "previous", "clean": "clean"}.get(protocol, "kept")
    return BlockKeys(
        in_place_of(keys, control, matched=matched, rule=counted_by),
        when=when,
        limit=k if when == "kept" else None,
        counted_by=counted_by,
        **fields,
    )


def in_place_of(
    keys: Selector, control: str, *, matched: bool = False, rule: Rule | None = None
) -> Selector:
    """The selector itself ("sinks"), its control of this name, or with `matched` the arm that
    "equal_mass" is compared with. Raises ValueError for another name, and for a control that has no
    such arm.
    """
    one_of("control", control, CONTROLS)
    if matched and control in COUNT_CONTROLS:
        raise ValueError(
            f"matched=True takes heads with a control of equal mass, but control={control!r} "
            'matches the number of keys: take control="sinks" or "equal_mass"'
        )
    if control in COUNT_CONTROLS:
        return COUNT_CONTROLS[control](keys)
    if control == "equal_mass":
        return EqualMass(keys, rule)
    return Matched(keys, rule) if matched else keys
