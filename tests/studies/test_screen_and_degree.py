"""Questions 10 to 12: what is said of planted costs."""

import itertools

import numpy as np
import pandas as pd
import pytest

from launched import script

pytestmark = pytest.mark.ring("lab")

script("studies/smollm2_measures")
study = script("studies/screen_and_degree")
TEXTS = range(8)


def heads(costliest):
    """40 heads whose screen is their cost, but for that of the costliest."""
    lines = []
    for text, head in itertools.product(TEXTS, range(40)):
        real = 0.01 * (head + 1) + 0.001 * text
        held = {"held": 0.3 - 0.01 * head, "screen_s": 1.0, "blocked_s": 20.0}
        shown = costliest if head == 39 else real
        lines.append({"text": text, "layer": 0, "head": head, "real": real, "screen": shown} | held)
    return pd.DataFrame(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("costliest", "recall", "rank"), [(0.4, "1.00 (1.00 … 1.00)", "1.00"), (-1, "0.90 (", "0.8")]
)
def test_a_head_that_a_screen_misses_shows(costliest, recall, rank):
    told = study.screened(heads(costliest))
    assert told["recall of ten"].startswith(recall) and told["by attention"] == "0.00"
    assert told["rank correlation"].startswith(rank) and told["heads"] == 40
    assert told["costliest head: real, screen"].startswith("+0.4035, ")
    assert told["seconds: screen, blocked"] == "1, 20"


def test_a_cost_in_proportion_to_the_mass_removed_differs_by_nothing():
    lines = [
        {"text": text, "arm": "none", "beta": 1.0, "loss": 4.0, "removed": 0} for text in TEXTS
    ]
    for text, arm, beta in itertools.product(TEXTS, study.ARMS, study.BETAS):
        dose = (1 - beta) * (1 + 0.1 * text)
        lines.append({"text": text, "arm": arm, "beta": beta, "loss": 4 + dose, "removed": dose})
    table, apart = study.by_degree(pd.DataFrame(lines))
    assert [line["β"] for line in table] == [*study.BETAS]
    assert np.abs(apart).max() < 1e-12 and table[2]["random"].startswith("+0.675 (")
