"""What a file registers, held to the suites of its kinds."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.decoding import check_decoding
from conformance.models import check_sink
from conformance.probing import check_intervention, check_rule, check_statistic
from conformance.runs import check_study
from conformance.values import check_text
from sinklab.core import registry
from sinklab.core.instrument import BlockKeys, TopKeys
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.registry import studies

SUITES: dict[str, Callable[..., None]] = {
    "rules": check_rule,
    "statistics": check_statistic,
    "interventions": check_intervention,
    "selectors": lambda keys: check_intervention(BlockKeys(keys, when="now")),
    "removals": lambda how: check_intervention(BlockKeys(TopKeys(1), when="now", how=how)),
    "unmasking_rules": lambda rule: check_decoding("rule", rule),
    "caches": lambda cache: check_decoding("cache", cache),
    "sinks": check_sink,
    "studies": lambda name: check_study(studies[name](), load("tiny")),
}
"""Registry -> the suite of what is registered in it."""


def check_file(file: Path, options: Mapping[str, str] = {}) -> list[str]:
    """Hold each class that a loaded plug-in registers to the suite of its kind, some with other
    options than the defaults; returns their names.
    """
    found = []
    for group, suite in SUITES.items():
        known = registry.REGISTRIES[group]
        for name, kind in known.items():
            if getattr(sys.modules.get(kind.__module__), "__file__", "") == str(file.resolve()):
                value: Any = name
                if group not in ("sinks", "studies"):
                    value = check_text(known, options.get(name, name))
                suite(value)
                found.append(name)
    return found
