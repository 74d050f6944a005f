import pytest
import torch
from toy_denoiser import MASK, ToyDenoiser, prompts

from refusals import refused
from sinklab.core.subject import Denoiser, Session, denoise, guided
from sinklab.lab.caching import DualCache

CANVAS = prompts([[1, 2, 3], [4]], 6)


def test_scale_zero_is_the_conditional_denoiser():
    toy = ToyDenoiser(CANVAS.attention_BS)
    wrapped = guided(toy, 0.0, CANVAS.prompt_BS, MASK)
    assert torch.equal(wrapped(CANVAS.ids_BS, CANVAS.open_BS), toy(CANVAS.ids_BS, CANVAS.open_BS))
    assert len(toy.calls) == 2


@pytest.mark.parametrize("scale", [-0.5, 1.5])
def test_guidance_equals_the_formula_on_dense_logits(scale):
    toy = ToyDenoiser(CANVAS.attention_BS)
    mixed_MV = guided(toy, scale, CANVAS.prompt_BS, MASK)(CANVAS.ids_BS, CANVAS.open_BS)
    hidden_BS = CANVAS.ids_BS.clone()
    hidden_BS[CANVAS.prompt_BS] = MASK
    cond_BSV, un_BSV = (
        toy.dense(ids_BS, CANVAS.attention_BS) for ids_BS in (CANVAS.ids_BS, hidden_BS)
    )
    expected_MV = (un_BSV + (scale + 1) * (cond_BSV - un_BSV))[CANVAS.open_BS]
    torch.testing.assert_close(mixed_MV, expected_MV, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(mixed_MV, cond_BSV[CANVAS.open_BS], atol=1e-3)


def test_bad_wrappers_are_refused():
    toy = ToyDenoiser(CANVAS.attention_BS)
    refused(r"guidance scale .*got nan", guided, toy, float("nan"), CANVAS.prompt_BS, MASK)
    refused(
        r"\(2, 9\), but .* \(2, 3\)",
        guided(toy, 1.0, CANVAS.prompt_BS[:, :3], MASK),
        CANVAS.ids_BS,
        CANVAS.open_BS,
    )
    refused(r"0 to 22, got \[3, 99\]", next, denoise(toy, CANVAS, suppress_ids=[3, 99]))


def test_a_limited_vocabulary_leaves_the_other_ids_out_of_every_probability():
    toy = ToyDenoiser(CANVAS.attention_BS)
    steps = list(denoise(toy, CANVAS, steps=3, text_vocabulary=10))
    assert steps[-1].ids_BS[CANVAS.open_BS].max() < 10
    few_MV = toy(CANVAS.ids_BS, CANVAS.open_BS)[:, :10].softmax(-1)
    torch.testing.assert_close(steps[0].score_M, few_MV.amax(-1), rtol=1e-13, atol=1e-13)


class Remembering(Denoiser):
    """Writes down what its sessions are asked; computes afresh."""

    def __init__(self, attention_BS):
        self.toy = ToyDenoiser(attention_BS)
        self.sessions = []

    def logits(self, ids_BS, at):
        return self.toy(ids_BS, at.wanted_BS)

    def begin(self, cache):
        self.sessions.append(Asked(self))
        return self.sessions[-1]


class Asked(Session):
    def __init__(self, denoiser):
        self.denoiser, self.asked = denoiser, []

    def logits(self, ids_BS, at, columns=None):
        self.asked.append((ids_BS.clone(), columns))
        return self.denoiser.logits(ids_BS, at)


def test_guidance_can_remember_if_and_only_if_its_denoiser_can():
    refused(
        "begin",
        guided(ToyDenoiser(CANVAS.attention_BS), 1.5, CANVAS.prompt_BS, MASK).begin,
        DualCache(),
    )
    toy = Remembering(CANVAS.attention_BS)
    wrapped = guided(toy, 1.5, CANVAS.prompt_BS, MASK)
    session = wrapped.begin(DualCache())
    for columns in (None, slice(3, 7), torch.arange(3, 9)):
        ours = session(CANVAS.ids_BS, CANVAS.open_BS, columns)
        assert torch.equal(ours, wrapped(CANVAS.ids_BS, CANVAS.open_BS))
        assert all(one.asked[-1][1] is columns for one in toy.sessions)
    assert len(toy.sessions) == 2, "the two calls of guidance remember apart"
    conditional, hidden = (one.asked[0][0] for one in toy.sessions)
    assert torch.equal(conditional, CANVAS.ids_BS)
    assert (hidden[CANVAS.prompt_BS] == MASK).all()
