"""One model over several processes: tensor parallelism by transformers."""

PROVIDES = {"divisions": "dividing"}
