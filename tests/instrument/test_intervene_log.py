"""What the log says: what was really taken, in numbers and as a table."""

# B batch, L layers, H heads, S keys
import math
from dataclasses import dataclass

import pandas as pd
import pytest
import torch
import transformers
from dense_twin import dense, over_queries, received, top
from packaging.version import Version
from probed import IDS, padding
from torch.testing import assert_close

from refusals import refusing
from sinklab.core.instrument import BlockKeys, Edit, intervene, trace
from sinklab.core.registry import interventions
from sinklab.lab.measures import MaskPositions, MaskSinks, WindowAttention
from sinklab.lab.scoring import ClipChannel, removal_table
from tiny_models import HandWritten, checkpointed, llama

OTHER = (IDS + 5) % 30


def test_removed_is_what_the_keys_would_have_held_in_the_forward_that_lost_them():
    model, (given, real) = llama().double(), padding(True)
    with torch.no_grad(), intervene(model, MaskSinks(3)) as log:
        model(IDS, **given)
        model(OTHER, **given)
    _, first = dense(model, lambda: model(IDS, **given))
    gone = [top(received(a, real), 3) for a in first.maps]
    _, second = dense(model, lambda: model(OTHER, **given), lambda layer, _: gone[layer])
    before = [layer[0] for layer in second.before]
    (record,) = log.removals
    for found_BLH, maps in ((record["removed"], before), (record["held"], first.maps)):
        expected = [over_queries((a * g).sum(-1), real) for a, g in zip(maps, gone, strict=True)]
        assert_close(found_BLH, torch.stack(expected, 1))
    # the text has changed between them
    assert not torch.allclose(record["removed"], record["held"], atol=0.01)
    assert record["left"][:, 0, 0].tolist() == [5, 9]


@dataclass(frozen=True)
class Counting(Edit):
    """Blocks the first key, and counts the forwards of each layer that ended."""

    def before(self, call):
        first_BHS = torch.zeros(len(call.q_BHQD), 1, call.k_BKSD.shape[2], dtype=torch.bool)
        first_BHS[..., 0] = True
        return call.block(first_BHS)

    def after(self, call):
        call.memory["count"] = call.memory.get("count", 0) + 1
        COUNTS.append((call.layer, call.step, call.memory["count"]))


COUNTS = []


def test_memory_is_of_one_edit_layer_and_forward_of_a_step_and_forgets_a_forward_that_failed(
    scratch,
):
    scratch(interventions)
    interventions.register("counting")(Counting)
    model, paths = llama(), [f"model.layers.{number}.self_attn" for number in range(2)]
    COUNTS.clear()
    with torch.no_grad(), intervene(model, Counting(layers=(0,)), Counting()) as log:
        model(IDS)
        stop = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(IDS)
        stop.remove()
        model(IDS)
        log.reset()
        model(IDS)
    of_second = [one for one in COUNTS if one[0] == paths[1]]
    assert of_second == [(paths[1], 0, 1), (paths[1], 1, 2), (paths[1], 1, 2), (paths[1], 0, 1)]
    # two edits of the first layer, each with a memory of its own
    of_first = [(step, count) for layer, step, count in COUNTS if layer == paths[0]]
    assert of_first == [(0, 1), (0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (0, 1), (0, 1)]
    assert len(log.removals) == 6


def test_measuring_can_be_left_out():
    model = HandWritten()
    with intervene(model, MaskSinks(2), WindowAttention(4), measure=False) as log:
        model(IDS)
        model(OTHER)
    for removal in log.removals:
        assert removal["removed"].isnan().all() and removal["left"].isnan().all()
    summary = log.summary()
    assert math.isnan(summary["removed"]) and math.isnan(summary["strongest"])
    assert summary["held"] > 0


def test_keys_that_stay_the_same_are_listed_and_kept_once():
    # 256 hidden positions, 1024 heads and 256 steps would be 67 million numbers.
    model = llama()
    with torch.no_grad(), intervene(model, MaskPositions((3, 5))) as log:
        for ids in (IDS, OTHER):
            model(ids)
    keys = removal_table(log)["key_list"]
    half = len(keys) // 2
    assert keys == [[3, 5]] * (2 * 2 * 2 * 4)
    assert all(one is other for one, other in zip(keys[:half], keys[half:], strict=True))
    first, second = log.removals
    assert first.columns_BLHM is second.columns_BLHM


def test_layers_with_different_numbers_of_heads_have_entries_of_their_own():
    model = HandWritten()
    model.blocks[1].style = "headless"
    with intervene(model, MaskSinks(1), MaskSinks(1, heads=-1)) as log:
        model(IDS)
        model(IDS)
    found = [(removal.label, removal.layer_numbers, removal.heads) for removal in log.removals]
    one, other = "block_keys", "block_keys#2"
    assert found == [
        (one, (0,), (0, 1)),
        (one, (1,), (0,)),
        (other, (0,), (1,)),
        (other, (1,), (0,)),
    ]
    table = pd.DataFrame(removal_table(log))
    assert table.groupby(["edit", "layer"]).size().tolist() == [4, 2, 2, 2]


@pytest.mark.parametrize(
    "edit",
    [
        WindowAttention(2),
        BlockKeys("top:k=2", how="shuffle_value"),
        pytest.param(
            ClipChannel(channels=(1, 2), limit=0.1),
            marks=pytest.mark.skipif(
                Version(transformers.__version__) < Version("5.23"),
                reason="its replayed layers save another number of tensors",
            ),
        ),
    ],
)
def test_checkpointed_gradients_are_those_of_the_edited_model(edit):
    grads, logs = [], []
    for checkpointing in (False, True):
        model = checkpointed(llama()) if checkpointing else llama().train()
        with intervene(model, edit) as log:
            model(IDS)
            model(IDS).logits.square().sum().backward()
        grads.append(model.model.layers[0].self_attn.v_proj.weight.grad)
        logs.append(log)
    assert_close(grads[0], grads[1])
    assert len(logs[0].removals) == len(logs[1].removals) and logs[1].forwards == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_of_another_forward_than_the_last_are_not_edited_in_a_backward_pass(use_reentrant):
    model = checkpointed(llama(), use_reentrant)
    model.get_input_embeddings().weight.requires_grad_()
    before = model(IDS).logits.sum()
    with trace(model) as recording:
        before.backward(retain_graph=True)
        model(IDS)
    assert recording.layers == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    with intervene(model, MaskSinks(2, when="now")):
        first, last = (model(ids).logits.sum() for ids in (IDS, OTHER))
        for loss in (before, first):
            with refusing("last forward"):
                loss.backward()
        last.backward()


def test_a_layer_that_runs_twice_in_a_forward_is_not_edited_in_a_backward_pass():
    model = checkpointed(llama())
    model.model.layers[1] = model.model.layers[0]
    with refusing("of a layer alone"), intervene(model, MaskSinks(2, when="now")):
        model(IDS, use_cache=False).logits.sum().backward()
