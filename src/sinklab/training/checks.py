"""What a training run refuses before it reads anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from transformers import LlamaConfig

from sinklab.diffusion.forward import TimeSampler
from sinklab.models import DiffusionLMConfig
from sinklab.training.settings import TrainSettings, one_of

AT_LEAST_ONE: tuple[str, ...] = (
    "hidden_size",
    "layers",
    "heads",
    "mlp_size",
    "length",
    "batch",
    "steps",
    "log_every",
    "eval_every",
)
AT_LEAST_ONE += ("save_every", "keep", "head_chunk", "lora_rank", "heldout_rows", "shuffle_rows", "monitor_rows")
AT_LEAST_ONE += ("answer_length",)
FRACTIONS = ("causal_start", "anneal", "warmup", "min_lr")
CHOICES: dict[str, tuple[str, ...]] = {
    "backbone": ("llama", "qwen2"),
    "objective": ("diffusion", "autoregressive"),
    "time_sampler": get_args(TimeSampler),
    "documents": ("joined", "separate"),
    "pairs": ("none", "published", "corrected", "completion"),
    "train_only": ("all", "sink", "lora"),
    "liger": ("auto", "on", "off"),
}


def check(settings: TrainSettings) -> None:
    """What can be refused without reading the corpus.

    Raises:
        ValueError: for sizes below 1 or that do not fit, an unknown choice or variant, fractions outside 0…1, settings
            that exclude one another.
    """
    for name in AT_LEAST_ONE:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, but is {getattr(settings, name)}")
    for name in ("micro_batch", "threads", "window"):
        if getattr(settings, name) is not None and getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1 or left out, but is {getattr(settings, name)}")
    for name in ("monitor_every", "spike", "clip", "weight_decay"):
        if getattr(settings, name) < 0:
            raise ValueError(f"{name} must be at least 0, but is {getattr(settings, name)}")
    if settings.lr <= 0:
        raise ValueError(f"lr must be more than 0, but is {settings.lr}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 0 and less than 1, but is {getattr(settings, name)}")
    for name, choices in CHOICES.items():
        one_of(name, getattr(settings, name), choices)
    for name in FRACTIONS:
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} is a fraction from 0 to 1, but is {getattr(settings, name)}")
    if settings.causal_start + settings.anneal > 1:
        raise ValueError(
            f"the causal phase and annealing must fit into the run, but causal_start {settings.causal_start} and "
            f"anneal {settings.anneal} are more than 1 together"
        )
    _check_sizes(settings)
    DiffusionLMConfig(LlamaConfig(), gate_bias=settings.gate_bias, **variant(settings))
    _check_together(settings)


def _check_sizes(settings: TrainSettings) -> None:
    if settings.init_from is not None:
        return
    if settings.hidden_size % settings.heads:
        raise ValueError(f"hidden_size ({settings.hidden_size}) must be a multiple of heads ({settings.heads})")
    if (settings.hidden_size // settings.heads) % 2:
        raise ValueError(
            f"each head must have an even width, which rotary positions turn in pairs, but hidden_size "
            f"{settings.hidden_size} over {settings.heads} heads gives {settings.hidden_size // settings.heads}"
        )
    if settings.kv_heads is not None and (settings.kv_heads < 1 or settings.heads % settings.kv_heads):
        raise ValueError(f"kv_heads must divide heads ({settings.heads}), but is {settings.kv_heads}")


def _check_together(settings: TrainSettings) -> None:
    """Settings that exclude one another."""
    if settings.objective == "autoregressive":
        if settings.sink_kind != "none" or settings.gate != "none" or settings.train_only != "all":
            raise ValueError(
                "an autoregressive run trains a plain decoder, without sink or gate; leave out sink_kind, sink_count, "
                "gate and train_only"
            )
        if settings.causal_start or settings.anneal:
            raise ValueError("an autoregressive run is causal throughout; leave out causal_start and anneal")
        if settings.window:
            raise ValueError("an autoregressive run is saved as a plain decoder, which has no window; leave out window")
    if settings.train_only != "all" and settings.init_from is None:
        raise ValueError(
            f"train_only={settings.train_only!r} leaves the backbone as it is, so there must be one: give init_from"
        )
    if settings.train_only == "sink" and settings.sink_kind == "none":
        raise ValueError("train_only='sink' needs a sink to train; give sink_kind and sink_count")
    if settings.streaming and (settings.pairs != "none" or settings.epochs is not None):
        raise ValueError("a stream has no pairs and no epochs; leave out streaming, or give steps")
    if settings.workers not in (0, 1):
        raise ValueError(f"rows are read by 0 or 1 workers, but workers is {settings.workers}")
    if settings.monitor_every and settings.pairs in ("corrected", "completion"):
        raise ValueError(
            f"the sink monitor looks at rows without padding, and pairs={settings.pairs!r} has padding; set "
            "monitor_every to 0"
        )
    if settings.epochs is not None and settings.epochs <= 0:
        raise ValueError(f"epochs must be more than 0, but is {settings.epochs}")


def micro_batches(settings: TrainSettings, ranks: int) -> tuple[int, int]:
    """Rows that a process runs at a time, and how many times it does so in a step.

    Raises:
        ValueError: if the batch does not divide evenly.
    """
    micro = settings.micro_batch or max(1, settings.batch // ranks)
    if settings.batch % (micro * ranks):
        raise ValueError(
            f"batch must be a multiple of micro_batch × processes, but {settings.batch} is none of {micro} × {ranks}; "
            "change --batch or --micro-batch"
        )
    return micro, settings.batch // (micro * ranks)


def variant(settings: TrainSettings) -> dict[str, Any]:
    """The settings that make the model's variant, as its config names them."""
    return {key: getattr(settings, key) for key in ("sink_kind", "sink_count", "sink_side", "gate")}


@contextmanager
def explained(settings: TrainSettings) -> Iterator[None]:
    """Say which settings save memory where a device has not enough.

    Raises:
        ValueError: for torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        micro = settings.micro_batch or "the whole share of a process"
        raise ValueError(
            f"the device has not enough memory for rows of {settings.length} tokens: lower --micro-batch (now {micro}; "
            "it changes no result), turn on --gradient-checkpointing "
            f"({'on' if settings.gradient_checkpointing else 'off'} now), or lower --head-chunk (now "
            f"{settings.head_chunk}), and go on with --resume: {str(error).splitlines()[0]}"
        ) from error
