"""Costs against removed attention, in worlds with a known answer: maps over heads, and models at
equal mass.
"""

# R rows, C cells, K doses
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sinklab.lab.analysis.differences import effects
from sinklab.lab.analysis.doses import Doses, common_mass


def heads(seed, rows, cells, *, signal=0.0, shared=0.0, tails=False):
    """Costs of hiding the keys of every cell, (R, C); `signal`: their spread between cells."""
    rng = np.random.default_rng(seed)
    noise_RC = rng.standard_t(3, (rows, cells)) if tails else rng.normal(0, 1, (rows, cells))
    noise_RC = np.sqrt(1 - shared) * noise_RC + np.sqrt(shared) * rng.normal(0, 1, (rows, 1))
    return np.exp(rng.normal(0, 0.5, cells)) * noise_RC + signal * rng.normal(0, 1, cells)


def words(costs_RC):
    """Word of every cell of a map."""
    row, cell = np.indices(costs_RC.shape).reshape(2, -1)
    rows = pd.DataFrame({"arm": cell, "sample": row, "value": costs_RC.ravel()})
    return effects(rows, correction="discoveries")["verdict"].to_numpy()


def percent(flags):
    return 100 * float(np.mean(list(flags)))


@pytest.mark.slow
@pytest.mark.parametrize("world", [{}, {"shared": 0.3}, {"tails": True}])
def test_where_nothing_costs_anything_maps_seldom_say_so(world):
    """Without the correction half of these maps say so."""
    found = [words(heads(seed, 8, 24, **world)) for seed in range(20)]
    # 5 %, and two standard errors of 20 worlds
    assert percent((one != "inconclusive").any() for one in found) <= 14.7


def test_costs_of_cells_are_found_in_twelve_rows():
    found = [words(heads(seed, 12, 24, signal=2.0)) for seed in range(10)]
    assert percent((one == "above").any() and (one == "below").any() for one in found) >= 80


def test_signs_and_cells_are_those_that_were_planted():
    noise_RC = np.random.default_rng(0).normal(0, 0.1, (12, 10))
    costs_RC = noise_RC + np.array([1.0, -1.0, *[0.0] * 8])
    assert words(costs_RC).tolist() == ["above", "below", *["inconclusive"] * 8]
    assert {*words(costs_RC[:5])} == {*words(np.zeros((12, 3)))} == {"inconclusive"}


def model(seed, masses, slope):
    """A model that loses `slope` per removed mass, with a spread of rows that grows with the
    dose.
    """
    rng = np.random.default_rng(seed)
    removed_K = np.array(masses)
    slopes_R1 = slope * (1 + 0.4 * rng.normal(size=(12, 1)))
    costs_RK = slopes_R1 * removed_K + 0.02 * rng.normal(size=(12, len(masses)))
    return Doses(removed_K, costs_RK)


def contrast(one_R, other_R):
    """The effect of one model less another, whose rows are not the same ones."""
    rows = [
        pd.DataFrame({"arm": arm, "sample": range(len(cost_R)), "value": cost_R})
        for arm, cost_R in (("one", one_R), ("other", other_R))
    ]
    return effects(pd.concat(rows), apart=[("one", "other")]).iloc[0]


def at_equal_mass(one, other):
    mass = common_mass(one, other)
    return contrast(one.at(mass), other.at(mass))


LOW, HIGH = [0.02, 0.04, 0.09, 0.16, 0.25], [0.1, 0.22, 0.35]


@pytest.mark.slow
def test_models_that_lose_alike_per_mass_show_no_contrast():
    assert common_mass(model(0, LOW, 2.0), model(1, HIGH, 2.0)) == 0.25
    found = [
        at_equal_mass(model(2 * seed, LOW, 2.0), model(2 * seed + 1, HIGH, 2.0))
        for seed in range(50)
    ]
    # 5 %, and two standard errors of 50 worlds
    assert percent(one["verdict"] != "inconclusive" for one in found) <= 11.2
    # at equal count the second takes four times as much and seems to need its sinks more
    counts = [
        contrast(
            model(2 * seed, LOW, 2.0).costs_RK[:, 0], model(2 * seed + 1, HIGH, 2.0).costs_RK[:, 0]
        )
        for seed in range(50)
    ]
    assert percent(one["verdict"] == "below" for one in counts) >= 80


@pytest.mark.slow
def test_a_model_that_loses_twice_as_much_per_mass_is_found():
    found = [
        at_equal_mass(model(2 * seed, LOW, 4.0), model(2 * seed + 1, HIGH, 2.0))
        for seed in range(50)
    ]
    assert percent(one["verdict"] == "above" for one in found) >= 80
    assert percent(one["low"] <= 0.5 <= one["high"] for one in found) >= 90


def test_there_is_no_contrast_beyond_what_both_models_have():
    low, high = model(0, [0.01, 0.05], 2.0), model(1, [0.1, 0.4], 2.0)
    for one, other in (
        (low, high),
        (high, low),
        (low, model(2, [], 2.0)),
        (low, model(3, [0.0], 2.0)),
    ):
        assert np.isnan(common_mass(one, other))


def test_costs_between_two_doses_lie_on_the_line_between_them():
    doses = Doses(np.array([0.3, 0.1]), np.array([[3.0, 1.0], [0.0, 2.0]]))
    assert doses.at(0.1).tolist() == [1, 2] and doses.at(0.3).tolist() == [3, 0]
    assert doses.at(0.25) == pytest.approx([2.5, 0.5])
    assert np.isnan(doses.at(0.31)).all() and np.isnan(doses.at(0.09)).all()
    one = replace(doses, masses_K=np.array([0.2]), costs_RK=doses.costs_RK[:, :1])
    assert one.at(0.2).tolist() == [3, 0]
    assert common_mass(one, doses) == 0.2
