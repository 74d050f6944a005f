from dataclasses import replace

import pytest
import torch

from sinklab.core.instrument import BlockKeys, TopKeys
from sinklab.lab.data.noise import corrupt, sample_times
from sinklab.lab.measures import MaskSinks, Random
from sinklab.lab.scoring import HeldoutRows, heldout_rows, row_losses
from tiny_diffusion import TEXT, tiny_loaded


def rows(count=6, length=24):
    return HeldoutRows(torch.randint(3, 280, (count, length)), size=count * length * 2)


def direct_losses(loaded, ids_RS, seed):
    """Eq. 3-4 row by row, from logits everywhere."""
    generator = torch.Generator().manual_seed(seed)
    t_R = sample_times(len(ids_RS), sampler="low_discrepancy", generator=generator)
    noisy_RS, masked_RS = corrupt(
        ids_RS, t_R, mask_id=loaded.model.config.mask_token_id, generator=generator
    )
    losses = []
    with torch.no_grad():
        for ids, noisy, masked, t in zip(ids_RS, noisy_RS, masked_RS, t_R, strict=True):
            log_p = loaded.model(noisy[None]).logits[0].double().log_softmax(-1)
            losses.append(-sum(log_p[i, ids[i]] for i in masked.nonzero()[:, 0]) / t / len(ids))
    return torch.stack(losses)


@pytest.mark.parametrize("sink", [0, 2])
def test_without_an_intervention_it_is_the_loss_itself(sink):
    loaded, text = tiny_loaded(sink), rows()
    losses = row_losses(loaded, text.ids_RS, seed=4, batch=4)
    assert torch.allclose(losses.double(), direct_losses(loaded, text.ids_RS, 4), rtol=1e-4)
    assert not torch.allclose(losses, row_losses(loaded, text.ids_RS, seed=5))


def test_hidden_sinks_change_the_loss_and_random_columns_change_it_otherwise():
    loaded, text = tiny_loaded(), rows()
    clean = row_losses(loaded, text.ids_RS)
    drawn = [BlockKeys(Random(TopKeys(3)))]
    sinks = row_losses(loaded, text.ids_RS, edits=[MaskSinks(k=3)])
    random = row_losses(loaded, text.ids_RS, edits=drawn)
    # in a row that is all masks every value is the same, so one of the six may not move
    for one, two in ((sinks, clean), (random, clean), (sinks, random)):
        assert ((one - two).abs() > 1e-4).sum() >= 5
    # what a row loses depends on its number, not on its batch
    for batch in (2, 4):
        again = row_losses(loaded, text.ids_RS, edits=drawn, batch=batch)
        assert torch.allclose(random, again, rtol=1e-4)
    assert torch.equal(row_losses(loaded, text.ids_RS), clean), "the model is left alone"
    reseeded = row_losses(loaded, text.ids_RS, edits=[replace(drawn[0], seed=1)])
    assert ((reseeded - random).abs() > 1e-4).sum() >= 5


def test_the_noise_is_the_same_whatever_is_hidden(monkeypatch):
    loaded, text = tiny_loaded(), rows()
    seen = []
    loaded.model.model.embed_tokens.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].clone())
    )
    for edits in ([], [MaskSinks(k=2)], [BlockKeys(Random(TopKeys(2)))]):
        row_losses(loaded, text.ids_RS, edits=edits)
    assert len(seen) == 5, "one pass without sinks hidden, two with"
    assert all(torch.equal(ids, seen[0]) for ids in seen)


def test_rows_come_from_a_corpus(tmp_path):
    (tmp_path / "held.txt").write_text(TEXT * 10)
    loaded = tiny_loaded()
    text = heldout_rows(loaded, tmp_path, rows=3, length=20)
    assert text.ids_RS.shape == (3, 20)
    assert text.ids_RS.dtype == torch.int64
    decoded = "".join(loaded.tokenizer.batch_decode(text.ids_RS.tolist()))
    assert (TEXT * 10).startswith(decoded)
    assert text.size == len(decoded.encode())
    assert heldout_rows(loaded, tmp_path, rows=999, length=20).ids_RS.shape[0] < 999
