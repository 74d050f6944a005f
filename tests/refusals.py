"""Refusals: a call, and a name or number of the message by which it is refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(fragment: str, call: Callable, /, *given: Any, **options: Any) -> None:
    """Check that a call is refused by a ValueError whose message has this fragment."""
    __tracebackhide__ = True
    with refusing(fragment):
        call(*given, **options)


def refusing(fragment: str) -> Any:
    """A block that is refused by a ValueError whose message has this fragment."""
    return pytest.raises(ValueError, match=fragment)
