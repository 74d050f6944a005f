"""Files that three readers wrote who had not seen the code before, kept as they wrote them: a rule,
a selector, a statistic and an unmasking rule each, with a test of its own in every file.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from sinklab.core.registry import rules, selectors, statistics, unmasking_rules

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "by_readers"


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")))
def test_the_file_of_a_reader_still_works(file, monkeypatch):
    # two readers chose the same name
    for registry in (rules, selectors, statistics, unmasking_rules):
        monkeypatch.setattr(registry, "_classes", dict(registry._all()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
