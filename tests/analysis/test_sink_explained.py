import numpy as np
from numpy.testing import assert_allclose

from refusals import refused
from sinklab.lab.analysis import Explained, cells_of

SAMPLES, STEPS, PLACES = 8, 12, 24
WEIGHTS = {"words": 0.5, "newline": 6.0, "punctuation": 2.0}
SHARES = ("by_class", "by_position")


def tokens(seed=0):
    """(sample, step, position) classes that stand anywhere, drawn afresh at every step."""
    return np.random.default_rng(seed).choice(
        [*WEIGHTS], (SAMPLES, STEPS, PLACES), p=[0.7, 0.1, 0.2]
    )


def mean_of(classes):
    return np.vectorize(WEIGHTS.get)(classes)


def together(received, classes):
    """Samples, on the first axis, added up."""
    return Explained([*map(cells_of, received, classes)])


def values(found):
    return [getattr(found, name).value for name in SHARES]


def test_purely_semantic_and_purely_positional():
    classes = tokens()
    at_start = np.broadcast_to(np.where(np.arange(PLACES) < 2, 8.0, 0.4), classes.shape)
    for received, shares, word in (
        (mean_of(classes), [1, 0], "semantic"),
        (at_start, [0, 1], "positional"),
    ):
        found = together(received, classes)
        assert_allclose(values(found), shares, atol=0.03)
        assert found.word == word
        assert found.class_over_position.above() is (word == "semantic")


def test_what_class_and_position_share_is_told_by_either():
    # The beginning of text stands only at position 0, and attention goes there: either explains all
    # of it.
    classes = np.full((8, 20, 10), "words", dtype=object)
    classes[:, :, 0] = "bos"
    found = together(np.where(classes == "bos", 5.0, 0.5), classes)
    assert_allclose(values(found), 1)
    assert found.word is None


def test_the_fits_are_least_squares_on_the_other_samples():
    rng = np.random.default_rng(3)
    classes, place = rng.choice(["a", "b", "c"], (8, 300, 7)), np.arange(7)
    received = rng.normal(size=classes.shape) + (classes == "a") * 2 + place * 0.3
    told, spread = np.zeros(2), ((received - received.mean()) ** 2).sum()
    place = np.broadcast_to(place, classes.shape)
    for out in range(8):
        others = np.arange(8) != out
        by_class, by_place = (
            (labels[..., None] == kinds).astype(float)
            for labels, kinds in ((classes, ["a", "b", "c"]), (place, np.arange(7)))
        )
        mean = received[others].mean()
        for which, design in enumerate((by_class, by_place)):
            rows = design[others].reshape(-1, design.shape[-1])
            fit = design[out] @ np.linalg.lstsq(rows, received[others].ravel(), rcond=None)[0]
            told[which] += ((received[out] - mean) * (fit - mean)).sum()
    assert_allclose(values(together(received, classes)), told / spread)


def test_samples_of_different_lengths_add_up():
    classes = tokens().astype(object)
    received = mean_of(classes) + np.random.default_rng(4).normal(size=classes.shape)
    widths = [11] * 3 + [PLACES] * (SAMPLES - 3)
    short = [
        cells_of(received[sample, :, :width], classes[sample, :, :width])
        for sample, width in enumerate(widths)
    ]
    received[:3, :, 11:], classes[:3, :, 11:] = np.nan, None
    found = Explained(short)
    assert found.by_class.samples == SAMPLES
    assert_allclose(values(found), values(together(received, classes)))


def test_too_few_samples_nothing_to_explain_and_errors():
    classes = tokens()
    few = together(mean_of(classes)[:5], classes[:5])
    assert np.isnan(values(few)).all() and few.word is None and not few.by_class.is_interval
    even = together(np.ones((6, 5, 4)), np.full((6, 5, 4), "words"))
    assert np.isnan(values(even)).all() and even.word is None
    refused(r"shape \(2,\), classes \(3,\)", cells_of, [1, 2], ["a", "b", "c"])
    refused("position that holds a token", cells_of, [np.nan], ["a"])
