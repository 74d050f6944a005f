"""What a trace learns from the denoiser about the canvas, and layers that are unlike one
another.
"""

import pytest
import torch
from torch.testing import assert_close

from sinklab.core.instrument import trace
from tiny_diffusion import tiny_model
from tiny_models import HandWritten

IDS = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.ring("lab")
def test_a_session_announces_the_columns_that_run_predecessors_included():
    model = tiny_model(1, logit_shift=True)
    session, columns = model.denoiser().begin(), torch.tensor([0, 5])
    wanted = torch.zeros(2, 12, dtype=torch.bool)
    wanted[:, columns] = True
    with trace(model, ("received", "row_entropy")) as recording:
        session(IDS, wanted)
        session(IDS + 1, wanted, columns)
        model.denoiser()(IDS + 2, wanted)
    ran = [columns_Q.tolist() for columns_Q in recording.columns]
    assert ran == [list(range(12)), [0, 4, 5], list(range(12))]
    assert recording.values("row_entropy")[1].shape[-1] == 3


def test_what_was_recorded_is_ordinary_tensors():
    model = tiny_model(1)
    wanted = torch.ones(2, 12, dtype=torch.bool)
    with trace(model, ("received", "output_norm"), maps=[(0, 0, 0)]) as recording:
        assert model.denoiser()(IDS, wanted).is_inference()
    kept = (
        recording.received,
        recording.values("output_norm"),
        recording.visible,
        recording.columns,
    )
    for tensor in (*(tensors[0] for tensors in kept), recording.map(0, 0, 0)):
        assert not tensor.is_inference()
        tensor.mul_(2)


def test_layers_with_unlike_numbers_of_heads_and_more_of_them_than_expected():
    model = HandWritten(layers=2)
    model.blocks[1].style = "headless"
    # a module that runs three times counts once among the modules of its class
    model.blocks.append(model.blocks[0])
    model.blocks.append(model.blocks[0])
    ids = IDS % 30
    with trace(model, ("received", "output_norm")) as recording:
        model(ids)
        model(ids)
    assert recording.layers == ["blocks.0", "blocks.1", "blocks.0#2", "blocks.0#3"]
    for name in ("received", "output_norm"):
        first, second = recording.values(name)
        assert first.shape == (2, 4, 2, 12)
        assert_close(first, second, equal_nan=True)
        assert first[:, 1, 1].isnan().all()
        assert not first[:, [0, 2, 3]].isnan().any() and not first[:, 1, 0].isnan().any()
    assert_close(recording.received[0][:, 2].sum(-1), torch.full((2, 2), 12.0))
