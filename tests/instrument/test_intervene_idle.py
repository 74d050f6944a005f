"""An edit that never had an opportunity to act is refused at the end of its block; one that found
nothing is not.
"""

import pytest
import torch
from probed import IDS

from refusals import refusing
from sinklab.core.instrument import BlockKeys, Dose, SinkKeys, intervene
from sinklab.core.sinks import Excess
from sinklab.lab.measures import MaskPositions, MaskSinks, WindowAttention
from sinklab.lab.scoring import ClipChannel
from tiny_models import HandWritten

LOOPS = [MaskSinks(1), MaskSinks(1, when="kept", limit=2)]


def test_a_dose_of_zero_is_a_result():
    model = HandWritten()
    plain = model(IDS)
    nobody = [
        BlockKeys(SinkKeys(Excess(99)), **how)
        for how in ({}, {"when": "clean"}, {"how": "zero_value"})
    ]
    with intervene(model, *nobody, WindowAttention(30)) as log:
        with log.probing():
            model(IDS)
        for _ in range(3):
            assert torch.equal(model(IDS), plain)
    for removal in log.removals:
        assert removal["keys"].sum() == removal["removed"].sum() == 0
        assert removal["left"].unique().tolist() == [12]
    told = "0.00 keys a head, held 0.0\u00a0% of the attention, 0.0\u00a0% removed"
    assert str(log.dose("block_keys")) == told and str(Dose()) == "nothing blocked"


def run(model, log, forwards):
    """A forward for each letter: f one of the run, p one of a clean pass, r a reset."""
    for letter in forwards:
        if letter == "p":
            with log.probing():
                model(IDS)
        elif letter == "r":
            log.reset()
        else:
            model(IDS)


FIRST = "block_keys had no opportunity"
LATE = MaskPositions(1, steps=(2, None))
CLEAN = MaskSinks(1, when="clean")


@pytest.mark.parametrize(
    "edits, forwards, message, enough",
    [
        *(
            (edit, "f", rf"^{FIRST}.*\(forwards: 1\): .*when='now'.*allow_idle=True", "ff")
            for edit in LOOPS
        ),
        (LATE, "ff", r"^block_keys .*forwards: 2\): .* step 2", "fff"),
        (MaskPositions(range(0, 2), steps=(1, None)), "frf", r"forwards: 2\): .* step 1", "frff"),
        (MaskSinks(1), "pf", r"^block_keys .*forwards: 1, under log\.probing\(\): 1\)", "pff"),
        *(
            (edit, "pp", r"forwards: 0, under log\.probing\(\): 2\)", "ppff")
            for edit in (CLEAN, WindowAttention(3), ClipChannel(channels=0, limit=1.0))
        ),
        ((MaskPositions(1), CLEAN, MaskSinks(1)), "pf", r"^block_keys#3 had no opportunity", "pff"),
    ],
)
def test_an_edit_that_had_no_opportunity_is_refused(edits, forwards, message, enough):
    edits = edits if isinstance(edits, tuple) else (edits,)
    model = HandWritten()
    with refusing(message), intervene(model, *edits) as log:
        run(model, log, forwards)
    assert len(log.idle) == 1
    with intervene(model, *edits) as log:
        run(model, log, enough)
    assert log.idle == {}


def test_steps_count_the_forwards_of_guidance_together():
    model = HandWritten()
    with (
        refusing("forwards_per_step=2"),
        intervene(model, MaskSinks(1), forwards_per_step=2) as log,
    ):
        run(model, log, "ff")


def test_what_is_accepted_is_named_in_the_log():
    model = HandWritten()
    plain = model(IDS)
    with intervene(
        model, *LOOPS[:2], MaskPositions(range(0, 2), steps=(1, None)), allow_idle=True
    ) as log:
        assert torch.equal(model(IDS), plain)
    assert list(log.idle) == ["block_keys", "block_keys#2", "block_keys#3"]
    assert "step 1" in log.idle["block_keys#3"] and log.removals == []


def test_a_block_in_which_nothing_ran_or_that_failed_says_nothing_of_it():
    model = HandWritten()
    with intervene(model, MaskSinks(1)) as log:
        pass
    assert log.idle == {}
    with pytest.raises(KeyError), intervene(model, MaskSinks(1)):
        model(IDS)
        raise KeyError
