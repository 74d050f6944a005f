"""How a block is written: the quota, the first token alone and the edits, each against plain
Python.
"""

import pytest
import torch

from conformance.values import MASK_ID, tiny_model
from refusals import refused
from sinklab.core.subject import Canvas, DecodingSettings, denoise
from sinklab.extras.zoo.decoding import Dynamic, Editing
from sinklab.lab.scoring.writing import Writing, WritingRequest
from tiny_diffusion import tiny_loaded

LENGTH = 4
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [3, 4, 5, 6, 7], [8]]


def model_of(seed=0, **settings):
    """Proposals as confident as thresholds are."""
    model = tiny_model(block_length=LENGTH, **settings).double()
    torch.manual_seed(seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.3)
        model.lm_head.weight.normal_(0, 0.5)
    return model


def canvas_of(prompts, new_tokens=11):
    return Canvas.from_prompts(prompts, new_tokens=new_tokens, mask_id=MASK_ID, pad_id=0)


def steps_of(model, canvas, **settings):
    return list(DecodingSettings(**settings).decode(model.denoiser(canvas.attention_BS), canvas))


def columns_of(steps):
    """Columns that each step commits in the first row."""
    return [step.committed_BS[0].nonzero()[:, 0].tolist() for step in steps]


def test_a_confidence_that_is_just_the_threshold_is_not_enough():
    canvas = Canvas.from_prompts([[0]], new_tokens=4, mask_id=2)
    for threshold, expected in ((0.5, 1), (0.5 - 2**-20, 4)):
        steps = denoise(lambda *_: torch.zeros(4, 2), canvas, schedule=Dynamic(threshold))
        assert int(next(steps).committed_BS.sum()) == expected


EDITS = [
    Editing(threshold=0.3, editing_threshold=0.15),
    Editing(threshold=0.3, editing_threshold=0.2, max_post_steps=3, num_to_transfer=2),
    Editing(threshold=0.9, editing_threshold=0.1, max_post_steps=1),
    Editing(threshold=0.3, editing_threshold=0.2, max_post_steps=0, num_to_transfer=3),
    Editing(threshold=0.3, editing_threshold=1.0),
]


@pytest.mark.parametrize(
    ("variant", "schedule"),
    [
        ({}, EDITS[1]),
        ({}, "dynamic:threshold=0.3"),
        ({"logit_shift": True, "first_alone": True}, EDITS[1]),
        ({"clean_attention": "causal"}, "dynamic:threshold=0.3,steps=2,block_length=4"),
    ],
    ids=str,
)
def test_rows_of_a_batch_are_written_as_alone(variant, schedule):
    model, stop_ids = model_of(**variant), ()
    if variant:
        stop_ids = tuple(range(12, 24))
    settings = {"schedule": schedule, "stop_ids": stop_ids}
    together = steps_of(model, canvas_of(PROMPTS), **settings)[-1].ids_BS[:, -11:]
    plain = model.denoiser(canvas_of(PROMPTS).attention_BS, plain=True)
    *_, last = DecodingSettings(**settings).decode(plain, canvas_of(PROMPTS))
    assert torch.equal(last.ids_BS[:, -11:], together), "the committed cache is exact"
    for row, prompt in enumerate(PROMPTS):
        alone = steps_of(model, canvas_of([prompt]), **settings)[-1].ids_BS[0, -11:]
        assert torch.equal(alone, together[row]), row
        if stop_ids:
            ends = [place for place, one in enumerate(alone.tolist()) if one in stop_ids]
            assert not ends or set(alone[ends[0] :].tolist()) == {int(alone[ends[0]])}


def test_the_first_token_of_a_block_is_written_alone():
    model = tiny_model(block_length=LENGTH, logit_shift=True, first_alone=True).double()
    canvas = canvas_of([PROMPTS[0]], new_tokens=8)
    numbers = {
        one: model.denoiser().in_blocks(canvas, one).block_BS[0, 6:].tolist()
        for one in (None, 2, 1)
    }
    assert numbers[None] == [0, 0, 1, 2, 2, 2, 3, 4]
    assert numbers[2] == [0, 0, 1, 2, 3, 3, 4, 5] and numbers[1] == [*range(8)]
    done = steps_of(model, canvas, schedule="dynamic:threshold=0")
    assert columns_of(done) == [[6, 7], [8], [9, 10, 11], [12], [13]]
    # as the last row of the block before predicts it
    text = done[0].ids_BS[0, :8].tolist()
    with torch.no_grad():
        logits_V = model(torch.tensor([[*text, MASK_ID]])).logits[0, 8]
    logits_V[MASK_ID] = -torch.inf
    assert int(done[1].ids_BS[0, 8]) == int(logits_V.argmax())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"schedule": "dynamic:steps=1,block_length=2"}, "of 2 tokens, but one has 4"),
        ({"schedule": "editing", "stop_ids": (60,)}, r"0 to 59, got \[60\]"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    refused(message, steps_of, model_of(), canvas_of([[1]]), **settings)


@pytest.mark.parametrize("ends", [False, True])
def test_what_is_written_in_batches_is_edited_to_the_end(ends):
    loaded = tiny_loaded(block_length=LENGTH)
    settings = DecodingSettings(schedule="editing:threshold=0.3,editing_threshold=0.01", seed=0)
    ids, mask_id = (5, 6, 7, 8, 9), loaded.model.config.mask_token_id
    canvas = Canvas.from_prompts([ids], new_tokens=7, mask_id=mask_id)
    *_, last = loaded.model.denoise(canvas, settings)
    with Writing(loaded, [WritingRequest(ids)], settings, 7, ends=ends).begin() as writer:
        done = list(writer.steps())
    assert torch.equal(writer.ids_BS, last.ids_BS)
    # the last evaluation edits nothing, or is one too many
    assert not (done[-1].before_BS == mask_id).any()
    assert len(done) == last.index + 1
