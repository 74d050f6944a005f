"""Errors for wrong arguments name what is expected, what was given, and what to do."""

import dataclasses
import difflib
import operator
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any


def near(name: object, known: Iterable[object]) -> str:
    """``"did you mean 'x' or 'y'?"``, at most three, or ""."""
    found = difflib.get_close_matches(str(name), dict.fromkeys(map(str, known)))
    if not found:
        return ""
    return f"did you mean {' or '.join(map(repr, found))}?"


def _error(fact: str, remedy: str) -> ValueError:
    return ValueError("; ".join(filter(None, (fact, remedy))))


def one_of(what: str, value: object, allowed: Collection[object], remedy: str = "") -> None:
    """Raises ValueError unless ``value`` is allowed, with those near or else the remedy."""
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise _error(
            f"{what} must be one of {names}, but is {value!r}", near(value, allowed) or remedy
        )


def known_fields(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a name that is no field of ``what``."""
    fields = tuple(known)
    for name in given:
        if name not in fields:
            hint = near(name, fields) or f"it has {', '.join(fields) or 'none'}"
            raise ValueError(f"{what} has no field {name!r}; {hint}")


def limited(default: Any, **limits: Any) -> Any:
    """A dataclass field with limits, of a tuple for every item.

    Args:
        default: of the field.
        limits: any of `at_least`, `above`, `at_most`, `below` and `one_of`; `read`, a function that
            makes the value of (name, given), or raises; `needed=True`, by which an empty tuple or
            text is refused; `free=True`, for what may differ in a continued run, as it changes
            speed or place alone; and `remedy`, advice for the error of a limit.
    """
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True)
class Checked:
    """Settings that are held to the limits of their fields. Raises ValueError beyond them.

    Lists become tuples, of choices each once, as does a single value if the default is a tuple.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, tuple) and isinstance(value, str | int | float):
                value = (value,)
            if "read" in field.metadata:
                value = field.metadata["read"](field.name, value)
            if field.metadata.get("needed") and not value:
                raise ValueError(f"{field.name} must not be empty")
            if isinstance(value, list | tuple):
                value = tuple(within_limits(field, one) for one in value)
                if "one_of" in field.metadata:
                    value = tuple(dict.fromkeys(value))
            else:
                value = within_limits(field, value)
            object.__setattr__(self, field.name, value)


_LIMITS = {
    "at_least": (operator.ge, "at least"),
    "above": (operator.gt, "more than"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}
WHOLE = ("int", "int | None", int, int | None)
"""Annotations of whole numbers."""


def as_int(number: Any) -> int | None:
    """A whole number of any kind, numpy's too, as an int; else None."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)
    except TypeError:
        return None


def within_limits(field: dataclasses.Field, value: Any) -> Any:
    """The value of a field: registered values from text, whole numbers as int. Raises ValueError
    beyond the field's limits, which None never is.
    """
    if value is None:
        return None
    if "registry" in field.metadata:
        return field.metadata["registry"].parse(value)
    left_out = ""
    if field.default is None:
        left_out = " or left out"
    if field.type in WHOLE:
        number = as_int(value)
        if number is None:
            raise ValueError(f"{field.name} must be a whole number{left_out}, but is {value!r}")
        value = number
    if "one_of" in field.metadata:
        one_of(field.name, value, field.metadata["one_of"])
    limits = [(*_LIMITS[name], limit) for name, limit in field.metadata.items() if name in _LIMITS]
    if not all(holds(value, limit) for holds, _, limit in limits):
        words = " and ".join(f"{word} {limit:g}" for _, word, limit in limits)
        words = words.replace("less than inf", "finite")
        raise _error(
            f"{field.name} must be {words}{left_out}, but is {value!r}",
            field.metadata.get("remedy", ""),
        )
    if field.name == "seed" and not 0 <= value < 1 << 63:
        raise ValueError(f"a seed must be 0 to 2**63 - 1, but is {value!r}")
    return value


def check_count(name: str, number: int | None, remedy: str) -> None:
    """Raises ValueError for a count below 1, but None passes."""
    if number is not None and number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}; {remedy}")


def check_tensor(
    name: str, given: Any, shape: Iterable[int | None], kind: str = "", remedy: str = ""
) -> None:
    """Raises ValueError unless this is a tensor or array of the shape, where None is any size, and
    dtype `kind`: its name, "float" for any float, "" for any.
    """
    wanted = tuple(shape)
    try:
        found, dtype = tuple(given.shape), str(given.dtype).removeprefix("torch.")
    except AttributeError:
        what = type(given).__name__
        raise _error(f"{name} must be a tensor, but is a {what}", remedy) from None
    fits = len(wanted) == len(found) and all(
        size in (None, own) for size, own in zip(wanted, found, strict=True)
    )
    if not fits or not (kind in ("", dtype) or (kind == "float" and kind in dtype)):
        sizes = ", ".join(str(size or "any") for size in wanted)
        rule = f"{kind} of shape".lstrip()
        raise _error(f"{name} must be {rule} ({sizes}), but is {dtype} of shape {found}", remedy)


def whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    """One number or several (of a tensor too) as a tuple. Raises ValueError for what is no whole
    number, and for numbers below 0.
    """
    numbers: tuple[Any, ...] = (as_int(given),)
    if numbers == (None,):
        with suppress(TypeError):
            numbers = tuple(as_int(number) for number in given)
    if None in numbers or min(numbers, default=0) < 0:
        raise ValueError(
            f"{name} takes whole numbers from 0, one or several, got {given!r}; write a tuple such "
            "as (0, 3), for tokens the ids of tokenizer.convert_tokens_to_ids"
        )
    return numbers


def check_vocabulary(what: str, ids: Sequence[int], size: int) -> None:
    """Raises ValueError for an id without a logit."""
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ValueError(
            f"{what} must lie in the vocabulary, 0 to {size - 1}, got {list(ids)}; check the "
            "tokenizer."
        )
