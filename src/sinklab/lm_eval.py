"""lm-eval's own command line with the model "sinklab" in it:
`python -m sinklab.lm_eval run --model sinklab …`.
"""

from sinklab.lab.studies.benchmarks.offline import needs_lm_eval


def main() -> None:
    """Run it. Raises ValueError where lm-eval is not installed."""
    needs_lm_eval()
    from lm_eval.__main__ import cli_evaluate

    # importing it registers the model
    import sinklab.lab.studies.benchmarks.harness_model  # noqa: F401

    cli_evaluate()


if __name__ == "__main__":
    main()
