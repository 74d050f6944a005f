"""The code of the day says what the code of commit 6cebc001 said, cell by cell. make.py writes what
is compared with.
"""

import pytest

from frozen import SECTIONS, cells_of, changes

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
