"""Every architecture is recorded and edited right, or refused by name; ``benchmarks/zoo.py`` runs
all there is.
"""

import pytest
from architectures import ZOO
from checked import WAYS, held

# what transformers says of its own classes while they are built and run
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

REFUSED = {
    "capped scores": "softcap",
    "learned sink logits": "s_aux",
    "an attention of its own": "an attention of its own",
}


@pytest.mark.parametrize("number", range(len(ZOO)), ids=[f"{one.name}-{one.form}" for one in ZOO])
def test_a_draw_of_the_zoo_is_right_or_refused_by_name(number):
    architecture = ZOO[number]
    ways = [way for way in WAYS if way != "steps" or architecture.kind != "encoder"]
    way = ways[number % len(ways)]
    reason = REFUSED.get(architecture.form, "")
    if way == "steps" and "windows" in architecture.form:
        # the cache drops what no window reaches
        reason = "use_cache=False"
    found = held(architecture, way)
    if "does not support activation checkpointing" in found:
        # nor is there anything to be wrong
        found = held(architecture, "left")
    if reason:
        assert found.startswith("refused") and reason in found
        # no remedy is given that changes nothing
        assert reason != architecture.form or "set_attn_implementation" not in found
    else:
        assert found == "right"


def test_the_zoo_has_forty_architectures_of_every_kind():
    assert len({one.name for one in ZOO}) >= 40
    assert {one.kind for one in ZOO} == {"decoder", "encoder"}
