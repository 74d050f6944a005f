"""Decoding by unmasking: a canvas, rules that choose what to commit, and the loop that yields every step."""

from sinklab.sampling.canvas import Canvas
from sinklab.sampling.denoisers import Denoiser, guided, suppressed
from sinklab.sampling.loop import Step, denoise
from sinklab.sampling.rules import RULES, LowConfidence, RandomOrder, Rule, rule_by_name, sample_tokens
from sinklab.sampling.schedule import commit_counts, deal_steps

__all__ = [
    "RULES",
    "Canvas",
    "Denoiser",
    "LowConfidence",
    "RandomOrder",
    "Rule",
    "Step",
    "commit_counts",
    "deal_steps",
    "denoise",
    "guided",
    "rule_by_name",
    "sample_tokens",
    "suppressed",
]
