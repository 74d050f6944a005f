import pytest
import torch

from refusals import refused
from sinklab.core.subject import Canvas

MASK, PAD = 9, 0


def prompts(rows, **changes):
    return Canvas.from_prompts(rows, **{"new_tokens": 2, "mask_id": MASK, "pad_id": PAD, **changes})


def test_prompts_are_padded_on_the_left():
    canvas = prompts([[1, 2, 3], [4], []])
    assert canvas.ids_BS.tolist() == [[1, 2, 3, 9, 9], [0, 0, 4, 9, 9], [0, 0, 0, 9, 9]]
    assert canvas.attention_BS.int().tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert canvas.open_BS.int().tolist() == [[0, 0, 0, 1, 1]] * 3
    assert canvas.prompt_BS.int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]


def test_a_tensor_of_prompts_keeps_its_width_and_padding():
    ids_BP = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    canvas = prompts(ids_BP, pad_id=None, attention_BP=torch.tensor([[0, 1], [0, 1]]))
    assert canvas.ids_BS.tolist() == [[0, 1, 9, 9], [0, 2, 9, 9]]
    assert canvas.attention_BS[:, 0].tolist() == [False, False]
    assert prompts(torch.tensor([1, 2])).ids_BS.tolist() == [[1, 2, 9, 9]]


def test_infill_opens_every_mask_that_is_not_padding():
    ids_BS = torch.tensor([[9, 1, 9, 2], [9, 3, 4, 9]])
    attention_BS = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    canvas = Canvas.infill(ids_BS, mask_id=MASK, attention_BS=attention_BS)
    assert canvas.open_BS.int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 1]]
    assert Canvas.infill([[9, 1]], mask_id=MASK).open_BS.tolist() == [[True, False]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"new_tokens": 0}, "new_tokens must be at least 1, got 0"),
        ({"rows": []}, r"at least one prompt is needed, got none; pass \[\[\]\]"),
        (
            {"rows": [1, 2]},
            r"list of lists of token ids, got a list of int; .*wrap a single prompt",
        ),
        ({"rows": [[1], [1, 2]], "pad_id": None}, r"unequal lengths \(\[1, 2\]\) need a pad_id"),
        (
            {"rows": [[1, 2, 3]], "context": 4},
            r"context of 4 positions, got a prompt of 3 and 2 .*, 1 too many",
        ),
        (
            {"rows": [[1, 9]]},
            "a prompt must not contain the mask id 9.*Canvas.infill, or --new-tokens 0",
        ),
        ({"rows": torch.tensor([[1.0]])}, "token ids must be integers.*torch.float32"),
        (
            {"rows": [[1]], "attention_BP": torch.ones(1, 1)},
            "attention_BP goes with a tensor of prompts",
        ),
        (
            {"rows": torch.ones(1, 2).long(), "attention_BP": torch.ones(1, 3)},
            r"of shape \(1, 2\), but .* of shape \(1, 3\); give one flag per token",
        ),
        (
            {"rows": torch.tensor([[1, 0]]), "attention_BP": torch.tensor([[1, 0]])},
            "must be padded on the left.*padding_side='left'",
        ),
    ],
)
def test_bad_prompts_are_refused(changes, message):
    rows = changes.pop("rows", [[1]])
    refused(message, prompts, rows, **changes)


def test_blocks_are_counted_from_the_first_of_each_row():
    canvas = Canvas.from_prompts([[5, 6, 7, 8], [5, 6]], new_tokens=4, mask_id=1, pad_id=0)
    number_BS = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [6, 6, 6, 6, 7, 7, 9, 9]])
    expected = [[-1, -1, -1, -1, 0, 0, 1, 1], [-1, -1, -1, -1, 0, 0, 2, 2]]
    assert canvas.counted(number_BS).block_BS.tolist() == expected


def test_bad_infilling_is_refused():
    refused(r"\(id 9\) to fill; put mask_id", Canvas.infill, [[1, 2]], mask_id=MASK)
    refused(
        r"\(1, 2\), but .* \(1, 3\)",
        Canvas.infill,
        [[1, 9]],
        mask_id=MASK,
        attention_BS=torch.ones(1, 3),
    )
    refused("context of 1 positions, got 2", Canvas.infill, [[1, 9]], mask_id=MASK, context=1)


@pytest.mark.parametrize(
    "ids, attention, opened, message",
    [
        ([[1, 9]], [[True, False]], [[False, True]], "open and padding at once"),
        (
            [[1, 9]],
            [[True, True]],
            [[True, True]],
            "must hold mask_id 9, but row 0 position 0 holds 1",
        ),
        ([[1, 9]], [[1, 1]], [[False, True]], "attention_BS must be bool .*is int64.*mask.bool"),
        (
            [1, 9],
            [True, True],
            [False, True],
            r"must be int64 of shape \(any, any\), but is int64 of shape \(2,\); use ids.long\(\)",
        ),
    ],
)
def test_a_canvas_of_your_own_is_checked(ids, attention, opened, message):
    refused(message, Canvas, torch.tensor(ids), torch.tensor(attention), torch.tensor(opened), MASK)
