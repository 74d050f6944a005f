"""The code of the day says what the code of commit 6cebc001 said, cell by cell, but for the cells
that are known to be wrong and named. make.py writes what is compared with.
"""

from importlib import import_module

import pytest

from frozen import SECTIONS, cells_of, changes, read

pytestmark = [pytest.mark.ring("extras"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "group"), [(name, group) for name in SECTIONS for group in SECTIONS[name]]
)
def test_nothing_changed_that_was_not_meant_to(name, group):
    new = cells_of(name, group)
    if not new:
        pytest.skip("needs data or a tour that are not here")
    differ = [*changes(name, new, f"{group}/" if group else "")]
    assert not differ, "\n".join([f"{len(differ)} differences in {name}", *differ[:40]])


@pytest.mark.parametrize("name", SECTIONS)
def test_an_exception_names_frozen_cells(name):
    for beginning in getattr(import_module(name), "EXCEPTED", {}):
        assert any(cell.startswith(beginning) for cell in read(name)), beginning
