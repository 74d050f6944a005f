"""Masked diffusion: the forward process and its training objective."""

from sinklab.diffusion.forward import corrupt, sample_times
from sinklab.diffusion.loss import masked_token_loss

__all__ = ["corrupt", "masked_token_loss", "sample_times"]
