import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from refusals import refused
from sinklab.lab.analysis import enrichment
from sinklab.lab.analysis.tokens import enriched, tallied


def test_enrichment_by_hand():
    # 8 places: mask at 4 (half), comma at 1, "a" at 2, "b" at 1; 6 events: 3 on masks, 3 on the
    # comma.
    labels = np.array([["mask", "mask", ",", "a"], ["mask", "mask", "a", "b"]], dtype=object)
    events = np.array([[2, 1, 3, 0], [0, 0, 0, 0]])
    found = enrichment(labels, events)
    assert found.label.tolist() == [",", "mask", "a", "b"]
    assert found.events.tolist() == [3, 3, 0, 0] and found.occurrences.tolist() == [1, 4, 2, 1]
    assert_allclose(found.frequency, [0.5, 0.5, 0, 0])
    assert_allclose(found.occupancy, [1 / 8, 4 / 8, 2 / 8, 1 / 8])
    # Equal raw frequency, yet the mask is there by chance and the comma is not.
    assert_allclose(found.enrichment, [4, 1, 0, 0])


def test_places_that_do_not_exist_do_not_count():
    found = enrichment(["a", None, "b"], [1, 9, 1])
    assert (
        found.label.tolist() == ["a", "b"]
        and found.occupancy.tolist() == [0.5, 0.5]
        and found.events.tolist() == [1, 1]
    )


def test_labels_that_read_alike_are_one():
    found = enrichment(np.array([1, "1", "b", 2], dtype=object), [1, 2, 0, 5])
    assert found.label.tolist() == ["2", "1", "b"] and found.events.tolist() == [5, 3, 0]
    assert found.occurrences.tolist() == [1, 2, 1]


def test_errors():
    refused(r"shape \(2,\), events \(3,\)", enrichment, ["a", "b"], [1, 2, 3])
    refused("every label is None", enrichment, [None], [1])
    # no event is no division by zero
    assert np.isnan(enrichment(["a", "b"], [0, 0]).enrichment).all()


def test_samples_that_are_counted_one_by_one_are_counted_together():
    rng = np.random.default_rng(0)
    labels, events = (
        rng.choice(np.array(["a", "b", "c", None], dtype=object), (3, 50)),
        rng.integers(0, 5, (3, 50)),
    )
    apart = enriched([tallied(*sample) for sample in zip(labels, events, strict=True)])
    together = enrichment(labels, events)
    assert list(apart) == list(together)
    for column in together:
        assert_array_equal(apart[column], together[column])
    assert apart.occurrences.sum() == (labels != None).sum()  # noqa: E711 - elementwise
