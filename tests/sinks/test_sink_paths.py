import numpy as np
import pytest
import torch

from sinklab.sinks import main_sink, trajectories


def path(positions: list[int | None], keys: int = 10) -> np.ndarray:
    """Received attention (step, 1 layer, 1 head, key) whose main sink visits ``positions``; None: padding."""
    received = np.full((len(positions), 1, 1, keys), 0.1)
    for step, position in enumerate(positions):
        if position is None:
            received[step] = np.nan
        else:
            received[step, 0, 0, position] = 5
    return received


@pytest.mark.parametrize(
    ("positions", "moves", "stay", "drift"),
    [
        ([3, 3, 3, 3], 0, 4, 0.0),
        ([0, 1, 2, 3], 3, 1, 1.0),
        ([6, 4, 2], 2, 1, -2.0),
        ([3, 3, 7, 7, 7, 3], 2, 3, 12 / 35),
        ([5], 0, 1, np.nan),
        ([2, 2, 8, None, None], 1, 2, 3.0),
        ([None, None], 0, 0, np.nan),
    ],
)
def test_synthetic_moves(positions, moves, stay, drift):
    found = trajectories(path(positions))
    assert found.position[:, 0, 0].tolist() == [-1 if position is None else position for position in positions]
    steps = sum(position is not None for position in positions)
    assert found.moves.item() == moves and found.transitions.item() == max(steps - 1, 0)
    assert found.longest_stay.item() == stay
    np.testing.assert_allclose(found.drift.item(), drift, atol=1e-12)
    if steps > 1:
        np.testing.assert_allclose(drift, np.polyfit(range(steps), positions[:steps], 1)[0], atol=1e-9)


def test_samples_layers_and_heads_keep_their_places():
    one, two = path([1, 2, 3]), path([4, 4, None])
    received = np.stack([np.concatenate([one, two], axis=2), np.concatenate([two, one], axis=2)])
    found = trajectories(received)
    assert received.shape == (2, 3, 1, 2, 10)
    assert found.position.shape == (2, 3, 1, 2) and found.moves.shape == (2, 1, 2)
    assert found.moves[:, 0].tolist() == [[2, 0], [0, 2]]
    assert found.transitions[:, 0].tolist() == [[2, 1], [1, 2]]
    assert found.longest_stay[:, 0].tolist() == [[1, 2], [2, 1]]


def test_torch_in_torch_out():
    received = torch.from_numpy(path([0, 5, 5]))
    assert main_sink(received)[:, 0, 0].tolist() == [0, 5, 5] and isinstance(main_sink(received), torch.Tensor)
    found = trajectories(received.half())
    assert isinstance(found.moves, torch.Tensor) and found.moves.item() == 1


def test_main_sink_passes_over_nan():
    received = np.array([[np.nan, 1.0, 2.0], [np.nan, np.nan, np.nan], [0.0, -1.0, np.nan]])
    assert main_sink(received).tolist() == [2, -1, 0]
    assert main_sink(torch.from_numpy(received)).tolist() == [2, -1, 0]


def test_errors():
    with pytest.raises(ValueError, match=r"step, layer, head, key\): got shape \(3, 4\)"):
        trajectories(np.ones((3, 4)))
    with pytest.raises(ValueError, match="at least one key"):
        main_sink(np.ones((3, 0)))
