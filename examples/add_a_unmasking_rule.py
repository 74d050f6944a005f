"""An unmasking rule in one file: confidence that falls from left to right.

``sinklab generate "The sea" --plugin add_a_unmasking_rule.py --rule discounted:discount=0.1``
writes with it, and ``sinklab check add_a_unmasking_rule.py`` holds it to what the loop relies on.
"""

from sinklab.core.registry import unmasking_rules
from sinklab.lab.cli import main


@unmasking_rules.register("discounted")
def discounted(candidates, discount=0.05):
    """Commit where the proposed token's probability, less a discount for its column, is highest."""
    confidence_M = candidates.at_proposals(candidates.probability_MV)
    first_B = candidates.candidates_BS.long().argmax(1)
    first_M = first_B[candidates.rows_M]
    return confidence_M - discount * (candidates.columns_M - first_M)


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
