"""On a device without float64 (MPS) nothing asks for it, and in float16 everything stays finite."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sinklab
from sinklab.core.attention import context
from sinklab.core.instrument import intervene, trace
from sinklab.lab.measures import MaskSinks, by_protocol
from tiny_diffusion import save_tiny

pytestmark = pytest.mark.ring("lab")

STATISTICS = (
    "received",
    "value_norm",
    "row_entropy",
    "row_logsumexp",
    "noop_bound",
    "massive_activations",
)
PROMPT = torch.arange(20, 30)[None]


class NoFloat64(TorchDispatchMode):
    """Refuses what MPS refuses, whatever the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [out] if isinstance(out, torch.Tensor) else tree_leaves(out)
        if any(isinstance(one, torch.Tensor) and one.dtype == torch.float64 for one in made):
            raise TypeError(f"{func} makes float64")
        return out


@pytest.fixture
def lacking(monkeypatch):
    """The CPU as a device without float64."""
    monkeypatch.setattr(context, "NO_FLOAT64", {"cpu"})
    return NoFloat64()


def test_the_mode_sees_float64(lacking):
    with pytest.raises(TypeError, match="makes float64"), lacking:
        torch.ones(2).double()


@pytest.mark.parametrize(
    "decoding, control",
    [
        ({"temperature": 0.7, "top_p": 0.9, "seed": 0}, "random"),
        ({"rule": "origin", "seed": 0}, "matched"),
        ({"schedule": "threshold", "cache": "dual", "block_length": 2}, "equal_mass"),
        ({"cache": "prefix", "block_length": 2}, "random"),
    ],
    ids=str,
)
def test_loading_tracing_masking_and_writing_need_no_float64(tmp_path, lacking, decoding, control):
    folder, how = save_tiny(tmp_path / "model", 1), {"max_new_tokens": 4, **decoding}
    with lacking:
        lm = sinklab.load(folder)
        with trace(lm.model, STATISTICS) as recording:
            lm.model.generate(PROMPT, **how)
        with intervene(lm.model, by_protocol("paper", 1, control=control)) as log:
            written = lm.model.generate(PROMPT, **how)
    assert log.removals and lm.special.mask not in written
    assert recording.array("received").shape[-1] == PROMPT.shape[1] + 4 + 1


def test_half_precision_gives_finite_numbers(tmp_path):
    folder = save_tiny(tmp_path / "model", 1)
    lm, exact = sinklab.load(folder, dtype="float16"), sinklab.load(folder)
    for model in (lm.model, exact.model):
        assert model(PROMPT).logits.isfinite().all()
    assert (lm.model(PROMPT).logits - exact.model(PROMPT).logits).abs().max() < 0.05
    with trace(lm.model, STATISTICS) as recording:
        written = lm.model.generate(PROMPT, max_new_tokens=6, temperature=0.5, seed=0)
    assert lm.special.mask not in written
    for name in STATISTICS:
        assert torch.tensor(recording.array(name)).isfinite().all(), name
    assert recording.received[0].dtype == torch.float32
    assert recording.received[0].sum(-1).allclose(torch.tensor(16.0), atol=2e-2)
    with intervene(lm.model, MaskSinks(k=1)) as log:
        lm.model.generate(PROMPT, max_new_tokens=6, cache="dual", block_length=3)
    assert log.removals and lm.loss("The old man sat.") == pytest.approx(
        exact.loss("The old man sat."), rel=0.01
    )
