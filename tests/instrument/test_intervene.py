"""Interventions against a slow twin that masks by hand, their controls, their log, and that nothing
stays.
"""

# B batch, L layers, H heads, S keys
import pytest
import torch
from probed import IDS

from refusals import refused, refusing
from sinklab.core.instrument import intervene, trace
from sinklab.lab.measures import MaskPositions, MaskSinks, WindowAttention
from tiny_models import STYLES, HandWritten


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "edit",
    [
        MaskSinks(3),
        MaskPositions(5, how="zero_value"),
        WindowAttention(2),
    ],
)
def test_every_kind_of_call_can_be_edited_and_is_restored(style, edit):
    model = HandWritten(style)
    plain = model(IDS)
    with intervene(model, edit):
        model(IDS)
        second = model(IDS)
    assert not torch.allclose(plain, second, atol=1e-3)
    assert second.isfinite().all()
    assert torch.equal(plain, model(IDS))


def test_a_forward_that_fails_does_not_count_as_the_previous_step():
    model = HandWritten()

    def fail(*_):
        raise RuntimeError

    with intervene(model, MaskSinks(1), allow_idle=True) as log:
        handle = model.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError):
            model(IDS)
        handle.remove()
        model(IDS)
    assert log.removals == [] and log.forwards == 1


def test_clean_pass_selects_in_unedited_forwards_and_leaves_them_alone():
    model = HandWritten()
    plain = model(IDS)
    with intervene(model, MaskSinks(2, when="clean")) as log, trace(model) as recording:
        for _ in range(2):
            with log.probing():
                assert torch.equal(plain, model(IDS))
            edited = model(IDS)
            recording.mark()
    assert not torch.allclose(plain, edited)
    assert log.forwards == 2 and len(log.removals) == 2 and recording.forwards_per_step == [1, 1]
    assert torch.equal(log.removals[0].columns_BLHM, log.removals[1].columns_BLHM)
    assert log.removals[1]["overlap"].unique().tolist() == [1.0]
    with (
        refusing("none was run"),
        intervene(model, MaskSinks(2, when="clean")),
    ):
        model(IDS)


def test_a_clean_pass_in_another_and_one_that_is_refused_leave_what_was_outside():
    model = HandWritten()
    plain = model(IDS)
    with intervene(model, MaskSinks(2, when="clean"), allow_idle=True) as log:
        with log.probing():
            with log.probing():
                model(IDS)
            assert torch.equal(model(IDS), plain)
        assert log.probed == 2 and log.forwards == 0 and not log.is_probing
    with intervene(model, MaskPositions(1, layers=5), allow_idle=True) as log:
        with refusing("0 … 0"), log.probing():
            # a forward that ends with the block
            model.blocks[0](model.embed(IDS))
        assert log.tap.suspended == 0 and not log.is_probing


def test_reset_starts_a_new_sequence():
    model = HandWritten()
    plain = model(IDS[:1])
    with intervene(model, MaskSinks(1), allow_idle=True) as log:
        model(IDS)
        refused(r"call log\.reset\(\)", model, IDS[:1])
        log.reset()
        assert torch.equal(plain, model(IDS[:1]))


def test_what_cannot_be_counted_is_refused():
    with refusing("got 0"), intervene(HandWritten(), forwards_per_step=0):
        pass
