"""Likelihoods, held-out loss and batched writing, all with and without interventions."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    answers="Answer write_batch",
    distance="Distance output_distances",
    heldout="EditedLosses HeldoutRows edited_losses heldout_curve heldout_rows row_losses",
    hidden_states="ClipChannel StateRecord state_records",
    likelihood="exact rolling score",
    prompts="Prompt encode read_prompts",
    reference_values="save_reference_values",
    settings="LikelihoodSettings Scored",
    writing="Writing WritingRequest",
)
