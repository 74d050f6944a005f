"""An edit that never had an opportunity to act is refused at the end of its block; one that found
nothing is not.
"""

from __future__ import annotations

import pytest
import torch

from sinklab.core.probing import (
    MaskPositions,
    MaskSinks,
    TruncateContext,
    WindowAttention,
    intervene,
)
from sinklab.core.registry import interventions
from sinklab.core.sampling import Canvas, denoise
from sinklab.lab.caching import DualCache
from tiny_diffusion import tiny_model
from tiny_models import HandWritten

IDS = torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(1))
LOOPS = [MaskSinks(1), MaskSinks(1, removal="evict"), MaskSinks(1, source="carried", limit=2)]


@pytest.mark.parametrize("edit", [*LOOPS, MaskSinks(epsilon=0.5)])
def test_a_closed_loop_over_one_forward_is_refused(edit: MaskSinks) -> None:
    model = HandWritten()
    message = (
        r"^mask_sinks had no opportunity to act in this block \(forwards: 1\): "
        rf"when='{edit.when or 'previous'}' removes what "
        r"the step before chose, and no sequence had a second step; run more than one .*, or "
        r"choose .*"
        r"when='clean', or accept that with .*allow_idle=True"
    )
    with pytest.raises(ValueError, match=message), intervene(model, edit) as log:
        model(IDS)
    assert list(log.idle) == ["mask_sinks"]
    with intervene(model, edit) as log:
        model(IDS)
        model(IDS)
    assert log.idle == {}


@pytest.mark.parametrize(
    ("edit", "step"),
    [
        (MaskPositions(1, steps=(2, 4)), 2),
        (MaskPositions(1, steps=(2, None)), 2),
        (TruncateContext(0, 2, 3), 3),
    ],
)
def test_a_first_step_that_is_never_reached_is_refused(edit: object, step: int) -> None:
    model = HandWritten()
    message = (
        rf"{interventions.name_of(edit)} had .* \(forwards: {step}\): it begins at step "
        rf"{step} .*; begin earlier"
    )
    with pytest.raises(ValueError, match=message), intervene(model, edit):
        for _ in range(step):
            model(IDS)
    with intervene(model, edit):
        for _ in range(step + 1):
            model(IDS)


def test_steps_count_the_forwards_of_guidance_together_and_begin_anew_after_a_reset() -> None:
    model = HandWritten()
    message = r"\(forwards: 2\): when='previous', forwards_per_step=2 removes what .* second step"
    with (
        pytest.raises(ValueError, match=message),
        intervene(model, MaskSinks(1), forwards_per_step=2),
    ):
        model(IDS)
        model(IDS)
    with (
        pytest.raises(ValueError, match=r"\(forwards: 2\): it begins at"),
        intervene(model, TruncateContext(0, 2, 1)) as log,
    ):
        model(IDS)
        log.reset()
        model(IDS)


@pytest.mark.parametrize(
    "edit",
    [
        MaskSinks(1),
        MaskSinks(1, source="clean_pass"),
        MaskPositions(1),
        WindowAttention(3),
        TruncateContext(0, 2, 0),
    ],
)
def test_forwards_of_a_clean_pass_are_no_opportunity(edit: object) -> None:
    model = HandWritten()
    message = rf"{interventions.name_of(edit)} had .* \(forwards: 0, under log\.probing\(\): 2\)"
    with pytest.raises(ValueError, match=message), intervene(model, edit) as log, log.probing():
        model(IDS)
        model(IDS)
    with (
        pytest.raises(ValueError, match=r"forwards: 1, .*probing\(\): 1"),
        intervene(model, *LOOPS[:1]) as log,
    ):
        with log.probing():
            model(IDS)
        model(IDS)


def test_a_dose_of_zero_is_a_result() -> None:
    model = HandWritten()
    seen = WindowAttention(30)
    with intervene(
        model, MaskSinks(epsilon=99), seen, MaskSinks(epsilon=99, source="clean_pass")
    ) as log:
        with log.probing():
            model(IDS)
        model(IDS)
        model(IDS)
    assert {removal.removed_BLH.sum().item() for removal in log.removals} == {0}


def test_the_one_that_had_none_is_named_among_several() -> None:
    model = HandWritten()
    edits = MaskPositions(1), MaskSinks(1, source="clean_pass"), MaskSinks(1)
    with (
        pytest.raises(ValueError, match=r"^mask_sinks#2 had no"),
        intervene(model, *edits) as log,
    ):
        with log.probing():
            model(IDS)
        model(IDS)


def test_what_is_accepted_is_named_in_the_log() -> None:
    model = HandWritten()
    plain = model(IDS)
    with intervene(model, *LOOPS[:2], TruncateContext(0, 2, 1), allow_idle=True) as log:
        assert torch.equal(model(IDS), plain)
    assert list(log.idle) == ["mask_sinks", "mask_sinks#2", "mask_positions"]
    assert "step 1" in log.idle["mask_positions"] and log.removals == []


def test_a_block_in_which_nothing_ran_or_that_failed_says_nothing_of_it() -> None:
    model = HandWritten()
    with intervene(model, MaskSinks(1)) as log:
        pass
    assert log.idle == {}
    with pytest.raises(KeyError), intervene(model, MaskSinks(1)):
        model(IDS)
        raise KeyError


@pytest.mark.parametrize("cache", [None, DualCache()])
@pytest.mark.parametrize("edit", LOOPS)
def test_a_decoding_of_one_step(cache: object, edit: MaskSinks) -> None:
    model = tiny_model(1)
    canvas = Canvas.from_prompts([[5, 6, 7, 8]], new_tokens=6, mask_id=model.config.mask_token_id)
    with (
        pytest.raises(ValueError, match="more than one denoising step"),
        intervene(model, edit),
    ):
        list(denoise(model.denoiser(), canvas, cache=cache, steps=1))
    with intervene(model, edit) as log:
        list(denoise(model.denoiser(), canvas, cache=cache, steps=2))
    assert len(log.removals) == 1
