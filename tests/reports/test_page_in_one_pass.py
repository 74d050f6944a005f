"""What one pass over the attention of a sample finds equals what whole arrays give."""

import runpy
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from noted import noted_again
from numpy.testing import assert_allclose, assert_array_equal
from pandas.testing import assert_frame_equal
from simulated import Simulation, simulate, whole_of

from sinklab.core.sinks import Excess, even_share
from sinklab.lab.analysis import (
    compare_rules,
    counts,
    epsilon_curve,
    motion,
    overlap_by_head,
    overlap_by_layer,
    overlap_by_step,
)
from sinklab.lab.analysis.counts import main_sink
from sinklab.lab.analysis.rules import Top
from sinklab.lab.analysis.thresholds import score_histogram
from sinklab.lab.records.storage import write_arrays
from sinklab.lab.reports import as_studies


def rewritten(run, change):
    """The run with other arrays of attention in sample 0, of the same shape."""
    arrays = run.arrays("attention", part=0)
    dtypes = {
        key: "float32" if values.dtype.kind == "f" else None for key, values in arrays.items()
    }
    dims = run.dims("attention", part=0)
    write_arrays(run.path / "attention-0000.safetensors", arrays | change(arrays), dims, dtypes)
    return noted_again(run, "attention-0000.safetensors")


def causal(arrays):
    """Key j is seen by the queries from j on, and at the third step by nobody."""
    visible_TK = np.broadcast_to(
        np.arange(arrays["visible"].shape[1], 0, -1.0), arrays["visible"].shape
    ).copy()
    visible_TK[2] = 0
    return {"visible": visible_TK, "positions": np.full(len(visible_TK), float(visible_TK.max()))}


def cached(arrays):
    """From the second step on a quarter of the positions run, and one key is not there."""
    ran_T = np.where(np.arange(len(arrays["visible"])) > 0, 0.25, 1.0)
    received, visible = (
        arrays["received"] * ran_T[:, None, None, None],
        arrays["visible"] * ran_T[:, None],
    )
    received[3:, ..., 4], visible[3:, 4] = np.nan, np.nan
    return {"received": received, "visible": visible}


RUNS = {
    "diffusion": (Simulation(samples=7, key_norms=True), None),
    "added sinks": (Simulation(samples=1, added=2), None),
    "autoregressive": (Simulation(samples=1, family="autoregressive"), None),
    "causal": (Simulation(samples=1, added=1), causal),
    "cached": (Simulation(samples=1, added=1, key_norms=True), cached),
}


@pytest.fixture(scope="module")
def study_of(tmp_path_factory):
    """Each run is made and measured once."""

    @cache
    def of(name):
        size, change = RUNS[name]
        run = simulate(tmp_path_factory.mktemp("simulated") / "run", size)
        return as_studies(rewritten(run, change) if change else run)[0]

    return of


@pytest.mark.parametrize("rule", [None, Top(2), Excess(0.5)], ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_numbers_of_a_pass_are_those_of_whole_arrays(study_of, name, rule):
    sample = as_studies(study_of(name).run, rule=rule)[0].samples[0]
    seen, added = sample.seen, sample.added
    received, (share, sinks) = sample.received_TLHK, whole_of(sample)
    known = np.where(sample.exists_TK[:, None, None], received, 0)
    assert_array_equal(seen.main_TLH, main_sink(share))
    assert_array_equal(seen.text_main_TLH, main_sink(share[..., added:]))
    assert_array_equal(seen.events_TLK, sinks.sum(2))
    assert_array_equal(seen.sinks_TLH, sinks.sum(-1))
    alike = {"rtol": 1e-6, "atol": 1e-7}
    assert_allclose(seen.share_TLH, np.fmax.reduce(share, axis=-1), **alike)
    assert_allclose(seen.text_share_TLH, np.fmax.reduce(share[..., added:], axis=-1), **alike)
    assert_allclose(seen.taken_TLH, np.where(sinks, known, 0).sum(-1), **alike)
    there = np.where(np.nan_to_num(sample.visible_TK[:, None, None]) > 0, received, 0)
    assert_allclose(seen.total_TLH, there.sum(-1), **alike)
    assert_allclose(seen.share_TLK, share.mean(2), **alike)
    scores = np.where(sinks, share * sample.positions_T[:, None, None, None], 0)
    assert_allclose(seen.score_TL, scores.sum((2, 3), dtype=float), **alike)
    assert_allclose(seen.stays_TLH[1:], overlap_by_step(sinks), **alike)
    assert_allclose(seen.alike_TL, overlap_by_head(sinks), **alike)
    most_T111 = np.nanmax(np.nan_to_num(sample.visible_TK), axis=1)[:, None, None, None]
    assert seen.greatest == pytest.approx(np.nanmax(share * most_T111), rel=1e-6)
    if added:
        assert_allclose(seen.added_share_TLH, share[..., :added].sum(-1), **alike)


@pytest.mark.parametrize("name", RUNS)
def test_a_study_of_one_pass_a_sample_is_the_sum_of_its_functions(study_of, name):
    study = study_of(name)
    measured, parts = study.measured, []
    for sample in study.samples:
        received, positions = sample.received_TLHK, sample.positions_T[:, None, None]
        whole = received, sample.visible_TK[:, None, None], positions
        text = (
            received[..., sample.added :],
            sample.visible_TK[:, None, None, sample.added :],
            positions,
        )
        found = (
            epsilon_curve(*whole),
            score_histogram(*whole, log=True, bins=80),
            compare_rules(*whole),
        )
        moved = motion(*whole, added=sample.added)
        parts.append((*found, moved, motion(*text).overall, overlap_by_layer(whole_of(sample)[1])))
    curves, histograms, rules, motions, texts, shared = zip(*parts, strict=True)
    assert_array_equal(measured.curve.sinks_LE, sum(one.sinks_LE for one in curves))
    assert_array_equal(measured.curve.places_L, sum(one.places_L for one in curves))
    assert_array_equal(measured.histogram.counts, sum(one.counts for one in histograms))
    for place, row in enumerate(measured.rules):
        assert row.sinks == sum(rows[place].sinks for rows in rules)
        absorbed, received = (
            sum(getattr(rows[place], name) for rows in rules) for name in ("absorbed", "received")
        )
        assert row.absorb == pytest.approx(absorbed / received)
    mobility = np.concatenate([one.mobility.ravel() for one in motions])
    assert_array_equal(measured.motions["mobility"], mobility)
    assert_array_equal(
        measured.motions["moves"], np.concatenate([one.moves.ravel() for one in motions])
    )
    if study.sink_count:
        assert study.text_motion.mobility == pytest.approx(texts[0].mobility, nan_ok=True)
    assert_allclose(measured.overlap_by_layer_LL, np.nanmean(shared, axis=0), rtol=1e-6)
    scaled = even_share(sample.received_TLHK, *whole[1:])[0]
    assert_allclose(np.concatenate([slab.received for slab in sample.slabs()]), scaled, rtol=1e-6)


@pytest.mark.parametrize("together", [1, 5])
@pytest.mark.parametrize("name", RUNS)
def test_steps_leave_the_same_however_many_are_taken_together(
    study_of, monkeypatch, name, together
):
    size, whole = RUNS[name][0], study_of(name)
    assert whole.measured.rules
    one = vars(whole.samples[0].seen)
    monkeypatch.setattr(
        counts, "SLAB", together * size.layers * size.heads * (size.added + size.text)
    )
    parts = as_studies(whole.run)[0]
    assert len(list(parts.samples[0].slabs())) >= size.steps / together
    other = vars(parts.samples[0].seen)
    for key, value in one.items():
        if isinstance(value, np.ndarray) and key != "_before":
            assert_allclose(other[key], value, rtol=1e-6, err_msg=key)
    for key in ("sinks_LE", "places_L"):
        assert_array_equal(getattr(parts.measured.curve, key), getattr(whole.measured.curve, key))
    assert_array_equal(parts.measured.histogram.counts, whole.measured.histogram.counts)
    assert_frame_equal(parts.measured.motions, whole.measured.motions)
    for row, expected in zip(parts.measured.rules, whole.measured.rules, strict=True):
        assert (row.sinks, row.keys, row.with_sink, row.both) == (
            expected.sinks,
            expected.keys,
            expected.with_sink,
            expected.both,
        )
        assert row.absorbed == pytest.approx(expected.absorbed)


@pytest.mark.slow
def test_samples_that_are_not_kept_are_measured_in_processes(tmp_path, monkeypatch):
    run = simulate(tmp_path / "run", Simulation(samples=3))
    kept = as_studies(run)[0].measured
    monkeypatch.setattr("sinklab.lab.reports.study.MOST_KEPT", 0)
    study = as_studies(run)[0]
    for name in ("by_layer", "by_step", "motions"):
        assert_frame_equal(getattr(study.measured, name), getattr(kept, name))
    assert "seen" in vars(study.sample(0)) and "seen" not in vars(study.sample(2))
    (run.path / "attention-0002.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"attention-0002\.safetensors"):
        _ = as_studies(run)[0].measured


@pytest.mark.slow
def test_the_benchmark_of_the_page_runs(monkeypatch, capsys):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "argv", ["runs.py", "--quick"])
    runpy.run_path(str(folder / "runs.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "write its page: " in said and "written to" not in said
