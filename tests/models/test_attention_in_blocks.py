"""Attention in blocks: its two limits, decoding with the committed cache, and what does not go with
it.
"""

import pytest
import torch
from test_diffusion_lm import assert_same_gradients, gradients
from torch.testing import assert_close

from refusals import refused
from sinklab.core.instrument import trace
from sinklab.core.subject import Canvas, DecodingSettings
from tiny_diffusion import tiny_model as tiny_lm

VARIANTS = [
    {"gate": "elementwise"},
    {"sink_kind": "token", "sink_count": 1},
    {"sink_kind": "token", "sink_count": 2, "sink_side": "end"},
    {"sink_kind": "kv", "sink_count": 1},
    {"sink_kind": "logit", "sink_count": 1},
    {"logit_shift": True},
]
PADDED = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])


def texts(model, rows=2, length=12):
    ids_BS = torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(1))
    masked_BS = torch.rand(ids_BS.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    return ids_BS, masked_BS, ids_BS.masked_fill(masked_BS, model.config.mask_token_id)


@pytest.mark.ring("lab")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("padding", [None, 3])
def test_a_block_of_the_whole_length_gives_the_loss_and_gradients_of_full_attention(
    variant, padding
):
    full, blocks = tiny_lm(**variant).double(), tiny_lm(**variant, block_length=12).double()
    blocks.load_state_dict(full.state_dict())
    ids_BS, masked_BS, noisy_BS = texts(full)
    real_BS = None
    if padding:
        real_BS = torch.ones_like(ids_BS)
        real_BS[1, :padding] = 0
        masked_BS &= real_BS.bool()
    labels_BS = ids_BS.masked_fill(~masked_BS, -100)
    loss = full(noisy_BS, real_BS, labels=labels_BS).loss
    other = blocks(noisy_BS, real_BS, labels=labels_BS, clean=ids_BS).loss
    assert_close(other, loss)
    assert_same_gradients(gradients(blocks, other), gradients(full, loss), 1e-7)


COLUMNS = {"blocks_from": "column"}
WRITTEN = [*VARIANTS[2:], {"clean_attention": "causal"}, COLUMNS]


@pytest.mark.ring("lab")
@pytest.mark.parametrize(
    "variant, length, mask",
    [
        *((variant, 4, PADDED) for variant in WRITTEN),
        *((variant, 1, None) for variant in (VARIANTS[1], COLUMNS)),
        (COLUMNS, 64, PADDED),
    ],
)
def test_the_committed_cache_changes_nothing_and_a_row_is_written_as_alone(variant, length, mask):
    model = tiny_lm(**variant, block_length=length, context=128).double()
    prompts_BP = texts(model, length=7)[0]
    written_BS = model.generate(prompts_BP, mask, max_new_tokens=9)
    columns = variant.get("blocks_from") == "column"
    start = -7 % length if columns else 0
    padded_BP = torch.nn.functional.pad(prompts_BP, (start, 0))
    real_BP = torch.nn.functional.pad(
        torch.ones_like(prompts_BP) if mask is None else mask, (start, 0)
    )
    mask_id = model.config.mask_token_id
    canvas = Canvas.from_prompts(padded_BP, new_tokens=9, mask_id=mask_id, attention_BP=real_BP)
    for denoiser, cache in [
        (model.denoiser(canvas.attention_BS, plain=True), "none"),
        (None, "committed"),
    ]:
        denoiser = denoiser or model.denoiser(canvas.attention_BS)
        *_, last = DecodingSettings(cache=cache).decode(denoiser, canvas)
        assert torch.equal(last.ids_BS[:, start:], written_BS), cache
    with trace(model) as recording:
        assert torch.equal(
            model.generate(prompts_BP, mask, max_new_tokens=9, cache="committed"), written_BS
        )
    assert len(recording.steps) >= 9
    for row in range(2):
        begin = 0 if mask is None else int((mask[row] == 0).sum())
        alone_1S = model.generate(prompts_BP[row : row + 1, begin:], max_new_tokens=9)
        assert torch.equal(alone_1S[0, -9:], written_BS[row, -9:])


@pytest.mark.ring("lab")
@pytest.mark.parametrize(
    "block_length, call, message",
    [
        (None, lambda model, ids: model(ids, clean=ids), r"config\.block_length"),
        (4, lambda model, ids: model(ids, clean=ids, causal=True), "causal"),
        (4, lambda model, ids: model(ids, clean=ids[:, 1:]), "clean must be int64"),
        (4, lambda model, ids: model.generate(ids, max_new_tokens=4, block_length=3), "3 .* of 4"),
        (
            None,
            lambda model, ids: model.generate(ids, max_new_tokens=4, cache="committed"),
            "'committed'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(block_length, call, message):
    model = tiny_lm(block_length=block_length)
    refused(message, call, model, texts(model)[0])
    refused("block_length must be at least 1", tiny_lm, block_length=0)


def test_an_added_sink_is_a_committed_block_of_its_own():
    """The same numbers as an ordinary token in front of the text that is a block of one. Beside
    other text it would see more than itself.
    """
    length, sink_id = 4, 5
    added = tiny_lm(sink_kind="token", sink_count=1, block_length=length).double()
    ordinary = tiny_lm(block_length=length, blocks_from="column").double()
    ordinary.load_state_dict(added.state_dict(), strict=False)
    ordinary.lm_head.weight = torch.nn.Parameter(added.lm_head.weight.detach().clone())
    with torch.no_grad():
        ordinary.model.embed_tokens.weight[sink_id] = added.sink_embeddings[0]
    noisy_BS = texts(added)[2]
    noisy_BS = noisy_BS.masked_fill(noisy_BS == sink_id, 6)
    expected = added(noisy_BS).logits
    ids_BS = torch.cat([torch.full((len(noisy_BS), 1), sink_id), noisy_BS], 1)
    # the block that it would share with the first tokens of the text is another model
    assert (ordinary(ids_BS).logits[:, 1:] - expected).abs().max() > 1e-3
    block_S = torch.cat([torch.tensor([-1]), torch.arange(noisy_BS.shape[1]) // length])
    ordinary.config.block_length = None
    found = ordinary(ids_BS, visible=block_S[:, None] >= block_S[None]).logits[:, 1:]
    assert_close(found, expected)


@pytest.mark.ring("lab")
def test_what_is_watched_for_some_steps_is_computed_afresh_there_and_nowhere_else():
    model = tiny_lm(block_length=4).double()
    prompts_BP = texts(model, rows=1, length=6)[0]
    expected_BS = model.generate(prompts_BP, max_new_tokens=10)
    ran, recorded = [], []
    model.lm_head.register_forward_pre_hook(
        lambda *_: None
    )  # a hook of somebody else: the plain decoder runs
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: ran.append(out.shape[1])
    )
    canvas = Canvas.from_prompts(prompts_BP, new_tokens=10, mask_id=model.config.mask_token_id)
    steps, index = model.denoise(canvas), 0
    while True:
        if index in (3, 4, 8):
            with trace(model) as recording:
                step = next(steps, None)
            recorded.append(recording.visible[0][0])
        else:
            step = next(steps, None)
        if step is None:
            break
        last, index = step, index + 1
    assert torch.equal(last.ids_BS, expected_BS)
    assert [width for number, width in enumerate(ran) if number in (3, 4, 8)] == [16, 16, 16]
    assert all(width < 16 for number, width in enumerate(ran[:8]) if number not in (3, 4))
    # whole canvas: the first block is seen by all, the last by itself
    assert all(
        visible_S.tolist() == [16] * 4 + [12] * 4 + [8] * 4 + [4] * 4 for visible_S in recorded
    )
