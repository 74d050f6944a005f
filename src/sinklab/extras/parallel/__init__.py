"""One model over several processes: tensor parallelism by transformers, and its heads."""

PROVIDES = {"divisions": "dividing", "head_shares": "heads"}
