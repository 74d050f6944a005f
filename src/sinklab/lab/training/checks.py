"""Checks of a training run before it reads anything."""

import atexit
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import LlamaConfig, TrainingArguments

from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.lab.training.settings import TrainSettings


def check(settings: TrainSettings) -> None:
    """Refuse settings that can be refused without reading the corpus.

    Raises:
        ValueError: for sizes below 1 or that do not fit, an unknown choice or variant, fractions
            outside 0…1, settings that exclude one another.
    """
    DiffusionLMConfig(LlamaConfig(), **variant(settings))
    # transformers before 5.23 does not ask
    if settings.init_from is None and settings.hidden_size // settings.heads % 2:
        raise ValueError(
            f"each head needs an even rotary dimension, but {settings.hidden_size} over "
            f"{settings.heads} heads is odd; change hidden_size or heads"
        )
    if settings.kv_heads is not None and settings.heads % settings.kv_heads:
        raise ValueError(
            f"kv_heads must divide heads ({settings.heads}), but is {settings.kv_heads}"
        )
    _check_together(settings)


def _check_together(settings: TrainSettings) -> None:
    """Settings that exclude one another."""
    plain = TrainSettings()
    names = ("sink_count", "gate", "attention", "causal_start", "block_length")
    given = [name for name in names if getattr(settings, name) != getattr(plain, name)]
    if settings.objective == "autoregressive" and given:
        raise ValueError(
            "an autoregressive run trains a plain decoder, without sink or gate and causal "
            f"throughout; leave out {', '.join(given)}"
        )
    if settings.train_only != "all" and settings.init_from is None:
        raise ValueError(
            f"train_only={settings.train_only!r} leaves the backbone as it is, so there must be "
            "one: give init_from"
        )
    if settings.adapters is not None and settings.train_only != "lora":
        raise ValueError(
            f"adapters go on with train_only='lora', got {settings.train_only!r}; give that"
        )
    if settings.row_start and (settings.streaming or settings.pairs != "none"):
        raise ValueError(
            "row_start begins packed rows of plain text; leave it out with a stream or pairs"
        )
    if settings.streaming and settings.pairs != "none":
        raise ValueError("questions and answers are read at once; leave out streaming")
    if settings.monitor_every and settings.pairs in ("corrected", "completion"):
        raise ValueError(
            f"the sink monitor measures rows without padding, and pairs={settings.pairs!r} has "
            "padding; set monitor_every to 0"
        )


def micro_batches(settings: TrainSettings, ranks: int) -> tuple[int, int]:
    """Rows that a process runs at a time, and how many times it does so in a step.

    Raises:
        ValueError: if the batch does not divide evenly.
    """
    micro = settings.micro_batch or max(1, settings.batch // ranks)
    if settings.batch % (micro * ranks):
        raise ValueError(
            f"batch must be a multiple of micro_batch × processes, but {settings.batch} is no "
            f"multiple of {micro} × {ranks}; change --batch or --micro-batch"
        )
    return micro, settings.batch // (micro * ranks)


def variant(settings: TrainSettings, *more: str) -> dict[str, Any]:
    """The settings that make the model's variant, and more of them, as its config names them."""
    names = ["sink_kind", "sink_count", "sink_side", "gate", "attention", *more]
    if settings.block_length is not None:
        names.append("block_length")
    return {name: getattr(settings, name) for name in names}


def arguments(settings: TrainSettings, folder: Path) -> TrainingArguments:
    """The Trainer's arguments for these settings. Joins the process group if there are several
    processes.

    Raises:
        ValueError: if the batch does not divide evenly over processes and micro-batches, and if
            weights are to be spread over processes.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        raise ValueError(
            "every process trains a whole model, but FSDP spreads it; start with "
            "launch/eight_gpus.yaml, and train a part if memory is short (--train-only lora)"
        )
    # as torchrun, accelerate launch and every other launcher say it; an interactive shell of Slurm
    # sets the size of a world without a rank
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    micro, accumulated = micro_batches(settings, ranks)
    on_gpu = torch.cuda.is_available()
    backend = None
    if ranks > 1 and not on_gpu:
        backend = "gloo"
    # named so since transformers 5.18
    saving = "activation_checkpointing"
    if saving not in TrainingArguments.__dataclass_fields__:
        saving = "gradient_checkpointing"
    saved: dict[str, Any] = {
        saving: settings.gradient_checkpointing,
        f"{saving}_kwargs": {"use_reentrant": False},
    }
    args = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulated,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.min_lr},
        optim="adamw_torch_fused",
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        warmup_steps=max(1, round(settings.warmup * settings.steps)),
        bf16=bool(settings.bf16),
        use_cpu=not on_gpu,
        ddp_backend=backend,
        ddp_find_unused_parameters=False,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.save_every,
        save_steps=settings.save_every,
        save_total_limit=2,
        # a stream continues from its cursor, and rows in memory are found by their number
        ignore_data_skip=settings.streaming,
        # one process reads a stream ahead of a GPU
        dataloader_num_workers=int(settings.streaming and on_gpu),
        dataloader_pin_memory=on_gpu,
        report_to="none",
        seed=settings.seed,
        remove_unused_columns=False,
        **saved,
    )
    # a process uses one device; several GPUs without a launcher would be torch's DataParallel
    args.device  # noqa: B018 (counts the devices on first use)
    args._n_gpu = min(1, args._n_gpu)
    if ranks > 1:
        # gloo's threads must end before the interpreter does: a process that aborts takes the
        # others with it
        atexit.register(args.distributed_state.destroy_process_group)
    if len({*gather_object([args.bf16])}) > 1:
        raise ValueError(
            "all processes must compute in one type, but not all machines have bfloat16; give "
            "--no-bf16"
        )
    return args
