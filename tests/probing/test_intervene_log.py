"""What the log says: what was really taken, in numbers and as a table."""

# B batch, L layers, H heads, S keys
from __future__ import annotations

import math
from contextlib import nullcontext

import pandas as pd
import pytest
import torch
from dense_twin import dense, received, top

from sinklab.core.probing import (
    BlockKeys,
    MaskPositions,
    MaskSinks,
    TruncateContext,
    WindowAttention,
    intervene,
    trace,
)
from sinklab.core.probing.intervention import TABLE_COLUMNS
from sinklab.core.sampling import Canvas, denoise
from tiny_diffusion import tiny_model
from tiny_models import HandWritten, Prefixed, checkpointed, llama

IDS = torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(1))
OTHER = (IDS + 5) % 30
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, :4] = 0


@pytest.mark.parametrize("removal", ["mask", "zero_value", "evict"])
@pytest.mark.parametrize("padded", [False, True])
def test_realised_is_what_the_keys_would_have_held_in_the_forward_that_lost_them(
    removal: str, padded: bool
) -> None:
    model, given = llama().double(), {"attention_mask": PADDED} if padded else {}
    real = PADDED if padded else torch.ones_like(PADDED)
    with torch.no_grad(), intervene(model, MaskSinks(3, removal=removal)) as log:
        model(IDS, **given)
        model(OTHER, **given)
    _, first = dense(model, lambda: model(IDS, **given))
    gone = [top(received(a, real), 3) for a in first.maps]
    zeroed = (lambda layer, _: gone[layer].squeeze(2)) if removal == "zero_value" else None
    hide = () if zeroed else (lambda layer, _: gone[layer],)
    _, second = dense(model, lambda: model(OTHER, **given), *hide, zeroed=zeroed)
    before = second.maps if zeroed else [layer[0] for layer in second.before]
    queries_B1 = real.sum(-1, keepdim=True)
    expected = [
        (received(a, real) * g.squeeze(2)).sum(-1) / queries_B1
        for a, g in zip(before, gone, strict=True)
    ]
    chosen = [
        (received(a, real) * g.squeeze(2)).sum(-1) / queries_B1
        for a, g in zip(first.maps, gone, strict=True)
    ]
    torch.testing.assert_close(log.removals[0].realised_BLH, torch.stack(expected, 1).float())
    torch.testing.assert_close(log.removals[0].mass_BLH, torch.stack(chosen, 1).float())
    assert log.removals[0].left_BLH[:, 0, 0].tolist() == [5 if padded else 9, 9]


def test_realised_and_chosen_mass_differ_where_the_text_has_changed() -> None:
    model = llama()
    with torch.no_grad(), intervene(model, MaskSinks(2)) as log:
        model(IDS)
        model(OTHER)
        model(OTHER)
    assert not torch.allclose(log.removals[0].realised_BLH, log.removals[0].mass_BLH, atol=0.01)
    summary = log.summary()
    assert summary["realised_mass"] == pytest.approx(
        torch.stack([removal.realised_BLH for removal in log.removals]).mean().item()
    )
    assert summary["left"] == 10


def test_measuring_can_be_left_out_and_changes_nothing(monkeypatch) -> None:
    model, outs = HandWritten(), []
    for measure in (True, False):
        with intervene(model, MaskSinks(2), WindowAttention(4), measure=measure) as log:
            outs.append([model(IDS), model(OTHER)])
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))
    assert all(
        bool(removal.realised_BLH.isnan().all() & removal.left_BLH.isnan().all())
        for removal in log.removals
    )
    assert math.isnan(log.summary()["realised_mass"]) and log.summary()["removed_mass"] > 0


def test_the_table_has_a_row_per_forward_edit_row_layer_and_head() -> None:
    model = llama()
    edits = (
        MaskSinks(2),
        MaskSinks(1, control="random", layers=1, heads=(0, 3)),
        MaskPositions(5, steps=(2, 3)),
    )
    with torch.no_grad(), intervene(model, *edits) as log:
        for ids in (IDS, OTHER, IDS):
            model(ids)
    table = pd.DataFrame(log.table(keys=True))
    assert tuple(table) == (*TABLE_COLUMNS, "keys")
    assert table.groupby("edit").size().to_dict() == {
        "mask_sinks": 32,
        "mask_sinks#2": 8,
        "mask_positions": 16,
    }
    assert sorted(table[table.edit == "mask_sinks#2"]["head"].unique()) == [0, 3]
    assert table[table.edit == "mask_sinks#2"].layer.unique().tolist() == [1]
    assert table[table.edit == "mask_positions"].forward.unique().tolist() == [2]
    row = table[
        (table.edit == "mask_sinks")
        & (table.forward == 2)
        & (table.layer == 1)
        & (table["head"] == 3)
    ].iloc[1]
    removal = next(
        removal
        for removal in log.removals
        if removal.label == "mask_sinks" and removal.forward == 2
    )
    assert row["row"] == 1 and row["keys"] == removal.columns_BLHM[1, 1, 3].tolist()
    for name in ("removed", "mass", "realised", "overlap", "left"):
        assert row[name] == getattr(removal, f"{name}_BLH")[1, 1, 3].item(), name
    assert table[table.edit == "mask_positions"].mass.isna().all()
    assert table.realised.between(0, 1).all()


def test_keys_that_stay_the_same_are_listed_once() -> None:
    # 256 hidden positions, 1024 heads and 256 steps would be 67 million numbers.
    model = llama()
    with torch.no_grad(), intervene(model, MaskPositions((3, 5))) as log:
        for ids in (IDS, OTHER):
            model(ids)
    keys = log.table(keys=True)["keys"]
    half = len(keys) // 2
    assert keys == [[3, 5]] * (2 * 2 * 2 * 4)
    assert all(one is other for one, other in zip(keys[:half], keys[half:], strict=True))


def test_a_table_can_be_written_and_read_as_parquet(tmp_path) -> None:
    model = HandWritten()
    with intervene(model, MaskSinks(epsilon=0.5)) as log:
        model(IDS)
        model(IDS)
    shown = [repr(one) for one in (log, log.removals[0])]
    assert not [text for text in shown if len(text) > 400 or "tensor" in text or "Handler" in text]
    table = pd.DataFrame(log.table())
    table.to_parquet(tmp_path / "removals.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "removals.parquet"), table)
    with intervene(model, MaskSinks(1), allow_idle=True) as log:
        model(IDS)
    empty = pd.DataFrame(log.table())
    assert tuple(empty) == TABLE_COLUMNS and len(empty) == 0 and empty.mass.dtype == "float32"
    assert math.isnan(log.summary()["removed_mass"]) and log.summary()["removals"] == 0


def test_the_prefix_is_counted_apart_also_in_the_middle_of_a_memory() -> None:
    model = Prefixed()
    with intervene(model, MaskPositions(0)) as log:
        model(IDS)
    assert log.prefix == 2
    # Room at the end of a memory is no prefix.
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 8, 4)
    seen = (torch.arange(8) < 3).expand(1, 1, 3, 8)

    class Roomy(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=seen)

    roomy = Roomy()
    with intervene(roomy, WindowAttention(1)) as log, trace(roomy) as recording:
        roomy()
    assert log.prefix == 0
    assert recording.received[0][0, 0, 0].gt(0).tolist() == [True] * 3 + [False] * 5


def test_a_row_that_sees_nothing_loses_nothing_and_says_nothing_of_the_prefix() -> None:
    q_BHSD, seen_BHSS = torch.randn(2, 1, 4, 4), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    seen_BHSS[1] = False

    class HalfHidden(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q_BHSD, q_BHSD, q_BHSD, attn_mask=seen_BHSS
            )

    model = HalfHidden()
    with intervene(model, MaskSinks(epsilon=0.0)) as log:
        model()
        model()
    assert log.prefix == 0
    removed_B = log.removals[0].removed_BLH[:, 0, 0]
    assert removed_B[0] > 0 and removed_B[1] == 0


def test_what_is_evicted_comes_back_with_a_full_forward_of_a_model_with_sinks_in_front() -> None:
    model = Prefixed()
    with intervene(model, MaskSinks(2, removal="evict")) as log:
        for ids in (IDS, OTHER, IDS):
            model(ids)
    assert log.prefix == 2 and len(log.removals) == 2
    assert all(
        torch.equal(one.removed_BLH, torch.full_like(one.removed_BLH, 2)) for one in log.removals
    )


class Uneven(torch.nn.Module):
    """Two layers with different numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(Heads(number) for number in (2, 3))

    def forward(self) -> list[torch.Tensor]:
        return [layer() for layer in self.layers]


class Heads(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.qkv = torch.randn(3, 1, number, 6, 4)

    def forward(self) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self.qkv)


def test_layers_with_different_numbers_of_heads_have_entries_of_their_own() -> None:
    model = Uneven()
    with intervene(model, MaskSinks(1), MaskSinks(1, heads=-1)) as log:
        model()
        model()
    found = [(removal.label, removal.layer_numbers, removal.heads) for removal in log.removals]
    one, other = "mask_sinks", "mask_sinks#2"
    assert found == [
        (one, (0,), (0, 1)),
        (one, (1,), (0, 1, 2)),
        (other, (0,), (1,)),
        (other, (1,), (2,)),
    ]
    table = pd.DataFrame(log.table())
    assert table.groupby(["edit", "layer"]).size().tolist() == [2, 3, 1, 1]


def test_columns_that_do_not_change_are_kept_once() -> None:
    model = HandWritten()
    with intervene(model, MaskPositions((1, 2))) as log:
        for _ in range(3):
            model(IDS)
    first, *others = (removal.columns_BLHM for removal in log.removals)
    assert all(other is first for other in others)


@pytest.mark.parametrize("rule", ["positional", "left_to_right"])
@pytest.mark.parametrize("edit", [None, MaskSinks(1), WindowAttention(2), TruncateContext(0, 2, 1)])
def test_forced_orders_of_unmasking_go_with_edits(rule: str, edit: object) -> None:
    model = tiny_model(1)
    canvas = Canvas.from_prompts([[5, 6, 7, 8]], new_tokens=6, mask_id=model.config.mask_token_id)
    generator = torch.Generator().manual_seed(0)
    with nullcontext() if edit is None else intervene(model, edit):
        order = [
            int(step.committed_BS.nonzero()[0, 1])
            for step in denoise(model.denoiser(), canvas, rule=rule, generator=generator)
        ]
    expected = list(range(4, 10))
    if rule == "positional":
        noise = torch.rand(1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        rank = noise.argsort(1)[0].tolist()
        expected.sort(key=lambda column: rank[column])
    assert order == expected


@pytest.mark.parametrize(
    "edit",
    [
        MaskPositions((2, 3), steps=(1, 2)),
        WindowAttention(2),
        MaskSinks(1, source="carried", limit=4),
        BlockKeys("top:k=2", how="shuffle_value"),
    ],
)
def test_checkpointed_gradients_are_those_of_the_edited_model(edit: object) -> None:
    grads, logs = [], []
    for checkpointing in (False, True):
        model = checkpointed(llama()) if checkpointing else llama().train()
        with intervene(model, edit) as log:
            model(IDS)
            model(IDS).logits.square().sum().backward()
        grads.append(model.model.layers[0].self_attn.v_proj.weight.grad)
        logs.append(log)
    torch.testing.assert_close(grads[0], grads[1])
    assert len(logs[0].removals) == len(logs[1].removals) and logs[1].forwards == 2
