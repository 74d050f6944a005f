"""The benchmark of likelihoods holds two ways to the same number, and a batch to its rows."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.mark.slow
def test_llada_s_loop_and_ours_estimate_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    import likelihoods as benchmark
    from decoding import QUICK, build

    sizes = replace(QUICK, prompts=(8, 10))
    model = build(sizes, "cpu")
    found = benchmark.likelihoods(model, sizes, (4, 6), masks=512, repeats=1)
    # 16 differences of independent means, in their standard errors: beyond 5 by chance once in
    # 100,000 runs
    assert all(abs(one) < 5 for cell in found.values() for one in cell["apart_in_stderrs"])
    assert benchmark.ragged(model, sizes, repeats=1)["turns"] == 1
    monkeypatch.setattr(sys, "argv", ["likelihoods.py", "--quick"])
    benchmark.main()
    said = capsys.readouterr().out
    assert "together over one by one" in said and "written to" not in said
