import pytest
import torch
from toy_denoiser import ToyDenoiser, prompts, seeded, zeros

from sinklab.core.subject import denoise
from sinklab.lab.samplers import RandomOrder


def run(canvas, *, seed=None, **settings):
    toy = ToyDenoiser(canvas.attention_BS)
    generator = None if seed is None else seeded(seed)
    return list(denoise(toy, canvas, generator=generator, **settings)), toy


@pytest.mark.parametrize("steps, block_length", [(None, None), (7, 5)])
def test_the_denoiser_is_asked_only_for_open_masks_of_the_current_block(steps, block_length):
    canvas = prompts()
    done, toy = run(canvas, steps=steps, block_length=block_length)
    block_BS = torch.where(
        canvas.open_BS, (canvas.open_BS.cumsum(1) - 1) // (block_length or 12), -1
    )
    assert len(toy.calls) == len(done)
    for step, (ids_BS, wanted_BS) in zip(done, toy.calls, strict=True):
        assert torch.equal(ids_BS, step.before_BS)
        assert torch.equal(wanted_BS, step.masked_BS & (block_BS == step.block))
        assert torch.equal(wanted_BS, ~step.confidence_BS.isnan())


def test_a_head_without_a_mask_column_works():
    canvas = prompts()
    last = list(denoise(lambda ids_BS, wanted_BS: torch.zeros(int(wanted_BS.sum()), 3), canvas))[-1]
    assert (last.ids_BS[canvas.open_BS] == 0).all()


def test_equal_scores_are_committed_from_the_left():
    canvas = prompts([[1], [2]], 4)
    done = list(denoise(zeros, canvas))
    assert [step.committed_BS.nonzero().tolist() for step in done] == [
        [[0, c], [1, c]] for c in (1, 2, 3, 4)
    ]


def test_candidates_scored_minus_infinity_are_committed_last_and_before_no_other_position():
    def last_one_only(candidates):
        count = len(candidates.tokens_M)
        return torch.where(torch.arange(count) == count - 1, 0.0, -torch.inf)

    done, _ = run(prompts([[1, 2]], 4), rule=last_one_only, steps=2)
    assert [step.committed_BS.nonzero()[:, 1].tolist() for step in done] == [[2, 5], [3, 4]]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0}, {"rule": "random", "temperature": 0.5}],
)
def test_the_generator_decides_and_nothing_else(settings):
    first, again, other = (run(prompts(), seed=seed, **settings)[0] for seed in (1, 1, 2))
    torch.manual_seed(77)
    unmoved = run(prompts(), seed=1, **settings)[0]
    for step, same, still in zip(first, again, unmoved, strict=True):
        assert torch.equal(step.ids_BS, same.ids_BS)
        assert torch.equal(step.ids_BS, still.ids_BS)
    assert any(
        not torch.equal(step.ids_BS, differs.ids_BS)
        for step, differs in zip(first, other, strict=True)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"rule": RandomOrder()}])
def test_a_cpu_generator_gives_the_same_run_on_the_gpu(settings):
    canvas = prompts()
    here, toy = run(canvas, seed=1, steps=5, block_length=5, **settings)
    there = denoise(
        lambda ids_BS, wanted_BS: toy(ids_BS.cpu(), wanted_BS.cpu()).cuda(),
        canvas.to("cuda"),
        steps=5,
        block_length=5,
        generator=seeded(1),
        **settings,
    )
    for step, moved in zip(here, there, strict=True):
        assert moved.ids_BS.device.type == "cuda"
        assert torch.equal(step.ids_BS, moved.ids_BS.cpu())
