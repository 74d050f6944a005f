import torch
from transformers import TrainingArguments

from sinklab.training import DiffusionTrainer, causal_loss, diffusion_loss
from sinklab.training.trainer import step_generator
from tiny_diffusion import tiny_model


def draws(*place: int) -> torch.Tensor:
    return torch.rand(4, generator=step_generator(*place))


def test_noise_belongs_to_its_place() -> None:
    places = [(seed, step, micro, rank) for seed in (0, 1) for step in range(20) for micro in (0, 1) for rank in (0, 1)]
    first = torch.stack([draws(*place) for place in places])
    assert torch.equal(first, torch.stack([draws(*place) for place in places]))
    assert len(first.unique(dim=0)) == len(places)
    assert abs(first.mean() - 0.5) < 0.05


class Seen:
    """A trainer whose model notes the noisy ids it is given."""

    def __init__(self, tmp_path, rank: int = 0, ranks: int = 1, **settings) -> None:
        self.model = tiny_model().train()
        self.noisy: list[torch.Tensor] = []
        self.model.model.embed_tokens.register_forward_pre_hook(lambda module, args: self.noisy.append(args[0]))
        self.causal: list[bool] = []
        self.model.model.register_forward_pre_hook(
            lambda module, args, kwargs: self.causal.append(kwargs["is_causal"]), with_kwargs=True
        )
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        options = {"noise_seed": 3, "time_sampler": "iid", "causal_steps": 0, **settings}
        self.trainer = DiffusionTrainer(model=self.model, args=arguments, **options)
        # what a second process of a distributed run would say of itself
        self.trainer.args = _Ranked(arguments, rank, ranks)

    def loss(self, step: int) -> float:
        self.trainer.state.global_step = step
        ids = torch.arange(3, 3 + 4 * 16).view(4, 16)
        return self.trainer.compute_loss(self.model, {"input_ids": ids}).item()


class _Ranked:
    def __init__(self, arguments, rank: int, ranks: int) -> None:
        self._arguments, self.process_index, self.world_size = arguments, rank, ranks

    def __getattr__(self, name: str):
        return getattr(self._arguments, name)


def test_ranks_steps_and_micro_batches_see_different_noise(tmp_path) -> None:
    one, two = Seen(tmp_path), Seen(tmp_path, rank=1, ranks=2)
    for seen in (one, two):
        for step in (0, 0, 1):
            seen.loss(step)
    noisy = [*one.noisy, *two.noisy]
    assert len(torch.stack(noisy).unique(dim=0)) == 6
    first = Seen(tmp_path)
    ids = torch.arange(3, 3 + 4 * 16).view(4, 16)
    assert first.loss(0) == diffusion_loss(first.model, ids, generator=step_generator(3, 0, 0, 0)).item()
    # a process that starts at step 1 sees what the other saw there
    later = Seen(tmp_path)
    later.loss(1)
    assert torch.equal(later.noisy[0], one.noisy[2])


def test_held_out_noise_repeats_and_differs_by_batch_and_rank(tmp_path) -> None:
    one, two = Seen(tmp_path), Seen(tmp_path, rank=1, ranks=2)
    for seen in (one, two):
        seen.model.eval()
        for _ in range(2):
            seen.trainer._eval_batch = 0
            seen.loss(5), seen.loss(5)
    first, second, again, again_second = one.noisy
    assert torch.equal(first, again)
    assert torch.equal(second, again_second)
    assert len(torch.stack([*one.noisy[:2], *two.noisy[:2]]).unique(dim=0)) == 4


def test_the_warm_start_is_causal_and_ends(tmp_path) -> None:
    seen = Seen(tmp_path, causal_steps=2)
    mask = seen.model.config.mask_token_id
    losses = [seen.loss(step) for step in (0, 1, 2)]
    assert seen.causal == [True, True, False]
    assert [bool((ids == mask).any()) for ids in seen.noisy] == [False, False, True]
    ids = torch.arange(3, 3 + 4 * 16).view(4, 16)
    assert losses[0] == causal_loss(seen.model, ids).item()
    expected = diffusion_loss(seen.model, ids, generator=step_generator(3, 2, 0, 0))
    assert losses[2] == expected.item()


def test_the_causal_loss_is_the_next_token_loss() -> None:
    model = tiny_model(1)
    ids = torch.randint(3, 280, (2, 7))
    with torch.no_grad():
        logits = model(ids, causal=True).logits.double()
        log_p = logits.log_softmax(-1)
        plain = -sum(log_p[b, i, ids[b, i + 1]] for b in range(2) for i in range(6)) / 12
        assert abs(causal_loss(model, ids) - plain) < 1e-5
