"""Edits of the papers, made of `BlockKeys`: the most attended keys, named positions, and the named
protocols with their controls.
"""

from collections.abc import Iterable
from typing import Any

from sinklab.core.errors import one_of
from sinklab.core.instrument.edits.block_keys import BlockKeys
from sinklab.core.instrument.edits.selectors import Positions, Selector, SinkKeys, TopKeys
from sinklab.core.sinks import DEFAULT, Rule
from sinklab.lab.measures.controls import EqualMass, Random
from sinklab.lab.measures.names import ARMS, PROTOCOLS


def MaskSinks(k: int, **how: Any) -> BlockKeys:
    """``BlockKeys(TopKeys(k), **how)``: the k most attended keys of every head are blocked
    (arXiv 2510.15731, section 4.3).
    """
    return BlockKeys(TopKeys(k), **how)


def MaskPositions(
    positions: int | Iterable[int] = (), added: int | Iterable[int] = (), **how: Any
) -> BlockKeys:
    """``BlockKeys(Positions(positions, added), when="now", **how)``: the same canvas positions, or
    added sinks, are blocked in every head. With ``steps=(8, None)`` a text is written to step 8,
    and on without them.
    """
    return BlockKeys(Positions(positions, added), when="now", **how)  # type: ignore[arg-type]


def in_place_of(
    keys: Selector, arm: str, rule: Rule | None = None, *, fewer: bool = False
) -> Selector:
    """The selector itself ("sinks"), its control of this name, or "matched", the arm that
    "equal_mass" is compared with; `rule` as in `EqualMass`, `fewer` as in `Random`. Raises
    ValueError for another name.
    """
    one_of("control", arm, ARMS)
    if arm == "sinks":
        return keys
    if arm == "random":
        return Random(keys, fewer=fewer)
    return EqualMass(keys, rule, "control" if arm == "equal_mass" else "keys")


def by_protocol(
    protocol: str,
    k: int,
    rule: Rule | None = None,
    *,
    control: str = "sinks",
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
        control: takes other keys in their place, as in `in_place_of`.
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
    keys = in_place_of(keys, control, counted_by, fewer=fewer)
    return BlockKeys(keys, when=when, counted_by=counted_by, **options)
