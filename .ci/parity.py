"""Given pytest's junit file of a run with golden data at hand: tests against it exist, and none of them was skipped."""

import re
import sys
from xml.etree import ElementTree

GOLDEN = re.compile("golden|parity", re.IGNORECASE)

cases = {
    f"{case.get('classname')}.{case.get('name')}": case for case in ElementTree.parse(sys.argv[1]).iter("testcase")
}
golden = [name for name in cases if GOLDEN.search(name)]
skips = {name: skip.get("message") or "" for name, case in cases.items() if (skip := case.find("skipped")) is not None}
missed = [name for name, why in skips.items() if GOLDEN.search(name) or GOLDEN.search(why) or "SINKLAB_SHARED" in why]
print(f"{len(cases)} tests, {len(golden)} against golden data, {len(skips)} skipped")
for name, why in skips.items():
    print(f"skipped: {name}: {why}")
if missed or not golden:
    sys.exit(f"golden data is at hand, but not every test against it ran: {missed or 'there is none'}")
