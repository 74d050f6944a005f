"""What a training run is: one frozen dataclass, written into its run folder. Recipes are values of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model that is trained."""

    init_from: str | None = None
    """Folder or Hub name of a model to start from, causal (Llama, Qwen2, Qwen3) or diffusion; its sizes and tokenizer
    are taken, and the sizes below are not used.
    """
    backbone: str = "llama"
    """Decoder of a new model: llama or qwen2."""
    hidden_size: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of layers."""
    heads: int = 4
    """Attention heads; hidden_size must be a multiple."""
    kv_heads: int | None = None
    """Key/value heads, a divisor of heads; as many as heads when left out."""
    mlp_size: int = 352
    """Width of the SwiGLU layer."""
    tie_embeddings: bool = True
    """The LM head is the embedding."""
    sink_kind: str = "none"
    """none, token (a learned sink token), zero (its values forced to zero), kv (learned keys and values per layer)."""
    sink_count: int = 0
    """Number of sink tokens: 0, 1, 2 or 4."""
    sink_side: str = "front"
    """Position of the sink tokens: front or end."""
    gate: str = "none"
    """none, or elementwise: sigmoid gate on the attention output."""
    gate_bias: float | None = None
    """Where the gate's bias starts: 4 opens it, for pretrained backbones; None leaves the bias out (Eq. 9)."""
    mask_token: str = "auto"
    """[MASK] of a model that has none: auto (an unused row of the embedding, else a new one), unused, add, or an id."""
    logit_shift: bool = False
    """Position i is predicted from the output at i − 1 (Dream's way to start from a causal model)."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What it learns from."""

    corpus: str = "python-docs"
    """Folder or file of text (.txt, .md, .jsonl, each also .gz; .parquet), "hub:NAME" or "hub:NAME:CONFIG" for a
    dataset of the Hub, or "python-docs": the documentation that comes with Python. For pairs a file, "arithmetic"
    (invented sums) or "battery" (the reasoning battery; "battery:test" are its test problems).
    """
    text_field: str = "text"
    """Field that holds the text in JSON lines and datasets."""
    heldout: str | None = None
    """Corpus of the same kind to measure the loss on; without it the last rows of the training corpus are held out, or
    the first ones of a stream.
    """
    heldout_rows: int = 256
    """Rows of held-out text, evenly spaced over it."""
    tokenizer: str | None = None
    """Folder or Hub name of a tokenizer; without it the one of init_from, else a byte-level BPE tokenizer is trained on
    the corpus.
    """
    vocab_size: int = 2048
    """Vocabulary of a tokenizer trained here."""
    pairs: str = "none"
    """none for plain text; published or corrected for fine-tuning on questions and answers (GSM8K-Aug lines,
    question||steps #### answer): corrected has no loss on padding and one start token; completion for one row a
    question: as it stands, then steps and answer in answer_length tokens.
    """
    answer_length: int = 18
    """With pairs completion: tokens behind the question, filled up with end tokens, which have loss."""
    length: int = 128
    """Tokens in a row; a new model reads up to twice as many, and at least 512."""
    documents: str = "joined"
    """Rows run over the ends of documents: joined (tokens see what stands in the row) or separate (their own document
    alone).
    """
    streaming: bool = False
    """Read, tokenize and pack while training instead of before it: for corpora larger than memory."""
    shuffle_rows: int = 1024
    """Rows of a stream that are shuffled together; 1 keeps their order."""
    workers: int = 0
    """Processes that read a stream ahead: 0 or 1."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What it learns."""

    objective: str = "diffusion"
    """diffusion, or autoregressive: the causal twin, saved as a plain Hugging Face model."""
    causal_start: float = 0.0
    """Fraction of the steps spent as a causal language model first; small budgets go much further with 0.4."""
    anneal: float = 0.0
    """Fraction of the steps, after the causal ones, over which keys to the right become visible one by one."""
    window: int | None = None
    """Tokens see so many neighbours on either side and no others; everything when left out."""
    time_sampler: str = "low_discrepancy"
    """How diffusion times are drawn: iid (each row for itself, as in the papers) or low_discrepancy."""
    train_only: str = "all"
    """all weights; sink (retrofit: the backbone is frozen, the sink alone learns); or lora (adapters, and the sink)."""
    lora_rank: int = 8
    """Rank of the adapters."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """How it learns: AdamW with linear warm-up and cosine decay."""

    batch: int = 32
    """Rows in an optimizer step, over all processes."""
    micro_batch: int | None = None
    """Rows that one process runs at a time; lower it when memory is short: it changes no noise and no order. The whole
    share of the process when left out.
    """
    steps: int = 1000
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the rows, instead of steps; not for streams."""
    lr: float = 2e-3
    """Peak learning rate."""
    min_lr: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    warmup: float = 0.01
    """Fraction of the steps for linear warm-up."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    weight_decay: float = 0.1
    """AdamW's weight decay, on everything but norms, biases and sinks."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seed of initial weights, data order and noise."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How it runs; none of this changes what is learned but for rounding."""

    bf16: bool = True
    """bfloat16 autocast (weights stay float32)."""
    compile: bool = False
    """torch.compile the decoder: about a quarter faster, a slow first step."""
    gradient_checkpointing: bool = False
    """Keep no activations inside layers: less memory, about a third more time."""
    head_chunk: int = 4096
    """Masked positions whose logits exist at a time."""
    liger: str = "auto"
    """Liger's fused kernels for the head on CUDA: auto (where installed), on or off."""
    threads: int | None = None
    """CPU threads; None leaves PyTorch's choice."""
    log_every: int = 20
    """Steps between two rows of the history."""
    eval_every: int = 200
    """Steps between two measurements of the held-out loss."""
    save_every: int = 200
    """Steps between two checkpoints."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    monitor_every: int = 0
    """Steps between two looks of the sink monitor at fixed held-out text; 0 is never."""
    monitor_rows: int = 8
    """Rows of held-out text that the sink monitor looks at."""
    monitor_rule: str = "excess"
    """What the sink monitor counts as a sink: a rule as text, such as excess:epsilon=5 or gu."""
    spike: float = 3.0
    """Stop when the loss is so many times its recent median; 0 is never."""
    log_to: str = "auto"
    """Trackers of the Trainer besides the run folder: auto (tensorboard, where installed), none, or names such as
    tensorboard, wandb, trackio, separated by commas.
    """
    out: str = "runs/train"
    """Run folder: run.json, the history, checkpoints and the final model."""
    resume: bool = False
    """Go on from the newest checkpoint in the run folder, or begin anew where it has none yet."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(EngineSettings, OptimizerSettings, ObjectiveSettings, DataSettings, ModelSettings):
    """Train a diffusion language model: from scratch, from a causal model, or nothing but its sink.

    A variant (sink, gate) is a value in here and changes nothing else: data order, noise and the other weights'
    initial values depend on the seed alone.
    """


# what may differ between a run and its continuation: how it runs and what it reports, not what it learns from;
# kernels, compilation, thread counts and micro-batches may change the last bits
FREE = frozenset(
    [
        "resume",
        "out",
        "threads",
        "compile",
        "gradient_checkpointing",
        "head_chunk",
        "liger",
        "micro_batch",
        "workers",
        "log_every",
        "eval_every",
        "save_every",
        "keep",
        "spike",
        "log_to",
    ]
)


def one_of(name: str, given: str, choices: Iterable[str]) -> None:
    """Refuse what is no choice, naming the near one.

    Raises:
        ValueError: if it is none.
    """
    choices = tuple(choices)
    if given not in choices:
        near = difflib.get_close_matches(given, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(choices)}, but is {given!r}{hint}")
