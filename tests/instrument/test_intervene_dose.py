"""Matched controls, named protocols and the dose beside a score, held to loops written out."""

# B batch, L layers, H heads, S keys
import math

import pytest
import torch
from probed import IDS, TEXTS, padding

from refusals import refused
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys, intervene, trace
from sinklab.core.sinks import Excess, find_sinks
from sinklab.lab.measures import EqualMass, MaskSinks, by_protocol
from sinklab.lab.measures.controls import TOLERANCE
from tiny_models import llama


@pytest.mark.parametrize("padded, rule", [(True, None), (False, Excess(0.9))])
def test_sinks_and_their_control_hold_the_same_mass_in_the_same_heads(padded, rule):
    model, (given, _) = llama().double(), padding(padded)
    logs = []
    for arm in ("keys", "control"):
        keys = TopKeys(1) if rule is None else SinkKeys(rule, 1)
        edit = BlockKeys(EqualMass(keys, None if rule else Excess(0.9), arm), when="now")
        with torch.no_grad(), intervene(model, edit) as log:
            model(TEXTS[0], **given)
        logs.append(log)
    # in the first layer nothing depends on the edits before it
    arms = [(log.removals[0]["held"][:, 0], log.removals[0]["matched"][:, 0]) for log in logs]
    (sinks_BH, matched_BH), (control_BH, same_BH) = arms
    torch.testing.assert_close(matched_BH, same_BH, equal_nan=True)
    both_BH = matched_BH == 1
    assert both_BH.any() and (matched_BH == 0).any()
    assert ((control_BH / sinks_BH - 1).abs()[both_BH] <= TOLERANCE + 1e-6).all()
    assert (sinks_BH[~both_BH] == 0).all() and (control_BH[~both_BH] == 0).all(), (
        "both arms leave the head out"
    )
    assert logs[0].dose().matched == pytest.approx(float(logs[0].removals[0]["matched"].nanmean()))
    assert (logs[1].removals[0]["sinks"].nan_to_num() == 0).all(), (
        "no sink is among what controls hide"
    )


def test_the_log_counts_sinks_among_the_keys_that_were_chosen():
    model, rule = llama().double(), Excess(0.3)
    with torch.no_grad(), trace(model) as recording:
        model(IDS)
    edit = MaskSinks(k=3, when="now", layers=[0], counted_by=rule)
    with torch.no_grad(), intervene(model, edit) as log:
        model(IDS)
    received_BHS = recording.received[0][:, 0]
    best_BHM = received_BHS.topk(3).indices
    sinks_BH = find_sinks(received_BHS, rule, received_BHS.shape[-1]).gather(-1, best_BHM).sum(-1)
    assert torch.equal(log.removals[0]["sinks"][:, 0].long(), sinks_BH)
    dose = log.dose()
    assert dose.sinks == pytest.approx(sinks_BH.sum().item() / (3 * sinks_BH.numel()))
    assert 0 < dose.sinks < 1 and dose.keys == 3
    held = received_BHS.gather(-1, best_BHM).sum(-1) / IDS.shape[1]
    assert dose.held == pytest.approx(
        held.mean().item(), abs=1e-6
    ) and dose.removed == pytest.approx(dose.held, abs=1e-6)
    assert math.isnan(dose.overlap) and math.isnan(dose.matched)


def test_a_protocol_says_when_keys_are_chosen_and_whether_they_stay_blocked():
    rule = Excess(1.5)
    assert by_protocol("paper", 2, rule) == MaskSinks(2, when="previous", counted_by=rule)
    assert by_protocol("held", 2) == MaskSinks(2, when="kept", limit=2)
    assert by_protocol("rule", 2, rule) == BlockKeys(SinkKeys(rule, 2), when="kept", limit=2)
    assert by_protocol("clean", 2) == MaskSinks(2, when="clean")
    refused(r"paper, held, rule, clean.*'papr'", by_protocol, "papr", 1)


def test_without_a_source_a_closed_loop_runs():
    assert MaskSinks(1).when is None
    with torch.no_grad(), intervene(llama(), MaskSinks(1), allow_idle=True) as log:
        pass
    assert log.handlers[0].intervention.when == "previous"
