"""Keys of another sequence: their padding says nothing of the queries, whatever the lengths."""

# B batch, H heads, Q queries, S keys, D width
import pytest
import torch
from dense_twin import dense
from torch import nn
from torch.testing import assert_close

from refusals import refusing
from sinklab.core.probing import BlockKeys, Positions, TopKeys, intervene, trace

PADS = 4


def maps_of(model, given):
    """The maps (B, H, Q, S) of a forward."""
    return dense(model, lambda: model(**given))[1].maps


def translator(kind):
    from transformers import BartConfig, BartModel, T5Config, T5Model

    torch.manual_seed(0)
    if kind == "t5":
        config = T5Config(
            vocab_size=40,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            pad_token_id=0,
        )
        return T5Model(config).eval()
    sizes = {
        "vocab_size": 40,
        "d_model": 16,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "init_std": 0.5,
    }
    sizes |= {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")}
    return BartModel(BartConfig(**sizes)).eval()


def source(queries, side):
    generator = torch.Generator().manual_seed(1)
    ids_BS, ids_BQ = (
        torch.randint(3, 40, (2, length), generator=generator) for length in (12, queries)
    )
    real_BS = torch.ones_like(ids_BS)
    real_BS[1, slice(0, PADS) if side == "left" else slice(-PADS, None)] = 0
    return {"input_ids": ids_BS, "attention_mask": real_BS, "decoder_input_ids": ids_BQ}


@pytest.mark.parametrize(
    "kind, queries, side",
    [("t5", 5, "left"), ("t5", 12, "right"), ("bart", 12, "left"), ("bart", 15, "right")],
)
def test_a_padded_source_hides_no_query_of_the_decoder(kind, queries, side):
    model, given = translator(kind), source(queries, side)
    maps = maps_of(model, given)
    with trace(model) as recording, torch.no_grad():
        traced = model(**given)
    with torch.no_grad():
        assert torch.equal(model(**given)[0], traced[0])
    received_BLHS = torch.from_numpy(recording.array("received")[0])
    for number in (3, 5):
        found_BHS = received_BLHS[:, number, :, :12]
        assert_close(found_BHS, maps[number].sum(2), rtol=1e-5, atol=1e-5)
        visible_BS = recording.visible_by_layer[0][:, number, :12]
        assert torch.equal(visible_BS, given["attention_mask"].float() * queries)


def test_a_key_hidden_in_cross_attention_is_the_strongest_of_all_queries():
    model, given = translator("bart"), source(12, "left")
    layer = "decoder.layers.1.encoder_attn"
    maps = maps_of(model, given)
    top_BHS = torch.zeros_like(maps[5].sum(2), dtype=torch.bool)
    top_BHS.scatter_(-1, maps[5].sum(2).argmax(-1, keepdim=True), True)
    with (
        torch.no_grad(),
        intervene(model, BlockKeys(TopKeys(1), when="now", layers=(layer,))) as log,
    ):
        model(**given)
    (record,) = log.removals
    assert torch.equal(record.columns_BLHM[:, 0, :, 0], top_BHS.long().argmax(-1))
    assert_close(record.held_BLH[:, 0], maps[5].mean(2).amax(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("queries", [4, 9])
def test_multihead_attention_with_other_keys(queries):
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x_BQD, y_BSD = torch.randn(2, queries, 16), torch.randn(2, 9, 16)
    padding_BS = torch.zeros(2, 9, dtype=torch.bool)
    padding_BS[1, :5] = True
    with trace(attention) as recording:
        attention(x_BQD, y_BSD, y_BSD, key_padding_mask=padding_BS, need_weights=False)
    assert recording.prefix == 0 and recording.columns[0].tolist() == list(range(queries))
    assert torch.allclose(
        recording.received[0].sum(-1), torch.full((2, 1, 2), float(queries)), atol=1e-4
    )
    assert torch.equal(recording.visible[0], (~padding_BS).long() * queries)
    # its own sequence: padding tells its queries as before
    with trace(attention) as recording:
        attention(y_BSD, y_BSD, y_BSD, key_padding_mask=padding_BS, need_weights=False)
    assert torch.equal(recording.visible[0], (~padding_BS).long() * torch.tensor([[9], [4]]))


def test_added_sinks_are_counted_by_the_first_call_over_the_own_sequence():
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.cross, self.own = (
                nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2)
            )

        def forward(self, x_BQD, y_BSD):
            x_BQD = x_BQD + self.cross(x_BQD, y_BSD, y_BSD, need_weights=False)[0]
            return x_BQD + self.own(x_BQD, x_BQD, x_BQD, need_weights=False)[0]

    model, x_BQD, y_BSD = Latents(), torch.randn(2, 4, 16), torch.randn(2, 9, 16)
    with (
        trace(model) as recording,
        intervene(model, BlockKeys(Positions((8,)), when="now", layers=("cross",))) as log,
    ):
        model(x_BQD, y_BSD)
    assert recording.prefix == 0 and log.prefix == 0
    assert recording.columns[0].tolist() == [0, 1, 2, 3]
    (record,) = log.removals
    assert record.columns_BLHM.unique().tolist() == [8]


@pytest.mark.ring("lab")
def test_edits_by_the_position_of_queries_are_refused_there():
    from sinklab.lab.measures import WindowAttention

    model, given = translator("bart"), source(12, "left")
    refused = refusing("encoder_attn attends to")
    with torch.no_grad(), refused, intervene(model, WindowAttention(3)):
        model(**given)
    with torch.no_grad(), intervene(model, WindowAttention(3, layers=("self_attn",))):
        model(**given)
