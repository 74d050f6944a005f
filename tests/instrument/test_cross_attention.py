"""Attention to another sequence is left alone, and the recording says so."""

# B batch, H heads, Q queries, S keys, D width
import pytest
import torch
from dense_twin import dense, received
from torch import nn
from torch.testing import assert_close

from refusals import refusing
from sinklab.core.instrument import BlockKeys, Positions, intervene, trace

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


SELF = (0, 1, 2, 4)
"""Numbers of the calls that attend to their own sequence: the encoder's, and every other one of the
decoder.
"""


@pytest.mark.parametrize(
    "kind, queries, side",
    [("t5", 5, "left"), ("bart", 12, "left"), ("bart", 15, "right")],
)
def test_an_encoder_decoder_is_traced_in_its_self_attention(kind, queries, side):
    model, given = translator(kind), source(queries, side)
    maps = maps_of(model, given)
    with trace(model) as recording, torch.no_grad():
        traced = model(**given)
    with torch.no_grad():
        assert torch.equal(model(**given)[0], traced[0])
    assert len(recording.layers) == 4 and len(recording.cross_attention) == 2
    assert not {*recording.layers} & {*recording.cross_attention}
    assert all(("EncDec" in path or "encoder_attn" in path) for path in recording.cross_attention)
    real_BS = given["attention_mask"].bool()
    for layer, number in enumerate(SELF):
        real_BQ = real_BS if layer < 2 else torch.ones(2, queries, dtype=torch.bool)
        expected_BHS = received(maps[number], real_BQ)
        found_BHS = recording.received[0][:, layer, :, : expected_BHS.shape[-1]]
        assert_close(found_BHS, expected_BHS, rtol=1e-5, atol=1e-5)


def test_an_edit_leaves_cross_attention_as_it_is():
    model, given = translator("bart"), source(12, "left")
    edit = BlockKeys(Positions((3,)), when="now")
    with torch.no_grad(), intervene(model, edit) as log:
        edited = model(**given)[0]
    assert len(log.tap.layers) == 4 and not any("encoder_attn" in path for path in log.tap.layers)
    gone_S = torch.arange(12) == 3
    twin = dense(
        model, lambda: model(**given)[0], lambda layer, _: gone_S if layer in SELF else None
    )[0]
    assert_close(edited, twin, rtol=1e-4, atol=1e-5)
    layers = ("decoder.layers.1.encoder_attn",)
    with refusing("no attention layer is called"), torch.no_grad(), trace(model, layers=layers):
        model(**given)


class Latents(nn.Module):
    """Attends to another sequence, and then to its own."""

    def __init__(self):
        super().__init__()
        self.cross, self.own = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x_BQD, y_BSD):
        x_BQD = x_BQD + self.cross(x_BQD, y_BSD, y_BSD, need_weights=False)[0]
        return x_BQD + self.own(x_BQD, x_BQD, x_BQD, need_weights=False)[0]


def test_attention_within_a_function_of_torch_and_added_sinks_by_the_own_sequence_alone():
    model, x_BQD, y_BSD = Latents(), torch.randn(2, 4, 16), torch.randn(2, 9, 16)
    plain = model(x_BQD, y_BSD)
    with trace(model) as recording:
        assert torch.equal(model(x_BQD, y_BSD), plain)
    with intervene(model, BlockKeys(Positions((2,)), when="now")) as log:
        assert not torch.equal(model(x_BQD, y_BSD), plain)
    assert recording.prefix == 0 and log.tap.prefix == 0
    assert recording.layers == ["own"] and recording.cross_attention == ["cross"]
    (record,) = log.removals
    assert record.layers == ("own",) and record.columns_BLHM.unique().tolist() == [2]
    given = (x_BQD, y_BSD, y_BSD)
    for watch in (trace, intervene):
        with refusing("to another sequence alone"), watch(model.cross):
            model.cross(*given, need_weights=False)
    # its own sequence: padding tells its queries
    padding_BS = torch.zeros(2, 9, dtype=torch.bool)
    padding_BS[1, :5] = True
    with trace(model.own) as recording:
        model.own(y_BSD, y_BSD, y_BSD, key_padding_mask=padding_BS, need_weights=False)
    assert torch.equal(recording.visible[0], (~padding_BS).long() * torch.tensor([[9], [4]]))
    with refusing(r"mha.set_fastpath_enabled"), trace(model), torch.no_grad():
        model.eval()(x_BQD, y_BSD)
