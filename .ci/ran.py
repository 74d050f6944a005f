"""Given pytest's junit file of a run with what some tests need at hand: such tests exist, and none
of them was skipped.

    python .ci/ran.py JUNIT REGEX WHAT

REGEX finds the tests by their names, or by the reason for which they were skipped. WHAT they need,
in words.
"""

import re
import sys
from xml.etree import ElementTree

junit, regex, what = sys.argv[1:]
meant = re.compile(regex, re.IGNORECASE)
cases = {
    f"{case.get('classname')}.{case.get('name')}": case
    for case in ElementTree.parse(junit).iter("testcase")
}
found = [name for name in cases if meant.search(name)]
skips = {
    name: skip.get("message") or ""
    for name, case in cases.items()
    if (skip := case.find("skipped")) is not None
}
missed = [name for name, why in skips.items() if meant.search(name) or meant.search(why)]
print(f"{len(cases)} tests, {len(found)} of {what}, {len(skips)} skipped")
for name, why in skips.items():
    print(f"skipped: {name}: {why}")
if missed or not found:
    sys.exit(f"{what} is at hand, but not every test of it ran: {missed or 'there is none'}")
