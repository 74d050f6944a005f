"""The fused pass where there is no GPU: its kernels under Triton's interpreter, and when it is
chosen.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sinklab.core.attention import Scores, attention_statistics, received
from sinklab.extras.fast.score_pass import Fused

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = """
import runpy, sys, warnings

warnings.simplefilter("ignore")
# of which a fork has imported both, to be compiled
for name in [*sys.modules]:
    if name.startswith("triton") and "._C" not in name or name.endswith("triton_kernels"):
        del sys.modules[name]
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""runs a file"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is made for Linux alone")
def test_the_kernels_give_what_the_loop_and_the_dense_map_give(python):
    run = subprocess.run(
        [python, "-c", INTERPRETED, Path(__file__).with_name("interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "13 calls compared\n"


def test_a_cpu_is_not_served_and_kernels_stay_unloaded():
    scores = Scores.of(torch.randn(1, 2, 600, 8), torch.randn(1, 1, 600, 8))
    assert Fused.serving(scores, ("received",)) is None
    attention_statistics(scores, ("received",))
    assert "sinklab.extras.fast.triton_kernels" not in sys.modules


def test_a_chunk_that_is_named_is_kept_to(monkeypatch):
    monkeypatch.setattr(received, "fast_path", lambda *call: pytest.fail("a fast path was asked"))
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    attention_statistics(Scores.of(q, k), ("received",), chunk=4)
