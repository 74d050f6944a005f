"""Values by the names that the command line and run folders use."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from sinklab.sampling.rules import RULES, Rule
from sinklab.sampling.schedules import SCHEDULES, Schedule


def rule_by_name(name: str, **numbers: Any) -> Rule:
    """The rule called `name` in `RULES`, made with its numbers.

    Raises ValueError that lists the near names, or the rules a number belongs to.
    """
    return made("unmasking rule", RULES, name, numbers)


def schedule_by_name(name: str, **numbers: Any) -> Schedule:
    """The schedule called `name` in `SCHEDULES`, made with its numbers.

    Raises ValueError that lists the near names, or the schedules a number belongs to.
    """
    return made("schedule", SCHEDULES, name, numbers)


def made(what: str, registry: Mapping[str, Any], name: str, numbers: Mapping[str, Any], prefix: str = "") -> Any:
    """`registry[name](**numbers)`; None where the registry holds None. Raises ValueError by name.

    The numbers may carry a prefix that the fields do not have.
    """
    if name not in registry:
        near = difflib.get_close_matches(name, registry, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"pass one of these, or a {what.split()[-1]} object."
        raise ValueError(f"unknown {what} {name!r}; known are {', '.join(sorted(registry))}; {hint}")
    for number, value in numbers.items():
        owners = sorted(other for other, kind in registry.items() if number.removeprefix(prefix) in _fields(kind))
        if name not in owners:
            belongs = f"it belongs to {', '.join(owners)}" if owners else f"no {what} has it"
            raise ValueError(
                f"{number} does not go with the {what} {name!r}, got {number}={value!r}; {belongs}: leave it out or "
                f"choose another {what.split()[-1]}."
            )
    kind = registry[name]
    return None if kind is None else kind(**{number.removeprefix(prefix): value for number, value in numbers.items()})


def checked_object(what: str, value: Any, method: str, *, optional: bool = False) -> None:
    """Raises TypeError for a class in place of its object, and for what lacks the method."""
    if isinstance(value, type):
        raise TypeError(f"a {what} is an object, got the class {value.__name__}; pass {value.__name__}().")
    if not (callable(getattr(value, method, None)) or (optional and value is None)):
        raise TypeError(f"a {what} is a name or an object that has {method}(), got {value!r}; see sinklab.sampling.")


def _fields(kind: Any) -> set[str]:
    return set() if kind is None else {field.name for field in dataclasses.fields(kind)}
