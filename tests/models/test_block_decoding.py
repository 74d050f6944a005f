"""How a block is written: the quota, the first token alone and the edits, each against plain
Python.
"""

import pytest
import torch

from conformance.values import MASK_ID, tiny_model
from refusals import refused
from sinklab.core.instrument import trace
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


def proposals(logits_PV, places, bars_mask):
    """Token and probability at these places of a text."""
    chances_PV, barred_PV = logits_PV.softmax(-1), logits_PV.clone()
    if bars_mask:
        barred_PV[:, MASK_ID] = -torch.inf
    best = barred_PV.argmax(-1).tolist()
    return {
        place: (token, float(chances_PV[n, token]))
        for n, (place, token) in enumerate(zip(places, best, strict=True))
    }


def block_places(prompt, total):
    for start in range(len(prompt) // LENGTH * LENGTH, total, LENGTH):
        yield [place for place in range(start, min(start + LENGTH, total)) if place >= len(prompt)]


def test_a_confidence_that_is_just_the_threshold_is_not_enough():
    canvas = Canvas.from_prompts([[0]], new_tokens=4, mask_id=2)
    for threshold, expected in ((0.5, 1), (0.5 - 2**-20, 4)):
        steps = denoise(lambda *_: torch.zeros(4, 2), canvas, schedule=Dynamic(threshold))
        assert int(next(steps).committed_BS.sum()) == expected


def by_editing(model, prompt, new_tokens, settings, limit=10**9):
    """The texts after every evaluation, by LLaDA2.1's words; masks are never filled with [MASK]."""
    ids, texts, edits = prompt + [MASK_ID] * new_tokens, [], []
    for places in block_places(prompt, len(ids)):
        post, evaluations = 0, 0
        while True:
            masked = [place for place in places if ids[place] == MASK_ID]
            post += not masked
            if post > settings.max_post_steps:
                break
            with torch.no_grad():
                logits_PV = model(torch.tensor([ids])).logits[0, places]
            free = proposals(logits_PV, places, bars_mask=evaluations >= limit + len(places))
            found = proposals(logits_PV, places, bars_mask=True)
            order = sorted(masked, key=lambda place: -found[place][1])
            sure = [place for place in order if found[place][1] > settings.threshold]
            fill = (
                sure if len(sure) >= settings.num_to_transfer else order[: settings.num_to_transfer]
            )
            edited = [
                place
                for place in places
                if place not in masked
                and free[place][1] > settings.editing_threshold
                and free[place][0] != ids[place]
            ]
            for place in fill:
                ids[place] = found[place][0]
            for place in edited:
                ids[place] = free[place][0]
            texts.append(list(ids))
            edits += [free[place][0] for place in edited]
            evaluations += 1
            if not masked and not edited:
                break
    return texts, edits


EDITS = [
    Editing(threshold=0.3, editing_threshold=0.15),
    Editing(threshold=0.3, editing_threshold=0.2, max_post_steps=3, num_to_transfer=2),
    Editing(threshold=0.9, editing_threshold=0.1, max_post_steps=1),
    Editing(threshold=0.3, editing_threshold=0.2, max_post_steps=0, num_to_transfer=3),
    Editing(threshold=0.3, editing_threshold=1.0),
]


@pytest.mark.parametrize("schedule", EDITS, ids=str)
def test_edits_are_those_of_the_words(schedule):
    count = 0
    for seed, prompt in enumerate(PROMPTS[:2]):
        model, canvas = model_of(seed), canvas_of([prompt])
        done = steps_of(model, canvas, schedule=schedule)
        texts, edits = by_editing(model, prompt, 11, schedule)
        assert [step.ids_BS[0].tolist() for step in done] == texts, seed
        ours = [step.ids_BS[step.committed_BS & ~step.masked_BS].tolist() for step in done]
        assert sorted(token for tokens in ours for token in tokens) == sorted(edits)
        for step in done:
            assert torch.equal(step.before_BS[~step.committed_BS], step.ids_BS[~step.committed_BS])
            assert not step.filled_BS.any() and not (step.committed_BS & ~canvas.open_BS).any()
            assert (step.confidence_BS[step.committed_BS] > 0).all()
        count += len(edits)
    assert (count > 0) == (schedule.editing_threshold < 1)


def test_a_mask_that_is_written_back_is_filled_again_and_the_block_ends():
    """Where [MASK] is what the model likes best, edits would write it back for ever."""
    schedule = Editing(threshold=1.0, editing_threshold=0.2, max_post_steps=2)
    model, prompt = model_of(3), PROMPTS[0]
    liked_V = torch.zeros(model.config.vocab_size).double()
    liked_V[MASK_ID] = 4.0
    model.lm_head.register_forward_hook(lambda module, args, out: out + liked_V)
    done = steps_of(model, canvas_of([prompt]), schedule=schedule)
    texts, edits = by_editing(model, prompt, 11, schedule, limit=schedule.max_post_steps)
    assert [step.ids_BS[0].tolist() for step in done] == texts
    assert MASK_ID in edits and MASK_ID not in texts[-1]


@pytest.mark.parametrize(
    "variant",
    [{}, {"logit_shift": True, "first_alone": True}, {"clean_attention": "causal"}],
    ids=str,
)
@pytest.mark.parametrize(
    "schedule", ["dynamic:threshold=0.3", "dynamic:threshold=0.3,steps=2,block_length=4", EDITS[1]]
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


def test_a_stop_id_ends_a_row_with_its_block_where_tokens_are_edited():
    model, schedule, prompt = model_of(1), EDITS[0], PROMPTS[0]
    whole = steps_of(model, canvas_of([prompt]), schedule=schedule)
    stop = int(whole[-1].ids_BS[0, len(prompt)])
    done = steps_of(model, canvas_of([prompt]), schedule=schedule, stop_ids=(stop,))
    first = [step for step in whole if step.block == 0]
    assert len(done) == len(first) and done[-1].filled_BS.any()
    assert torch.equal(done[-1].ids_BS[0, len(prompt) :], torch.full((11,), stop))
    assert not any(step.filled_BS.any() for step in done[:-1])


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


def test_edits_are_traced_and_generated_as_other_steps_are():
    model, canvas, settings = model_of(), canvas_of(PROMPTS[:1]), {"schedule": EDITS[0]}
    plain = steps_of(model, canvas, **settings)
    with trace(model) as recording:
        for step in model.denoise(canvas, **settings):
            recording.mark(step)
    assert len(recording.steps) == len(plain) and recording.forwards_per_step == [1] * len(plain)
    assert torch.equal(recording.steps[-1].ids_BS, plain[-1].ids_BS)
    texts = [
        model.generate([PROMPTS[0]], max_new_tokens=11, seed=1, temperature=one, **settings)
        for one in (0, 2)
    ]
    assert torch.equal(texts[0], plain[-1].ids_BS) and not torch.equal(*texts)
    assert not (texts[1] == MASK_ID).any()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Dynamic(steps=4), "steps=4 and block_length=None"),
        (lambda: Dynamic(threshold=1.5), "threshold"),
        (lambda: Editing(max_post_steps=-1), "max_post_steps"),
    ],
)
def test_fields_that_make_no_sense_are_refused(make, message):
    refused(message, make)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"schedule": "dynamic:steps=1,block_length=2"}, "of 2 tokens, but one has 4"),
        ({"schedule": "editing", "stop_ids": (60,)}, r"0 to 59, got \[60\]"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    refused(message, steps_of, model_of(), canvas_of([[1]]), **settings)


def test_the_quota_alone_goes_with_any_order():
    model, canvas = model_of(), canvas_of([PROMPTS[0]])
    done = steps_of(
        model, canvas, schedule="dynamic:threshold=1,steps=2,block_length=4", rule="left_to_right"
    )
    assert columns_of(done) == [[6, 7], [8, 9], [10, 11], [12, 13], [14, 15], [16]]


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
