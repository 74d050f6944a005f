"""One training run: corpus to tokenizer to rows to weights, written into a run folder."""

# R rows, S sequence
from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from sinklab.data import pack, read_corpus, train_tokenizer
from sinklab.models import DiffusionLM, DiffusionLMConfig
from sinklab.records import RunWriter, open_run, weights_hash
from sinklab.training.checks import check, variant
from sinklab.training.history import HISTORY_FILE, History, data_hash, newest_checkpoint, same_data
from sinklab.training.settings import TrainSettings
from sinklab.training.trainer import DiffusionTrainer

HELDOUT_ROWS = 256


class Rows(torch.utils.data.Dataset):
    """Packed rows as the Trainer wants them."""

    def __init__(self, ids_RS: Tensor) -> None:
        self.ids_RS = ids_RS

    def __len__(self) -> int:
        return self.ids_RS.shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids_RS[index].long()}


def build_model(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> DiffusionLM:
    """A freshly initialised model; its backbone's weights depend on the seed and sizes, not on the variant.

    Raises:
        ValueError: if the tokenizer has no mask token, or the variant is unknown.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(
            "the tokenizer has no mask token; add one with tokenizer.add_special_tokens({'mask_token': '<|mask|>'})"
        )
    backbone = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.mlp_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=max(512, 2 * settings.length),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        rms_norm_eps=1e-5,
    )
    config = DiffusionLMConfig(
        backbone=backbone,
        mask_token_id=tokenizer.mask_token_id,
        **variant(settings),
    )
    torch.manual_seed(settings.seed)
    return DiffusionLM(config)


def prepare(
    settings: TrainSettings, say: Callable[[str], object] = lambda text: None
) -> tuple[PreTrainedTokenizerBase, Tensor, Tensor]:
    """Tokenizer, training rows and held-out rows of a run."""
    say(f"reading {settings.corpus}")
    documents = list(read_corpus(settings.corpus))
    tokenizer: Any
    if settings.tokenizer is None:
        say(f"training a tokenizer of {settings.vocab_size} entries on {len(documents)} documents")
        tokenizer = train_tokenizer(documents, settings.vocab_size)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"no tokenizer can be loaded from {settings.tokenizer!r}: {reason}") from error
    say("packing the text into rows")
    rows_RS = pack(documents, tokenizer, settings.length)
    if settings.heldout is not None:
        held_RS = pack(read_corpus(settings.heldout), tokenizer, settings.length)
        # evenly spaced, so that every document has its share
        return tokenizer, rows_RS, held_RS[:: max(1, len(held_RS) // HELDOUT_ROWS)][:HELDOUT_ROWS]
    count = min(HELDOUT_ROWS, max(1, rows_RS.shape[0] // 20))
    if rows_RS.shape[0] <= count:
        raise ValueError(
            "the corpus fills only one row, so nothing can be held out; give a heldout corpus or a shorter length"
        )
    return tokenizer, rows_RS[:-count], rows_RS[-count:]


def arguments(settings: TrainSettings, folder: Path) -> TrainingArguments:
    """The Trainer's arguments for these settings."""
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, round(settings.warmup * settings.steps)),
        weight_decay=settings.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=settings.bf16,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        save_total_limit=2,
        report_to="none",
        seed=settings.seed,
        data_seed=settings.seed,
        remove_unused_columns=False,
        label_names=[],
        prediction_loss_only=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def train(settings: TrainSettings, *, progress: Callable[[str], object] | None = None) -> Path:
    """Train and write a run folder: ``run.json``, ``history``, ``heldout``, ``model/`` (weights, config, tokenizer),
    ``checkpoints/``.

    Args:
        settings: what to train, on what.
        progress: called with a short text before each stage and at each row of the history; None is silent.

    Returns:
        the folder of the trained model, ready for :func:`sinklab.models.load`.

    Raises:
        ValueError: for a corpus without text, sizes that do not fit, a folder that is taken, resuming with changed
            settings, changed data or without a checkpoint, a loss that is not finite.
    """
    say = progress or (lambda text: None)
    check(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = Path(settings.out)
    checkpoint = newest_checkpoint(folder, dataclasses.asdict(settings)) if settings.resume else None
    if checkpoint and open_run(folder).info.status == "complete":
        say(f"the run in {folder} is complete; nothing is left to do")
        return folder / "model"
    if not checkpoint and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"a new run needs a folder of its own, but {folder} holds files; choose another with --out, or go on from "
            "its newest checkpoint with --resume"
        )
    # what can be wrong with the input shows here, before a folder is taken
    tokenizer, rows_RS, heldout_RS = prepare(settings, say)
    data = data_hash(tokenizer, rows_RS, heldout_RS)
    if checkpoint:
        same_data(folder, data)
    model = build_model(settings, tokenizer)
    say(f"training {model.num_parameters():,} parameters on {rows_RS.numel():,} tokens")
    with RunWriter(
        folder,
        kind="training",
        model={"name": folder.name, "family": "diffusion", "data_sha256": data, **variant(settings)},
        settings=dataclasses.asdict(settings),
        seed=settings.seed,
        overwrite=bool(checkpoint),
    ) as run:
        if settings.compile:
            model.model.compile(dynamic=False)
        earlier = json.loads((checkpoint / HISTORY_FILE).read_text()) if checkpoint else []
        history = History(settings.batch * settings.length, earlier, say)
        trainer = DiffusionTrainer(
            model=model,
            args=arguments(settings, folder),
            train_dataset=Rows(rows_RS),
            eval_dataset=Rows(heldout_RS),
            callbacks=[history],
            noise_seed=settings.seed,
            time_sampler=settings.time_sampler,
            causal_steps=round(settings.causal_start * settings.steps),
        )
        # rows of the history are said by `progress`; the Trainer would print them as raw dicts
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            run.table("history", history.columns())
        run.table("heldout", _heldout(trainer, tokenizer, heldout_RS))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        (folder / "model" / "weights.sha256").write_text(weights_hash(model.state_dict()) + "\n")
    return folder / "model"


def _heldout(trainer: DiffusionTrainer, tokenizer: Any, heldout_RS: Tensor) -> dict[str, list[Any]]:
    loss = trainer.evaluate()["eval_loss"]
    texts = tokenizer.batch_decode(heldout_RS.tolist(), skip_special_tokens=True)
    size = sum(len(text.encode()) for text in texts)
    bits_per_byte = loss * heldout_RS.numel() / math.log(2) / size
    model: Any = trainer.model
    parameters = model.num_parameters()
    return {
        "parameters": [parameters],
        "loss": [loss],
        "bits_per_byte": [bits_per_byte],
        "tokens": [heldout_RS.numel()],
        "bytes": [size],
    }
