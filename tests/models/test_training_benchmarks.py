"""What a training benchmark counts is what happens."""

import sys
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    # the scripts add the folder of the twin themselves, and it must not stay
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


@pytest.mark.ring("extras")
@pytest.mark.parametrize("variant", ["plain", "gate"])
def test_the_formula_of_mfu_counts_the_products_of_a_step(variant):
    import mfu
    import steps

    shape = steps.Shape(layers=2, width=64, heads=2, mlp=96, vocab=128, batch=2, length=32)
    model, batch = steps.build(shape, variant, "cpu"), steps.noisy_batch(shape, "cpu")
    model.set_attn_implementation("eager")
    # the first layer's input is an embedding that wants a gradient, so nothing of the backward pass
    # is left out
    with FlopCounterMode(display=False) as counter:
        steps.ours(model, batch).backward()
    masked = int((batch.labels_BS != -100).sum())
    counted = counter.get_total_flops()
    rotation = counted - mfu.model_flops(shape, masked, gate=variant == "gate")
    # beyond the formula: the outer products of the rotary table
    assert 0 <= rotation <= 2 * shape.tokens * 64
