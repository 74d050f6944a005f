"""Likelihoods, held-out loss and batched writing, all with and without interventions."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    answers="Answer write_batch",
    distance="Distance output_distances",
    heldout="EditedLosses HeldoutRows edited_losses heldout_curve heldout_rows row_losses",
    likelihood="exact rolling score",
    prompts="Prompt encode read_prompts",
    settings="LikelihoodSettings Scored",
    writing="Writing WritingRequest",
)
