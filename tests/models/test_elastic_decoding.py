"""Decoding under which the canvas changes its length: DreamOn's loops, what is recorded of it, what
is refused.
"""

import dataclasses
import itertools

import pytest
import torch

from conformance.values import MASK_ID, tiny_model
from refusals import refused, refusing
from sinklab.core.probing import intervene, trace
from sinklab.core.sampling import Canvas, DecodingSettings, denoise
from sinklab.extras.zoo.decoding import Elastic
from sinklab.lab.measures import MaskSinks
from sinklab.lab.scoring.writing import Writing, WritingRequest
from tiny_diffusion import tiny_loaded, tiny_tokenizer

ROWS, MASK, EXPAND, END = 20, 17, 18, 19
PUBLISHED = {"max_tokens": 8, "expand_id": EXPAND, "delete_id": END}
# What the original loops wrote with the logits of `formula`, float64: every canvas that was
# evaluated, and the text; a to q are the tokens 0 to 16, _ is [MASK]. evaluation:
# `batch_generate_with_expand_as_token` of DreamLM/DreamOn 8a0a549, eval/generator.py, whose budget
# is its max_gen_len. checkpoint: `_sample` of the generation_utils.py that goes with the weights,
# as xlm-core carries it.
ORIGINAL = {
    "evaluation, the rest deleted": (
        ("entropy", {"delete_rest": True, "expansions": 8}, {"expand": 2, "delete": 2, "seed": 0}),
        "bcd____ef bcd_____ef bcd__ef bcdq_ef bcdqpef",
    ),
    "evaluation, up to the limit": (
        ("maskgit_plus", {"expansions": 8}, {"expand": 2, "delete": 0, "seed": 2}),
        "bcd____ef bcd_____ef bcd______ef bcd_______ef bcd________ef bcd__p_____ef bcd__p____mef "
        "bcd__p_n__mef bcd__p_nm_mef bcd__p_nmpmef bcdp_p_nmpmef bcdpkp_nmpmef bcdpkphnmpmef",
    ),
    "checkpoint, two expansions": (
        ("entropy", {"expansions": 2}, {"expand": 4, "delete": 0, "seed": 0}),
        "bcd____ef bcd_____ef bcd______ef bcd_g____ef bcd_g___eef bcd_g_m_eef bcd_gnm_eef "
        "bcdggnm_eef bcdggnmeef",
    ),
    "checkpoint, the rest deleted": (
        ("topk_margin", {"delete_rest": True}, {"expand": 2, "delete": 2, "seed": 7}),
        "bcd____ef bcd_ef bcd__ef bcdj_ef bcdjpef",
    ),
    "checkpoint, two tokens at once": (
        ("maskgit_plus", {"tokens": 2}, {"expand": 2, "delete": 2, "seed": 8}),
        "bcd____ef bcd__ef bcdk__ef bcdkfgef",
    ),
}


def formula(ids_BS, expand, delete, seed):
    """Logits (S, V) of the places of a text, each from its neighbours and the length."""
    ids_S, token_V, length = (
        ids_BS[0].double(),
        torch.arange(ROWS, dtype=torch.float64),
        ids_BS.shape[1],
    )
    nothing = torch.zeros(1, dtype=torch.float64)
    left_S1, right_S1 = (
        torch.cat([nothing, ids_S[:-1]])[:, None],
        torch.cat([ids_S[1:], nothing])[:, None],
    )
    place_S1 = torch.arange(length, dtype=torch.float64)[:, None]
    inner_SV = 0.61 * (token_V + 1) * (left_S1 + 1 + seed) + 1.37 * (right_S1 + 2) * (token_V + 3)
    logits_SV = 3 * torch.sin(inner_SV + 0.83 * place_S1 * (token_V + 1) + 0.29 * length * token_V)
    logits_SV[:, MASK] = -50
    logits_SV[:, EXPAND] += expand
    logits_SV[:, END] += delete
    return logits_SV


def as_text(ids_BS):
    return "".join("_" if token == MASK else chr(ord("a") + token) for token in ids_BS[0].tolist())


@pytest.mark.parametrize("case", ORIGINAL)
def test_canvases_are_those_of_the_original_loops(case):
    (rule, fields, how), expected = ORIGINAL[case]
    canvas = Canvas.infill([[1, 2, 3, *[MASK] * 4, 4, 5]], mask_id=MASK)
    schedule = Elastic(**PUBLISHED, **fields)
    steps = list(
        denoise(
            lambda ids, wanted: formula(ids, **how)[wanted[0]], canvas, rule=rule, schedule=schedule
        )
    )
    assert [as_text(step.before_BS) for step in steps] == expected.split()[:-1]
    assert as_text(steps[-1].ids_BS) == expected.split()[-1]


def model_of(expand=6.0, delete=0.0, dtype=torch.float64, **settings):
    """Proposes <|expand|> (7) and <|delete|> (8) more often than chance."""
    model = tiny_model(expand_token_id=7, delete_token_id=8, **settings).to(dtype)
    with torch.no_grad():
        mean_E = model.hidden_states(torch.tensor([[5, 6, MASK_ID, 9]])).mean((0, 1))
        model.lm_head.weight[7] += expand * mean_E / mean_E.norm() ** 2
        model.lm_head.weight[8] += delete * mean_E / mean_E.norm() ** 2
    return model


TEXT = [[5, 6, MASK_ID, MASK_ID, MASK_ID, 9, 10, 11]]


@pytest.mark.parametrize(
    "settings", [{}, {"sink_kind": "token", "sink_count": 1}, {"logit_shift": True}]
)
def test_each_step_evaluates_the_text_of_its_length_alone(settings):
    model = model_of(**settings)
    canvas = Canvas.infill(TEXT, mask_id=MASK_ID)
    steps = list(model.denoise(canvas, DecodingSettings(schedule="elastic:max_tokens=7")))
    before_S, lengths = [*range(len(TEXT[0]))], set()
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        lengths.add(step.before_BS.shape[1])
        plain_SV = model(step.before_BS).logits[0].clone()
        plain_SV[:, MASK_ID] = -torch.inf
        if step.before_BS.shape[1] == len(TEXT[0]) - 3 + 7:
            plain_SV[:, 7] = -torch.inf
        place = step.committed_BS[0].nonzero().item()
        token = plain_SV[place].argmax().item()
        expected = step.before_BS[0].tolist()
        expected[place : place + 1] = {7: [MASK_ID, MASK_ID], 8: []}.get(token, [token])
        assert step.ids_BS[0].tolist() == expected
        assert after is None or torch.equal(after.before_BS, step.ids_BS)
        kept_Z = step.ids_BS[0] != MASK_ID
        kept_Z[place : place + 2] = False
        assert torch.equal(step.before_BS[0][step.origin_Z][kept_Z], step.ids_BS[0][kept_Z])
        before_S = [before_S[column] for column in step.origin_Z.tolist()]
    assert len(lengths) > 2 and MASK_ID not in steps[-1].ids_BS
    assert [TEXT[0][column] for column in before_S if column not in (2, 3, 4)] == [5, 6, 9, 10, 11]
    written = model.generate(TEXT, schedule="elastic:max_tokens=7")
    assert torch.equal(written, steps[-1].ids_BS)


def test_masks_are_filled_so_where_the_model_has_the_tokens_and_else_as_ever():
    model, prompt = model_of(), TEXT[0][:2]
    assert model.generate(TEXT).shape[1] > len(TEXT[0])
    for written in (
        model.generate(TEXT, schedule="even"),
        model.generate([prompt], max_new_tokens=3),
    ):
        assert 7 not in written
    assert model.generate([prompt], max_new_tokens=3).shape[1] == 5
    longer = model.generate([prompt], max_new_tokens=3, schedule="elastic:max_tokens=5")
    assert longer.shape[1] == 7 and longer[0, :2].tolist() == prompt
    context = model.config.text_positions
    assert model.generate(TEXT, schedule="elastic:max_tokens=999").shape[1] == context
    model.config.expand_token_id = None
    assert model.generate(TEXT).shape[1] == len(TEXT[0])


def test_all_may_be_deleted():
    model = model_of(expand=0, delete=30)
    assert model.generate(TEXT).tolist() == [[5, 6, 9, 10, 11]]
    assert model.generate(TEXT[0][2:5], schedule="elastic").shape == (1, 0)


def test_blocks_to_the_right_move_along():
    model = model_of(expand=3)
    canvas = Canvas.infill([[5, *[MASK_ID] * 6, 9]], mask_id=MASK_ID)
    steps = list(
        model.denoise(canvas, DecodingSettings(schedule="elastic:max_tokens=12", block_length=2))
    )
    blocks = [step.block for step in steps]
    assert blocks == sorted(blocks) and set(blocks) == {0, 1, 2} and len(steps) > 6
    for step in steps:
        # left of the block nothing is masked, right of its written tokens everything
        columns = step.candidates_BS[0].nonzero()[:, 0]
        assert not step.masked_BS[0, : columns.min()].any()
        assert (step.masked_BS[0, columns.max() + 1 : -1].long().diff() >= 0).all()


def test_a_trace_records_each_step_at_its_own_length_with_the_states_of_its_places():
    model, canvas = model_of(logit_shift=True), Canvas.infill(TEXT, mask_id=MASK_ID)
    settings = DecodingSettings(schedule="elastic:max_tokens=7")
    plain = [step.ids_BS.tolist() for step in model.denoise(canvas, settings)]
    with trace(model, ("received", "received_by_state"), canvas=canvas) as recording:
        steps = []
        for step in model.denoise(canvas, settings):
            recording.mark(step)
            steps.append(step)
    assert [step.ids_BS.tolist() for step in steps] == plain
    lengths = [step.before_BS.shape[1] for step in steps]
    assert len(set(lengths)) > 2
    assert [tuple(received.shape[-1:]) for received in recording.received] == [
        (length,) for length in lengths
    ]
    for step, state_BK, columns in zip(steps, recording.key_state, recording.columns, strict=True):
        assert state_BK[0].tolist() == [
            0 if masked else 1 if opened else 2
            for masked, opened in zip(step.masked_BS[0], step.canvas.open_BS[0], strict=True)
        ]
        assert len(columns) == step.before_BS.shape[1]
    array = recording.array("received")
    assert (
        array.shape[-1] == max(lengths)
        and (~torch.tensor(array[0, 0, 0, 0]).isnan()).sum() == lengths[0]
    )


def test_an_edit_that_chooses_a_step_ahead_starts_afresh_where_columns_have_moved():
    model, canvas = model_of(), Canvas.infill(TEXT, mask_id=MASK_ID)
    settings = DecodingSettings(schedule="elastic:max_tokens=6")
    with intervene(model, MaskSinks(k=1)) as log:
        steps = list(model.denoise(canvas, settings))
    lengths = [step.before_BS.shape[1] for step in steps]
    acted = [now == before for before, now in itertools.pairwise(lengths)]
    assert any(acted) and not all(acted)
    assert sum(acted) == len(log.removals)
    with intervene(model, MaskSinks(k=1)) as log:
        model.generate(TEXT, schedule="even")
        first = len(log.removals)
        for _ in range(2):
            list(model.denoise(canvas, settings))
    assert len(log.removals) == first + 2 * sum(acted), "the same canvas again is another run"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 3}, "steps=3"),
        ({"cache": "dual"}, "cache Dual"),
        ({"rule": "positional", "seed": 0}, "PositionalOrder"),
        ({"rule": "origin", "seed": 0}, "Origin"),
        ({"stop_ids": 9}, "stop ids"),
        ({"cfg_scale": 1.0}, "cfg_scale=1.0"),
        ({"schedule": "elastic:max_tokens=2"}, "max_tokens=2 for 3"),
        ({"schedule": "elastic:tokens=0"}, "tokens .* 0"),
        ({"input_ids": TEXT * 2}, "2 rows"),
        ({"attention_mask": [[0, *[1] * 7]]}, "padding"),
    ],
)
def test_what_needs_one_length_is_refused(options, message):
    refused(message, model_of().generate, **{"input_ids": TEXT, "schedule": "elastic", **options})


@pytest.mark.parametrize(
    "model, message", [(model_of(block_length=4), "in blocks"), (tiny_model(), r"<\|expand\|>")]
)
def test_models_that_cannot_be_elastic_are_refused(model, message):
    refused(message, model.generate, TEXT, schedule="elastic")


def test_what_is_recorded_and_scored_keeps_its_length():
    loaded = tiny_loaded(expand_token_id=7, delete_token_id=8)
    loaded = dataclasses.replace(loaded, tokenizer=tiny_tokenizer())
    texts = Writing(
        loaded, [WritingRequest((3, 4))], DecodingSettings(schedule="elastic", seed=0), 4
    )
    message = (
        "columns move under the schedule 'elastic', but what is recorded keeps them; take another"
    )
    with refusing(message), texts.begin():
        pass
