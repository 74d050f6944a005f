"""Attention to another sequence is refused by name, and a part without any is read."""

# B batch, Q queries, S keys, D width
import pytest
import torch
from torch import nn

from refusals import refusing
from sinklab.core.instrument import BlockKeys, Positions, intervene, trace

EDIT = BlockKeys(Positions((2,)), when="now")
WATCHES = [trace, lambda model: intervene(model, EDIT)]
IDS = torch.arange(3, 15).view(2, 6)


def translator(kind):
    from transformers import BartConfig, BartModel, T5Config, T5Model

    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        return T5Model(T5Config(vocab_size=40, pad_token_id=0, **sizes)).eval()
    sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}
    both = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()}
    return BartModel(BartConfig(vocab_size=40, d_model=16, **both)).eval()


@pytest.mark.parametrize("kind, name", [("t5", "EncDecAttention"), ("bart", "encoder_attn")])
@pytest.mark.parametrize("watch", WATCHES)
def test_an_encoder_decoder_is_refused_and_its_encoder_is_not(kind, name, watch):
    model = translator(kind)
    message = f"^decoder.*{name} attends to another sequence.*model.encoder"
    with refusing(message), torch.no_grad(), watch(model):
        model(input_ids=IDS, decoder_input_ids=IDS)
    with torch.no_grad(), watch(model.encoder) as seen:
        model.encoder(input_ids=IDS)
    assert watch is not trace or seen.received[0].shape == (2, 2, 2, 6)


class Latents(nn.Module):
    """Attends to another sequence, and then to its own."""

    def __init__(self):
        super().__init__()
        self.cross, self.own = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x_BQD, y_BSD):
        x_BQD = x_BQD + self.cross(x_BQD, y_BSD, y_BSD, need_weights=False)[0]
        return x_BQD + self.own(x_BQD, x_BQD, x_BQD, need_weights=False)[0]


def test_attention_within_a_function_of_torch():
    model, x_BQD, y_BSD = Latents(), torch.randn(2, 4, 16), torch.randn(2, 9, 16)
    for watch in WATCHES:
        with refusing("^cross attends to another sequence"), watch(model):
            model(x_BQD, y_BSD)
    with intervene(model.own, EDIT) as log:
        model.own(y_BSD, y_BSD, y_BSD, need_weights=False)
    assert log.removals[0].columns_BLHM.unique().tolist() == [2]
    # its own sequence: padding tells its queries
    padding_BS = torch.zeros(2, 9, dtype=torch.bool)
    padding_BS[1, :5] = True
    with trace(model.own) as recording:
        model.own(y_BSD, y_BSD, y_BSD, key_padding_mask=padding_BS, need_weights=False)
    assert torch.equal(recording.visible[0], (~padding_BS).long() * torch.tensor([[9], [4]]))
    with refusing(r"mha.set_fastpath_enabled"), trace(model), torch.no_grad():
        model.eval().own(y_BSD, y_BSD, y_BSD, need_weights=False)
