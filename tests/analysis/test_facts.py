"""The facts of a sample are those of its whole arrays, counted the slow way."""

# T steps, L layers, H heads, K keys (added sinks first)
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from sinklab.core.registry import rules
from sinklab.core.sinks import DEFAULT, STATES, Excess, find_sinks
from sinklab.lab.analysis import facts as module
from sinklab.lab.analysis.counts import main_sink
from sinklab.lab.analysis.facts import AXES, COUNTS, EDGES, EPSILONS, HEADS, RULES, facts
from sinklab.lab.analysis.movement import motion
from sinklab.lab.analysis.rules import Top

T, L, H, K, ADDED = 6, 3, 4, 40, 1


def arrays_of(kind="full"):
    """A recording of random attention, some of it strong; cached steps run a quarter of queries."""
    rng = np.random.default_rng(3)
    weight = rng.gamma(0.3, size=(T, L, H, K, K))
    weight[..., rng.integers(0, K, 3)] += 2
    visible_TK = np.full((T, K), float(K))
    if kind == "causal":
        weight = np.tril(weight)
        visible_TK[:] = np.arange(K, 0, -1)
    weight /= weight.sum(-1, keepdims=True)
    received = weight.sum(-2)
    if kind == "cached":
        ran_T = np.where(np.arange(T) > 0, 0.25, 1)
        received, visible_TK = received * ran_T[:, None, None, None], visible_TK * ran_T[:, None]
        received[3:, ..., 4], visible_TK[3:, 4] = np.nan, 0
    return {
        "received": received.astype(np.float16),
        "visible": visible_TK.astype(np.float32),
        "positions": np.full(T, K - ADDED if kind == "cached" else K, np.float32),
        "value_norm": rng.random((T, L, K)).astype(np.float16),
    }


def scaled_of(arrays):
    """Received attention as if all positions had run, and the queries that see each key then."""
    visible = arrays["visible"][:, None, None]
    factor = arrays["positions"][:, None, None, None] / visible.max(-1, keepdims=True)
    return arrays["received"].astype(np.float32) * factor, visible * factor


@pytest.mark.parametrize("rule", [DEFAULT, Excess(0.5), Top(2)], ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "cached"])
def test_facts_are_those_of_whole_arrays(kind, rule):
    arrays = arrays_of(kind)
    found = facts(arrays, rule=rule, added=ADDED)
    received, visible = scaled_of(arrays)
    sinks = find_sinks(received, rule, visible)
    least = max(8, visible.max() / 3) if kind == "causal" else 1
    seen = np.where(visible >= least, visible, np.nan)
    share = received / seen
    assert_array_equal(found["main"], main_sink(share))
    assert_array_equal(found["events_TK"], sinks.sum((1, 2)))
    assert_array_equal(found["sinks"], sinks.sum(-1))
    close = {"rtol": 1e-5, "atol": 1e-7}
    assert_allclose(found["share"], np.fmax.reduce(share, axis=-1), **close)
    assert_allclose(found["text_share"], np.fmax.reduce(share[..., ADDED:], axis=-1), **close)
    assert_allclose(found["added_share"], share[..., :ADDED].sum(-1), **close)
    taken, total = (np.nansum(received * some, -1) for some in (sinks, 1.0))
    assert_allclose(found["absorbed"], taken / total, **close)
    assert_allclose(found["share_TK"], share.mean((1, 2)), **close)
    common = (sinks[1:] & sinks[:-1]).sum(-1)
    either = (sinks[1:] | sinks[:-1]).sum(-1)
    assert_allclose(found["stays"][1:], common / np.where(either, either, np.nan), **close)
    moved = motion(received, visible, rule=rule)
    assert_array_equal(found["heads"][HEADS.index("mobility")], moved.mobility)
    assert found["events"].tolist() == sinks.sum((0, 2, 3)).tolist()
    for name, array in found.items():
        assert array.ndim == len(AXES[name]), name


@pytest.mark.parametrize("kind", ["full", "causal", "cached"])
def test_rules_thresholds_and_scores_are_counted(kind):
    arrays = arrays_of(kind)
    found = facts(arrays, added=ADDED)
    received, visible = scaled_of(arrays)
    for epsilon, count_L in zip(EPSILONS, found["curve"].T, strict=True):
        expected = find_sinks(received, Excess(float(epsilon)), visible).sum((0, 2, 3))
        assert count_L.tolist() == expected.tolist()
    first = find_sinks(received, DEFAULT, visible)
    for row, rule in zip(found["rules"], RULES.values(), strict=True):
        flags, of = find_sinks(received, rule, visible), dict(zip(COUNTS, row, strict=True))
        assert of["sinks"] == flags.sum() and of["with_sink"] == flags.any(-1).sum()
        assert (of["both"], of["either"]) == ((flags & first).sum(), (flags | first).sum())
        assert of["absorbed"] == pytest.approx(received[flags].sum(), rel=1e-5)
    assert found["cells"].sum() == found["places"].sum() == of["keys"]
    if kind == "full":
        assert_array_equal(found["cells"][1:-1], np.histogram(received, EDGES)[0])


def test_layers_that_are_taken_apart_leave_the_same(monkeypatch):
    arrays = arrays_of()
    whole = facts(arrays, added=ADDED)
    monkeypatch.setattr(module, "CHUNK", 1)
    for name, array in facts(arrays, added=ADDED).items():
        assert_allclose(array, whole[name], rtol=1e-12, err_msg=name)


def test_norms_are_told_apart_by_state_and_sink():
    arrays = arrays_of()
    states_TS = np.random.default_rng(0).integers(0, 3, (T, K - ADDED))
    found = facts(arrays, states_TS, added=ADDED)
    events_TLS = find_sinks(*scaled_of(arrays)[:1], DEFAULT, K).sum(2)[..., ADDED:]
    norm_TLS = arrays["value_norm"][..., ADDED:].astype(np.float32)
    for code in range(len(STATES)):
        here = (states_TS == code)[:, None]
        for kind, weight in (("sink", events_TLS), ("rest", H - events_TLS)):
            total, number = found[f"{kind}_norm"][:, code]
            assert_allclose(total, (norm_TLS * weight * here).sum((0, 2)), rtol=1e-5)
            assert_allclose(number, (weight * here).sum((0, 2)))


def test_every_rule_has_facts():
    for name in rules:
        rule = rules.parse(name)
        found = facts(arrays_of(), rule=rule)
        assert len(found["rules"]) == len(RULES) + (rule != DEFAULT), name
