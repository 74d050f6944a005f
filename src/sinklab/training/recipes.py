"""Recipes: the runs of «One Token Is Enough» and their laptop twins, each with every variant of the model.

A recipe is a function from a variant's name to :class:`TrainSettings`. The variant is the one thing that differs
between two runs of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sinklab.errors import one_of
from sinklab.training.settings import TrainSettings

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink_kind": "token", "sink_count": 1},
    "gate": {"gate": "elementwise"},
    "zero": {"sink_kind": "zero", "sink_count": 1},
    "2-sinks": {"sink_kind": "token", "sink_count": 2},
    "4-sinks": {"sink_kind": "token", "sink_count": 4},
    "end": {"sink_kind": "token", "sink_count": 1, "sink_side": "end"},
    "kv": {"sink_kind": "kv", "sink_count": 1},
    "logit": {"sink_kind": "logit", "sink_count": 1},
}
"""The variants of Tables 1 to 5, ``kv``, a sink of learned keys and values, and ``logit``, a logit per head."""

ROW = 2048


def _tokens(count: float, batch: int, length: int = ROW) -> int:
    """Optimizer steps for this many tokens."""
    return round(count / (batch * length))


def scratch_472m() -> TrainSettings:
    """472M parameters from scratch on 100B tokens of SlimPajama (Table 2). 8 GPUs."""
    return TrainSettings(
        hidden_size=1280,
        layers=18,
        heads=10,
        mlp_size=5120,
        tie_embeddings=False,
        corpus="hub:cerebras/SlimPajama-627B",
        tokenizer="TinyLlama/TinyLlama_v1.1",
        streaming=True,
        workers=1,
        length=ROW,
        batch=256,
        micro_batch=8,
        steps=_tokens(100e9, 256),
        lr=2e-4,
        time_sampler="iid",
        compile=True,
        log_every=10,
        eval_every=2000,
        save_every=2000,
        monitor_every=2000,
    )


def qwen_05b() -> TrainSettings:
    """Qwen2.5-0.5B made a diffusion model on 30B tokens of FineWeb (Tables 1, 3, 4, 5). 8 GPUs."""
    return replace(
        scratch_472m(),
        init_from="Qwen/Qwen2.5-0.5B",
        tokenizer=None,
        corpus="hub:HuggingFaceFW/fineweb:sample-100BT",
        batch=512,
        steps=_tokens(30e9, 512),
        lr=1e-4,
    )


def qwen_15b() -> TrainSettings:
    """Qwen2.5-1.5B made a diffusion model on 100B tokens of FineWeb (Table 1). Several nodes."""
    return replace(
        qwen_05b(), init_from="Qwen/Qwen2.5-1.5B", batch=4096, micro_batch=4, steps=_tokens(100e9, 4096), eval_every=500
    )


def sft_gsm8k() -> TrainSettings:
    """Fine-tuning on GSM8K-Aug as published: loss on padding too. Run scratch-472m first, and give --corpus."""
    return TrainSettings(
        init_from="runs/scratch-472m/model",
        pairs="published",
        corpus="gsm8k_aug/train.txt",
        length=ROW,
        batch=256,
        micro_batch=8,
        epochs=10,
        lr=2e-4,
        time_sampler="iid",
        compile=True,
        log_every=10,
        eval_every=1000,
        save_every=1000,
    )


def sft_gsm8k_corrected() -> TrainSettings:
    """The same without loss on padding, and one start token."""
    return replace(sft_gsm8k(), pairs="corrected")


def retrofit() -> TrainSettings:
    """Give a published model a sink: its backbone stays frozen, a file of some kB comes out. Give --init-from."""
    return TrainSettings(
        init_from="GSAI-ML/LLaDA-8B-Base",
        train_only="sink",
        corpus="hub:HuggingFaceFW/fineweb:sample-10BT",
        streaming=True,
        length=1024,
        batch=64,
        micro_batch=4,
        steps=1000,
        lr=1e-2,
        weight_decay=0.0,
        eval_every=100,
        monitor_every=100,
    )


def laptop_scratch() -> TrainSettings:
    """1.1M parameters from scratch on Python's documentation, some minutes (twin of scratch-472m)."""
    return TrainSettings(causal_start=0.4, monitor_every=200)


def laptop_causal() -> TrainSettings:
    """The same as an autoregressive model: what laptop-from-causal starts from (twin of Qwen2.5)."""
    return TrainSettings(objective="autoregressive", backbone="qwen2", kv_heads=2)


def laptop_from_causal() -> TrainSettings:
    """The autoregressive laptop model made a diffusion model (twin of qwen-0.5b). Run laptop-causal first."""
    return TrainSettings(init_from="runs/laptop-causal/model", lr=1e-3, steps=600, monitor_every=100)


def laptop_sft() -> TrainSettings:
    """Fine-tuning on invented sums in GSM8K-Aug's form, as published (twin of sft-gsm8k). Run laptop-scratch first."""
    return TrainSettings(
        init_from="runs/laptop-scratch/model", corpus="arithmetic", pairs="published", steps=300, lr=1e-3
    )


def laptop_sft_corrected() -> TrainSettings:
    """The same without loss on padding, and one start token."""
    return replace(laptop_sft(), pairs="corrected")


def laptop_retrofit() -> TrainSettings:
    """Give the packaged model «tiny» a sink with its backbone frozen (twin of retrofit)."""
    return TrainSettings(
        init_from="tiny", train_only="sink", steps=200, batch=16, lr=1e-2, weight_decay=0.0, monitor_every=50
    )


def battery_start() -> TrainSettings:
    """0.8M parameters learn the reasoning battery as a causal model: the start of battery and battery-causal."""
    return TrainSettings(
        objective="autoregressive",
        corpus="battery",
        heldout="battery:test",
        heldout_rows=480,
        pairs="completion",
        length=56,
        vocab_size=259,
        batch=64,
        steps=10_000,
        warmup=0.02,
        eval_every=1000,
        save_every=1000,
        log_every=100,
    )


def battery() -> TrainSettings:
    """That model made a diffusion model of the battery: what `sinklab battery` scores. Run battery-start first."""
    return replace(battery_causal(), objective="diffusion", logit_shift=True)


def battery_causal() -> TrainSettings:
    """The autoregressive twin of battery: same start, problems, order and steps. Run battery-start first."""
    return replace(battery_start(), init_from="runs/battery-start/model", lr=1.5e-3, steps=4000)


RECIPES: dict[str, Callable[[], TrainSettings]] = {
    "laptop-scratch": laptop_scratch,
    "laptop-causal": laptop_causal,
    "laptop-from-causal": laptop_from_causal,
    "laptop-sft": laptop_sft,
    "laptop-sft-corrected": laptop_sft_corrected,
    "laptop-retrofit": laptop_retrofit,
    "battery-start": battery_start,
    "battery": battery,
    "battery-causal": battery_causal,
    "scratch-472m": scratch_472m,
    "qwen-0.5b": qwen_05b,
    "qwen-1.5b": qwen_15b,
    "sft-gsm8k": sft_gsm8k,
    "sft-gsm8k-corrected": sft_gsm8k_corrected,
    "retrofit": retrofit,
}
"""Name to recipe, in the order of the help."""

_START = {"retrofit": "sink", "laptop-retrofit": "sink"}


def recipe(name: str, variant: str | None = None, **changes: Any) -> TrainSettings:
    """The settings of a recipe with this variant of the model; ``changes`` are fields of :class:`TrainSettings`.

    A gate that a pretrained model is given starts open (bias 4): at 0.5 it would halve what the model has learned. The
    run folder is ``runs/<recipe>``, with the variant behind it where it is not the recipe's own. Fine-tuning on
    questions goes on with the model that was trained with the same variant: ``runs/<recipe before>-<variant>/model``.

    Args:
        name: one of :data:`RECIPES`.
        variant: one of :data:`VARIANTS`; None is ``plain``, or ``sink`` for a retrofit.

    Raises:
        ValueError: for an unknown recipe or variant, naming the near one, or an autoregressive model with a sink.
        TypeError: for a change that is no field.
    """
    one_of("recipe", name, RECIPES)
    settings = RECIPES[name]()
    own = _START.get(name, "plain")
    chosen = variant or own
    one_of("variant", chosen, VARIANTS)
    fields = dict(VARIANTS[chosen])
    if settings.objective == "autoregressive" and fields:
        raise ValueError(f"{name} trains a plain autoregressive model, so it has no variant {chosen!r}; leave it out")
    if settings.pairs in ("published", "corrected") and chosen != own:
        fields["init_from"] = str(settings.init_from).replace("/model", f"-{chosen}/model")
    elif settings.init_from and fields.get("gate"):
        fields["gate_bias"] = 4.0
    out = f"runs/{name}" if chosen == own else f"runs/{name}-{chosen}"
    return replace(settings, **{**fields, "out": out, **changes})
