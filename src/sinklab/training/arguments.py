"""The Trainer's arguments, and whom it tells besides the run folder."""

from __future__ import annotations

import atexit
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from sinklab.training.checks import micro_batches
from sinklab.training.settings import TrainSettings, one_of

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "clearml", "swanlab", "neptune", "dvclive")
TENSORBOARD = "tensorboard"


def arguments(settings: TrainSettings, folder: Path) -> TrainingArguments:
    """The Trainer's arguments for these settings. Joins the process group where there are several processes.

    Raises:
        ValueError: if the batch does not divide evenly over processes and micro-batches, or for an unknown tracker.
    """
    # as torchrun, accelerate launch and every other launcher say it; the arguments need it before they know it
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    micro, accumulated = micro_batches(settings, ranks)
    on_gpu = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=accumulated,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.min_lr},
        optim="adamw_torch_fused",
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        max_grad_norm=settings.clip,
        bf16=settings.bf16,
        use_cpu=not on_gpu,
        ddp_backend="gloo" if ranks > 1 and not on_gpu else None,
        ddp_find_unused_parameters=False,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        # a stream goes on from its cursor, and rows in memory are found by their number
        ignore_data_skip=settings.streaming,
        dataloader_num_workers=settings.workers,
        dataloader_pin_memory=on_gpu,
        report_to=[name for name in trackers(settings.log_to) if name != TENSORBOARD] or "none",
        seed=settings.seed,
        data_seed=settings.seed,
        remove_unused_columns=False,
        label_names=[],
        prediction_loss_only=True,
    )
    # a process uses one device; several GPUs without a launcher would be torch's DataParallel
    args.device  # noqa: B018 (counts the devices on first use)
    args._n_gpu = min(1, args._n_gpu)
    if ranks > 1:
        # gloo's threads must end before the interpreter does: a process that aborts takes the others with it
        atexit.register(_leave)
    return args


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def trackers(log_to: str) -> list[str]:
    """Names of trackers from the setting.

    Raises:
        ValueError: for an unknown one, or one that is asked for by name and not installed.
    """
    names = [name.strip() for name in log_to.split(",") if name.strip()]
    if names == ["none"]:
        return []
    if names == ["auto"]:
        return [TENSORBOARD] if _installed(TENSORBOARD) else []
    for name in names:
        one_of("log_to", name, ("auto", "none", *TRACKERS))
        if name in ("auto", "none"):
            raise ValueError(f"log_to takes {name!r} alone, but is {log_to!r}")
        if name in (TENSORBOARD, "wandb", "trackio") and not _installed(name):
            raise ValueError(f"log_to names {name}, which is not installed; run pip install {name}")
    return names


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def tensorboard(settings: TrainSettings, folder: Path) -> list[TrainerCallback]:
    """The callback that writes ``tracking/`` in the run folder, if it is wanted."""
    if TENSORBOARD not in trackers(settings.log_to):
        return []
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(log_dir=str(folder / "tracking"))
    return [TensorBoardCallback(writer)]
