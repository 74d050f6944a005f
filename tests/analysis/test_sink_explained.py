import numpy as np
import pytest

from sinklab.analysis import Explained, explained_mass

STEPS, PLACES = 60, 24


def tokens(seed: int = 0) -> np.ndarray:
    """Classes that stand anywhere, drawn afresh at every step."""
    return np.random.default_rng(seed).choice(["words", "newline", "punctuation"], (STEPS, PLACES), p=[0.7, 0.1, 0.2])


def mean_of(classes: np.ndarray) -> np.ndarray:
    return np.vectorize({"words": 0.5, "newline": 6.0, "punctuation": 2.0}.get)(classes)


def beyond(found: Explained) -> tuple[float, float]:
    """What the class explains beyond the position, and the other way round."""
    return found.by_both - found.by_position, found.by_both - found.by_class


def test_purely_semantic():
    classes = tokens()
    found = explained_mass(mean_of(classes), classes)
    np.testing.assert_allclose([found.by_class, found.by_both], 1)
    assert abs(found.by_position) < 0.03
    np.testing.assert_allclose(beyond(found)[0], 1 - found.by_position)
    np.testing.assert_allclose(beyond(found)[1], 0, atol=1e-9)


def test_purely_positional():
    classes = tokens()
    received = np.broadcast_to(np.where(np.arange(PLACES) < 2, 8.0, 0.4), classes.shape)
    found = explained_mass(received, classes)
    np.testing.assert_allclose([found.by_position, found.by_both], 1)
    assert abs(found.by_class) < 0.01 and beyond(found)[1] > 0.99
    np.testing.assert_allclose(beyond(found)[0], 0, atol=1e-9)


def test_mixed_in_known_parts():
    # Two independent effects of equal variance, and as much noise as both together: a quarter, a quarter, a half.
    rng = np.random.default_rng(1)
    classes = rng.choice(["a", "b"], (2000, 16))
    place = np.where(np.arange(16) % 2, 1.0, -1.0)
    received = np.where(classes == "a", 1.0, -1.0) + place + rng.normal(0, np.sqrt(2), classes.shape)
    found = explained_mass(received, classes)
    np.testing.assert_allclose([found.by_class, found.by_position, found.by_both], [0.25, 0.25, 0.5], atol=0.01)
    np.testing.assert_allclose(beyond(found), [0.25, 0.25], atol=0.01)
    assert abs(found.shared) < 0.01


def test_what_class_and_position_share_is_told_apart():
    # The beginning of text stands only at position 0, and attention goes there: either explains all of it.
    classes = np.full((20, 10), "words", dtype=object)
    classes[:, 0] = "bos"
    found = explained_mass(np.where(classes == "bos", 5.0, 0.5), classes)
    np.testing.assert_allclose([found.by_class, found.by_position, found.shared], 1)
    np.testing.assert_allclose(beyond(found), 0, atol=1e-9)


def test_noise_is_not_explained_however_few_the_steps():
    rng = np.random.default_rng(2)
    scores = [explained_mass(rng.normal(size=(3, 100)), rng.choice(["a", "b"], (3, 100))) for _ in range(200)]
    for name in ("by_class", "by_position", "by_both"):
        assert abs(np.mean([getattr(score, name) for score in scores])) < 0.02


def test_the_additive_fit_equals_least_squares():
    rng = np.random.default_rng(3)
    classes, place = rng.choice(["a", "b", "c"], 300), rng.integers(0, 7, 300)
    received = rng.normal(size=300) + (classes == "a") * 2 + place * 0.3
    found = explained_mass(received, classes, place)
    design = np.concatenate([classes[:, None] == ["a", "b", "c"], place[:, None] == np.arange(7)], axis=1).astype(float)
    fit = design @ np.linalg.lstsq(design, received, rcond=None)[0]
    r2 = 1 - ((received - fit) ** 2).sum() / ((received - received.mean()) ** 2).sum()
    np.testing.assert_allclose(found.by_both, 1 - (1 - r2) * 299 / (300 - 9))


def test_another_notion_of_position():
    # The sink sits two to the left of the front, and the front moves: only the distance to it explains the sink.
    steps, width = 40, 50
    received = np.full((steps, width), 0.5)
    received[np.arange(steps), np.arange(steps) + 5] = 9
    distance = np.abs(np.arange(width) - (np.arange(steps)[:, None] + 7))
    classes = np.full(received.shape, "words")
    assert explained_mass(received, classes).by_position < 0.1
    # Two to the right of the front is the same distance: half of those places are sinks.
    assert explained_mass(received, classes, distance).by_position > 0.4
    signed = np.arange(width) - (np.arange(steps)[:, None] + 7) + steps + 7
    np.testing.assert_allclose(explained_mass(received, classes, signed).by_position, 1)


def test_samples_of_different_lengths_add_up():
    classes = tokens()
    received = mean_of(classes) + np.random.default_rng(4).normal(size=classes.shape)
    parts = explained_mass(received[:20, :11], classes[:20, :11]) + explained_mass(received[20:], classes[20:])
    padded, names = received.copy(), classes.astype(object)
    padded[:20, 11:], names[:20, 11:] = np.nan, None
    whole = explained_mass(padded, names)
    assert isinstance(parts, Explained) and parts.labels == whole.labels and parts.places == whole.places
    np.testing.assert_array_equal(parts.count_CP, whole.count_CP)
    for name in ("by_class", "by_position", "by_both"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name))


def test_nothing_to_explain_and_errors():
    even = explained_mass(np.ones((5, 4)), np.full((5, 4), "words"))
    assert np.isnan([even.by_class, even.by_position, even.by_both, even.shared]).all()
    one_step = explained_mass(np.arange(4.0), list("aabb"))
    # As many positions as places: nothing can be said about them.
    assert np.isnan(one_step.by_position) and one_step.by_class > 0.5
    with pytest.raises(ValueError, match=r"received has shape \(2,\), classes \(3,\)"):
        explained_mass([1, 2], ["a", "b", "c"])
    with pytest.raises(ValueError, match="at least one position that holds a token"):
        explained_mass([np.nan], ["a"])
    with pytest.raises(ValueError, match="whole numbers of at least 0: got int64 from -1"):
        explained_mass([1.0, 2.0], ["a", "b"], np.array([0, -1]))
