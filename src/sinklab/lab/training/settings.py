"""Settings of a training run: one frozen dataclass, written into its run folder.

Recipes are values of it, in recipes.toml: the runs of «One Token Is Enough» and their laptop twins,
each with every variant of the model. The variant is the one thing that differs between two runs of
a recipe.
"""

from dataclasses import dataclass, replace
from typing import Any

from sinklab.core.errors import Checked, limited, one_of
from sinklab.lab.files import free_fields, toml_of


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Checked):
    """The model that is trained."""

    init_from: str | None = None
    """Folder or Hub name of a model to start from, causal (Llama, Qwen2, Qwen3) or diffusion; its
    sizes and tokenizer are taken, and the sizes below are not used.
    """
    backbone: str = limited("llama", one_of=("llama", "qwen2", "smdm"))
    """Decoder of a new model: llama or qwen2, whose head is the embedding; or smdm, a Llama with a
    head of its own and weights drawn by width, and smaller by depth in layers that write to the
    residual stream (arXiv 2410.18514)."""
    hidden_size: int = limited(128, at_least=1)
    """Width of the residual stream."""
    layers: int = limited(4, at_least=1)
    """Number of layers."""
    heads: int = limited(4, at_least=1)
    """Attention heads; hidden_size must be a multiple."""
    kv_heads: int | None = limited(None, at_least=1)
    """Key/value heads, a divisor of heads; as many as heads when left out."""
    mlp_size: int = limited(352, at_least=1)
    """Width of the SwiGLU layer."""
    sink_kind: str = "none"
    """none, token (a learned sink token), zero (its values forced to zero), kv (learned keys and
    values per layer), logit (a learned logit per head)."""
    sink_count: int = 0
    """Number of sink tokens: 0, 1, 2 or 4."""
    sink_side: str = "front"
    """Position of the sink tokens: front or end."""
    gate: str = "none"
    """none, or elementwise: sigmoid gate on the attention output; one that a pretrained backbone is
    given starts open, with a bias of 4."""
    attention: str = limited("full", one_of=("full", "causal", "first_alone"))
    """Keys that a token sees: full (all), causal (itself and those to its left) or first_alone
    (all, but the first token of a row sees itself alone)."""
    logit_shift: bool = False
    """Position i is predicted from the output at i − 1 (Dream's way to start from a causal
    model).
    """


@dataclass(frozen=True, kw_only=True)
class DataSettings(Checked):
    """Data of a training run."""

    corpus: str = ""
    """Folder or file of text (.txt, .md, .jsonl, each also .gz; .parquet), or "hub:NAME" or
    "hub:NAME:CONFIG" for a dataset of the Hub, whose field is ``text``. For pairs a file, or
    "arithmetic" (invented sums).
    """
    only: str | None = None
    """Learn only from documents of which this holds: FIELD=VALUE or FIELD!=VALUE, such as
    meta.redpajama_set_name!=RedPajamaGithub."""
    heldout: str | None = None
    """Corpus of the same kind to measure the loss on; without it the last rows of the training
    corpus are held out, or the first ones of a stream.
    """
    heldout_rows: int = limited(256, at_least=1)
    """Rows of held-out text, evenly spaced over it."""
    tokenizer: str | None = None
    """Folder or Hub name of a tokenizer, or a number: entries of a byte-level BPE tokenizer that is
    trained on the corpus. Without it the one of init_from, else such a one of 2048 entries.
    """
    pairs: str = limited("none", one_of=("none", "published", "corrected", "completion"))
    """none for plain text; published or corrected for fine-tuning on questions and answers
    (GSM8K-Aug lines, question||steps #### answer): corrected has no loss on padding and one start
    token; completion for one row a question: as it stands, then steps and answer in 18 tokens,
    filled up with end tokens, which have loss.
    """
    length: int = limited(128, at_least=1)
    """Tokens in a row; a new model reads up to twice as many, and at least 512."""
    row_start: bool = False
    """Begin every row with the tokenizer's start token (a new one if it has none), which is given:
    never masked and without loss. The tokenizer remembers it, for prompts and held-out rows; not
    for streams and pairs.
    """
    streaming: bool = False
    """Read, tokenize and pack while training instead of before it: for corpora larger than
    memory.
    """


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Checked):
    """The training objective."""

    objective: str = limited("diffusion", one_of=("diffusion", "autoregressive"))
    """diffusion; or autoregressive: the causal twin, saved as a plain Hugging Face model."""
    block_length: int | None = limited(None, at_least=1)
    """Tokens of a block: attention is in blocks, each denoised behind the clean ones before it.
    Without it that of the model it starts from, if it has blocks.
    """
    causal_start: float = limited(0.0, at_least=0, at_most=1)
    """Fraction of the steps spent as a causal language model first; small budgets go much further
    with 0.4.
    """
    time_sampler: str = limited("low_discrepancy", one_of=("iid", "low_discrepancy"))
    """How diffusion times are drawn: iid (independent for each row, as in the papers) or
    low_discrepancy.
    """
    train_only: str = limited("all", one_of=("all", "sink", "lora"))
    """all weights; sink (retrofit: the backbone is frozen, the sink alone learns); or lora
    (adapters, and the sink).
    """
    lora_rank: int = limited(8, at_least=1)
    """Rank of the adapters."""
    adapters: str | None = None
    """File of adapters (adapters.safetensors of a run) to go on from, on init_from, the model that
    they were trained on; the optimizer starts anew."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Checked):
    """The optimizer: AdamW (β 0.9 and 0.95, gradients clipped at norm 1) with linear warm-up and
    cosine decay.
    """

    batch: int = limited(32, at_least=1)
    """Rows in an optimizer step, over all processes."""
    micro_batch: int | None = limited(None, at_least=1, free=True)
    """Rows that one process runs at a time (gradient accumulation does the rest); lower it when
    memory is short: noise and order do not change. All rows of the process when left out.
    """
    steps: int = limited(1000, at_least=1)
    """Optimizer steps."""
    lr: float = limited(2e-3, above=0)
    """Peak learning rate."""
    min_lr: float = limited(0.1, at_least=0, at_most=1)
    """Final learning rate of the cosine schedule, as a fraction of the peak."""
    warmup: float = limited(0.01, at_least=0, at_most=1)
    """Fraction of the steps for linear warm-up, from 0: the first step changes nothing."""
    weight_decay: float = limited(0.1, at_least=0)
    """AdamW's weight decay, on everything but norms, biases and sinks."""
    seed: int = 0
    """Seed of initial weights, data order and noise."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Checked):
    """Precision, speed, logging and checkpoints; apart from rounding nothing here changes the
    training.
    """

    bf16: bool | None = None
    """bfloat16 autocast (weights stay float32; frozen ones that are bfloat16 on disk stay so); when
    left out, if this machine multiplies bfloat16 in hardware. A run that goes on keeps its type.
    """
    compile: bool = limited(False, free=True)
    """torch.compile the decoder: about a quarter faster, a slow first step."""
    gradient_checkpointing: bool = limited(False, free=True)
    """Keep no activations inside layers: less memory, about a third more time."""
    log_every: int = limited(20, at_least=1, free=True)
    """Steps between two rows of the history (loss, learning rate, gradient norm)."""
    save_every: int = limited(200, at_least=1, free=True)
    """Steps between two checkpoints, each with the held-out loss."""
    monitor_every: int = limited(0, at_least=0)
    """Steps between two measurements of the sink monitor, on fixed held-out text; 0 turns it
    off.
    """
    out: str = limited("runs/train", free=True)
    """Run folder: run.json, the history, checkpoints and the final model."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(
    EngineSettings, OptimizerSettings, ObjectiveSettings, DataSettings, ModelSettings
):
    """Train a diffusion language model: from scratch, from a causal model, or its sink alone.

    A variant (sink, gate) is a value in here and changes nothing else: data order, noise and the
    other weights' initial values depend on the seed alone.
    """


# kernels, compilation, thread counts and micro-batches may change the last bits
FREE = free_fields(TrainSettings)
"""Settings that may differ between a run and its continuation: how it runs and what it reports."""

_READ: dict[str, dict[str, Any]] = toml_of(__package__, "recipes.toml")

VARIANTS: dict[str, dict[str, Any]] = _READ["variants"]
"""Name to the settings of the model that make the variant."""

RECIPES: dict[str, str] = {name: fields["about"] for name, fields in _READ["recipes"].items()}
"""Name of a recipe -> a line on its training, in the order of the help."""


def recipe(name: str, variant: str | None = None, **changes: Any) -> TrainSettings:
    """The settings of a recipe with this variant of the model; ``changes`` are fields of
    :class:`TrainSettings`.

    A gate that a pretrained model is given starts open (bias 4): at 0.5 it would halve the
    attention that the model has learned. The run folder is ``runs/<recipe>``, with the variant
    behind it if it is not the recipe's own. Fine-tuning on questions goes on with the model that
    was trained with the same variant: ``runs/<recipe before>-<variant>/model``.

    Args:
        name: one of :data:`RECIPES`.
        variant: one of :data:`VARIANTS`; None is ``plain``, or ``sink`` for a retrofit.

    Raises:
        ValueError: for an unknown recipe or variant, naming the near one, or an autoregressive
            model with a sink.
        TypeError: for a change that is no field.
    """
    one_of("recipe", name, RECIPES)
    own = _READ["recipes"][name].get("variant", "plain")
    chosen = variant or own
    one_of("variant", chosen, VARIANTS)
    settings = TrainSettings(**_fields(name))
    fields = dict(VARIANTS[chosen])
    if settings.objective == "autoregressive" and fields:
        raise ValueError(
            f"{name} trains a plain autoregressive model, so it has no variant {chosen!r}; leave "
            "it out"
        )
    if settings.pairs in ("published", "corrected") and chosen != own:
        fields["init_from"] = str(settings.init_from).replace("/model", f"-{chosen}/model")
    fields["out"] = f"runs/{name}"
    if chosen != own:
        fields["out"] += f"-{chosen}"
    return replace(settings, **{**fields, **changes})


def _fields(name: str) -> dict[str, Any]:
    """The settings that a recipe names, and those of the recipe it is like."""
    given = (_READ["bases"] | _READ["recipes"])[name]
    fields = dict(given)
    if "like" in given:
        fields = _fields(given["like"]) | given
    if "tokens" in given:
        fields["steps"] = round(given["tokens"] / (fields["batch"] * fields["length"]))
    elif "rows" in fields:
        fields["steps"] = fields["rows"] // fields["batch"]
    return {
        key: value
        for key, value in fields.items()
        if key not in ("about", "like", "tokens", "rows", "variant")
    }
