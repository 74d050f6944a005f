"""Interventions in real decodings: caches, guidance, padded batches, an autoregressive model that
packs its heads.
"""

# B batch, L layers, H heads, S keys

import pytest
import torch
from probed import IDS, PADDED, PROMPTS, canvas_of, decoded
from torch.testing import assert_close

from refusals import refused
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys, intervene
from sinklab.core.sinks import Excess, find_sinks
from sinklab.core.subject import denoise, guided
from sinklab.core.subject.denoisers import FunctionDenoiser
from sinklab.lab.caching import DualCache
from sinklab.lab.measures import MaskPositions, MaskSinks
from tiny_diffusion import tiny_model
from tiny_models import llama

NEW, BLOCK, SINKS = 6, 3, 1


def decode(model, cache, *edits, prompts=PROMPTS, **options):
    """The log, the recording and the last canvas of a run under these edits."""
    steps, recording, log = decoded(
        model, canvas_of(model, prompts), *edits, cache=cache, **options
    )
    return log, recording, steps[-1].ids_BS


def test_epsilon_finds_what_the_sink_rule_finds_on_the_recording():
    edit = BlockKeys(SinkKeys(Excess(1.0)))
    log, recording, _ = decode(tiny_model(SINKS), DualCache(refresh_every=2), edit)
    counts = []
    for step, removal in enumerate(log.removals):
        sinks = find_sinks(
            recording.received[step],
            Excess(1.0),
            recording.visible[step][:, None, None],
            recording.positions[step][:, None, None],
        )
        assert torch.equal(sinks.sum(-1), removal["keys"].long())
        columns = removal.columns_BLHM
        assert (sinks.gather(-1, columns.clamp(min=0)) | (columns < 0)).all()
        counts.append(int(sinks.sum()))
    assert min(counts) > 0


@pytest.mark.parametrize(
    "edit, expected",
    [
        (MaskSinks(1, scores="last_row"), [1, 1, 1]),
        (MaskSinks(2, scores="last_row", when="kept", limit=3), [2, 3, 3]),
    ],
)
def test_an_autoregressive_memory_of_a_padded_batch(edit, expected):
    model = llama(causal=True)
    with intervene(model, edit) as log:
        both = model.generate(IDS, max_new_tokens=4, do_sample=False, attention_mask=PADDED)
    with intervene(model, edit) as alone_log:
        alone = model.generate(
            IDS[:1, 4:], max_new_tokens=4, do_sample=False, attention_mask=PADDED[:1, 4:]
        )
    assert torch.equal(both[:1, 4:], alone)
    assert [int(removal["keys"].min()) for removal in log.removals] == expected
    for one, other in zip(log.removals, alone_log.removals, strict=True):
        assert_close(one["removed"][:1], other["removed"], rtol=0, atol=1e-5)
        assert_close(one["left"][:1], other["left"])


RUNS = [
    (MaskSinks(1, when="kept", limit=3), BlockKeys(SinkKeys(Excess(1.0)))),
    (MaskPositions((2, 3), steps=(1, 2)), MaskPositions(range(0, 2), steps=(3, None))),
]
PAIRS = [[[5, 6, 7, 8, 9, 10]], [[11, 12, 13, 14, 15, 16]]]


def equal(one, other):
    assert [removal.forward for removal in one] == [removal.forward for removal in other]
    assert one
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left.columns_BLHM, right.columns_BLHM)
        assert_close(left["overlap"], right["overlap"], equal_nan=True)
        assert_close(left["removed"], right["removed"])


@pytest.mark.parametrize(
    "edits, cache", [*zip(RUNS, (None, DualCache(refresh_every=2)), strict=True)]
)
def test_a_second_run_in_one_block_is_what_it_is_in_its_own(edits, cache):
    model = tiny_model(SINKS)
    denoiser = model.denoiser()
    with intervene(model, *edits) as log:
        written = []
        for prompts in PAIRS:
            *_, last = denoise(denoiser, canvas_of(model, prompts), cache=cache, block_length=BLOCK)
            written.append(last.ids_BS)
    forwards = [removal.forward for removal in log.removals]
    (begins,) = (at for at in range(1, len(forwards)) if forwards[at] < forwards[at - 1])
    parts = log.removals[:begins], log.removals[begins:]
    for prompts, ids_BS, removals in zip(PAIRS, written, parts, strict=True):
        alone, _, expected = decode(model, cache, *edits, prompts=prompts)
        assert torch.equal(ids_BS, expected)
        equal(removals, alone.removals)


def test_runs_begin_afresh_under_guidance_whatever_they_ask_and_where_one_was_left_early():
    model = tiny_model(SINKS)
    mask_id = model.config.mask_token_id

    def plain(ids_BS, wanted_BS):
        # a denoiser that announces no canvas
        return model(ids_BS, logits_to_keep=wanted_BS).logits

    def run(prompts):
        canvas = canvas_of(model, prompts)
        return denoise(guided(FunctionDenoiser(plain), 1.0, canvas.prompt_BS, mask_id), canvas)

    with intervene(model, MaskSinks(1), forwards_per_step=2) as log:
        first = run(PAIRS[0])
        for _ in range(3):
            next(first)
        began = len(log.removals)
        list(run(PAIRS[1]))
    with intervene(model, MaskSinks(1), forwards_per_step=2) as alone:
        list(run(PAIRS[1]))
    equal(log.removals[began:], alone.removals)


def test_forwards_between_the_steps_end_no_run():
    model = tiny_model(SINKS)
    (prompts, other), edit = PAIRS, MaskSinks(1)
    with intervene(model, edit) as log:
        for step in model.denoise(canvas_of(model, prompts)):
            with log.probing():
                model(step.ids_BS)
                list(model.denoise(canvas_of(model, other)))
    with intervene(model, edit) as alone:
        list(model.denoise(canvas_of(model, prompts)))
    equal(log.removals, alone.removals)
    with intervene(model, edit) as log:
        for step in model.denoise(canvas_of(model, prompts)):
            model(step.ids_BS)
    assert [removal.forward for removal in log.removals] == list(range(1, 2 * NEW)), (
        "they are steps of it"
    )


REORDERING = {
    "beam_search": {"num_beams": 3},
    "assisted_generation": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("mode", REORDERING)
def test_a_choice_of_the_step_before_is_refused_where_generate_reorders_rows(mode):
    model = llama(causal=True)
    ids_BS = torch.tensor([[5, 6, 7, 8, 5, 6]])

    def write(*edits, **how):
        with intervene(model, *edits):
            return model.generate(
                ids_BS,
                attention_mask=torch.ones_like(ids_BS),
                max_new_tokens=6,
                pad_token_id=0,
                **how,
            )

    for edit in (MaskSinks(1), BlockKeys(TopKeys(1), when="kept")):
        refused(f"{mode}.*when='now'", write, edit, **REORDERING[mode])
    # what is the same in every row and step stays allowed
    fixed = MaskPositions((1,))
    assert write(fixed, BlockKeys(TopKeys(1), when="now"), **REORDERING[mode]).shape[0] == 1
    if mode == "assisted_generation":
        assert torch.equal(write(fixed, **REORDERING[mode]), write(fixed))
    assert write(MaskSinks(1)).shape == (1, 12)


@pytest.mark.parametrize("cache", [None, DualCache()])
def test_guidance_has_two_memories(cache):
    model = tiny_model(SINKS)
    edit = MaskSinks(1, when="kept")
    log, recording, _ = decode(
        model, cache, edit, prompts=PROMPTS[:1], scale=1.0, forwards_per_step=2
    )
    assert recording.forwards_per_step == [2] * NEW and log.forwards == 2 * NEW
    first, *_ = log.removals
    assert first.forward == 2 and torch.equal(
        first.columns_BLHM[..., 0], recording.received[0].argmax(-1)
    )
    counts = [removal["keys"].unique().tolist() for removal in log.removals]
    assert counts[::2] == counts[1::2] == [[count] for count in range(1, NEW)]
    # The second forward of a step reads the canvas with its prompt hidden: its sinks are its own.
    assert not torch.equal(log.removals[0]["held"], log.removals[1]["held"])
