"""What a training run is: one frozen dataclass, written into its run folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """Train a small diffusion language model from scratch.

    A variant (sink, gate) is a value in here and changes nothing else: data order, noise and the other weights'
    initial values depend on the seed alone.
    """

    corpus: str = "python-docs"
    """Folder or file of text (.txt, .md, .jsonl, each also .gz), or "python-docs": the documentation that comes with
    Python.
    """
    heldout: str | None = None
    """Corpus of the same kind to measure the loss on; without it the last rows of the training corpus are held out."""
    out: str = "runs/train"
    """Run folder: run.json, the history, checkpoints and the final model."""
    tokenizer: str | None = None
    """Folder of a tokenizer; without it a byte-level BPE tokenizer is trained on the corpus."""
    vocab_size: int = 2048
    """Vocabulary of a tokenizer trained here."""
    hidden_size: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of layers."""
    heads: int = 4
    """Attention heads; hidden_size must be a multiple."""
    mlp_size: int = 352
    """Width of the SwiGLU layer."""
    sink_kind: str = "none"
    """none, token (a learned sink token) or zero (its values forced to zero)."""
    sink_count: int = 0
    """Number of sink tokens: 0, 1, 2 or 4."""
    sink_side: str = "front"
    """Position of the sink tokens: front or end."""
    gate: str = "none"
    """none, or elementwise: sigmoid gate on the attention output."""
    length: int = 128
    """Tokens in a row; the model reads up to twice as many, and at least 512."""
    batch: int = 32
    """Rows in a step."""
    steps: int = 1000
    """Optimizer steps."""
    lr: float = 2e-3
    """Peak learning rate (AdamW, β = 0.9/0.95, cosine to a tenth)."""
    warmup: float = 0.01
    """Fraction of the steps for linear warm-up."""
    weight_decay: float = 0.1
    """AdamW's weight decay."""
    causal_start: float = 0.0
    """Fraction of the steps spent as a causal language model first; small budgets go much further with 0.4."""
    time_sampler: str = "low_discrepancy"
    """How diffusion times are drawn: iid or low_discrepancy."""
    seed: int = 0
    """Seed of initial weights, data order and noise."""
    bf16: bool = True
    """bfloat16 autocast (weights stay float32)."""
    compile: bool = False
    """torch.compile the decoder: about a quarter faster, a slow first step."""
    threads: int | None = None
    """CPU threads; None leaves PyTorch's choice."""
    log_every: int = 20
    """Steps between two rows of the history."""
    eval_every: int = 200
    """Steps between two measurements of the held-out loss."""
    save_every: int = 200
    """Steps between two checkpoints; the newest two are kept."""
    resume: bool = False
    """Go on from the newest checkpoint in the run folder."""
