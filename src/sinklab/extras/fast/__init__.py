"""Fast paths, each with a slow twin in the core that tests hold it to."""

PROVIDES = {
    "fast_decoders": "decoder",
    "fast_losses": "loss",
    "fast_passes": "score_pass",
}
