"""One training run: text to rows to weights, written into a run folder."""

# R rows, S sequence
import dataclasses
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from sinklab.lab.data import StreamedRows, row_start
from sinklab.lab.files import Terminated, on_signals
from sinklab.lab.records.reading import lost_files
from sinklab.lab.records.writing import RunWriter
from sinklab.lab.training import adapters, checkpoints
from sinklab.lab.training import model as models
from sinklab.lab.training.checks import arguments, check, variant
from sinklab.lab.training.model import freeze, merge_lora
from sinklab.lab.training.recorders import Monitor, Recorder, Stop
from sinklab.lab.training.settings import TrainSettings
from sinklab.lab.training.text import Text, prepare
from sinklab.lab.training.trainer import (
    MEASURED_TOKENS,
    NEVER,
    DiffusionTrainer,
    NoisyCollator,
    Objective,
)


def train(
    settings: TrainSettings,
    *,
    progress: Callable[[str], object] | None = None,
    count: Callable[[float, float], object] | None = None,
) -> Path:
    """Train and write a run folder: ``run.json``, tables ``history``, ``heldout``, ``heldout_rows``
    and ``monitor``, ``model/`` (weights, config, tokenizer), ``sink.safetensors`` if the sink alone
    was trained, ``adapters.safetensors`` if adapters were, ``checkpoints/``.

    Started by ``torchrun`` or ``accelerate launch``, every process calls this with the same
    settings. Ctrl-C, or SIGTERM to any of them, ends the run behind the step in work: with a
    checkpoint, and by ``KeyboardInterrupt`` or ``SystemExit(143)``.

    Args:
        settings: of the run.
        progress: called with a short text before each stage and at each row of the history; None is
            silent.
        count: called with the steps done and all steps, after each of them.

    Returns:
        the folder of the trained model, ready for :func:`sinklab.load`.

    Raises:
        ValueError: for a corpus without text, sizes that do not fit, a folder with something else
            or a run of other settings or data, a loss that is not finite.
    """
    check(settings)
    settings = checkpoints.with_precision(settings)
    folder = Path(settings.out)
    args = arguments(settings, folder)
    main = args.process_index == 0

    def say(stage: str) -> None:
        if progress is not None and main:
            progress(stage)

    earlier = checkpoints.earlier_run(folder, settings)
    if earlier is not None and earlier.status == "complete":
        lost = lost_files(folder, earlier)
        if not lost:
            say(f"the run in {folder} is complete; nothing is left to do")
            return folder / "model"
        say(f"made again, because they are lost or damaged: {', '.join(sorted(lost))}")
    checkpoint: Path | None = None
    if earlier is not None:
        checkpoint = checkpoints.newest(folder)
        if checkpoint is None:
            say(f"{folder} has no checkpoint yet: the run starts from the beginning")
    # faults of the input show here, before a folder is taken
    model, text, facts = _model_and_text(settings, say)
    if earlier is not None:
        checkpoints.same_data(folder, earlier, text.sha256)
    _choose_parameters(model, settings, text, say)
    # every process has looked at the folder before the first one takes it
    args.distributed_state.wait_for_everyone()
    # the weights of a checkpoint come from the facts noted when the run began
    if earlier is not None and checkpoint is not None:
        facts = earlier.model
    run: Any = nullcontext()
    if main:
        run = RunWriter(
            folder,
            kind="training",
            model=facts,
            settings=dataclasses.asdict(settings),
            seed=settings.seed,
            overwrite=earlier is not None,
        )
    stop = Stop(say)
    signals = on_signals(stop.want, signal.SIGINT, signal.SIGTERM)
    with _leaving_together(args, folder, say), run as record, signals:
        trainer = _trainer(settings, args, text, model, checkpoint)
        tokens, monitor = settings.batch * settings.length, _monitor(settings, text)
        recorder = Recorder(tokens, say, monitor)
        if record is not None:
            recorder.write, recorder.count = record.table, count
        trainer.add_callback(recorder)
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        stop.end()
        _finish(trainer, record, text, settings)
    return folder / "model"


def _model_and_text(
    settings: TrainSettings, say: Callable[[str], object]
) -> tuple[Any, Text, dict[str, Any]]:
    """The model before its first step, the text of the run, and the facts for its ``run.json``."""
    facts = {"name": Path(settings.out).name, "family": settings.objective, **variant(settings)}
    model: Any
    if settings.init_from is not None:
        start = models.started_from(settings)
        model = start.model
        text = prepare(settings, say, start.tokenizer)
        facts |= models.source_of(start)
    else:
        text = prepare(settings, say)
        model = models.new_model(settings, text.tokenizer)
    models.check_fit(model, text.tokenizer, settings)
    facts["data_sha256"] = text.sha256
    if settings.adapters is not None:
        known = dataclasses.asdict(adapters.check_start(model, settings))
        facts["adapters"] = {"file": Path(settings.adapters).name, **known}
    return model, text, facts


def _choose_parameters(
    model: Any, settings: TrainSettings, text: Text, say: Callable[[str], object]
) -> None:
    """Make the chosen parameters trainable, and report their number."""
    # of tied weights one is saved: the Trainer is told, or it would miss the other in every
    # checkpoint
    model._keys_to_ignore_on_save = {*model.all_tied_weights_keys}
    # if padding is the end token, torch would keep the end of a text from learning
    model.get_input_embeddings().padding_idx = None
    torch.manual_seed(settings.seed)
    trained = set(freeze(model, settings.train_only, settings.lora_rank))
    if settings.adapters is not None:
        adapters.put_in(model, settings)
        say(f"going on from the adapters in {settings.adapters}, with a fresh optimizer")
    count = sum(weight.numel() for name, weight in model.named_parameters() if name in trained)
    size = ""
    if not isinstance(text.training, StreamedRows):
        size = f" on {math.prod(text.training.ids_RS.shape):,} tokens"
    number = {True: "bfloat16", False: "float32"}[bool(settings.bf16)]
    say(f"training {count:,} parameters{size}, computing in {number}")


def _finish(
    trainer: DiffusionTrainer, record: RunWriter | None, text: Text, settings: TrainSettings
) -> None:
    """The held-out loss of the final weights, and the model."""
    heldout = trainer.heldout_losses()
    folder = Path(settings.out)
    written: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if record is not None:
        if settings.train_only == "lora":
            adapters.write(written, settings, trainer.state.global_step)
        merge_lora(written)
        record.table("heldout", _heldout(heldout, written, text))
        losses, tokens = (heldout[name].tolist() for name in ("losses", "tokens"))
        rows = {"row": list(range(len(losses))), "loss": losses, "tokens": tokens}
        record.table("heldout_rows", rows)
        models.save(written, text.tokenizer, folder, settings)
        kept = [*(folder / "model").iterdir(), *folder.glob("sink.*"), *folder.glob(adapters.FILE)]
        record.keep(path for path in kept if path.is_file())
    trainer.accelerator.wait_for_everyone()


def _trainer(
    settings: TrainSettings,
    args: Any,
    text: Text,
    model: Any,
    checkpoint: Path | None,
) -> DiffusionTrainer:
    """The Trainer."""
    config = model.config
    causal = _causal_steps(settings)
    noise = NoisyCollator(settings.seed, settings.batch, settings.time_sampler, causal)
    if settings.compile:
        model.model.compile(dynamic=False)
    if checkpoint and isinstance(text.training, StreamedRows):
        row = checkpoints.step_of(checkpoint) * settings.batch
        text.training.start_at(row, checkpoints.cursor_of(checkpoint))
    objective = Objective(
        causal_steps=causal,
        mask_id=config.mask_token_id,
        shifted=config.logit_shift,
        in_blocks=config.block_length is not None,
    )
    together = min(args.per_device_train_batch_size, MEASURED_TOKENS // settings.length)
    trainer = DiffusionTrainer(
        model=model,
        args=args,
        train_dataset=text.training,
        data_collator=noise,
        objective=objective,
        heldout=text.heldout,
        together=max(1, together),
    )
    # rows of the history are said by `progress`; the Trainer would print them as raw dicts
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def _causal_steps(settings: TrainSettings) -> int:
    if settings.objective == "autoregressive":
        return NEVER
    return round(settings.causal_start * settings.steps)


def _monitor(settings: TrainSettings, text: Text) -> Monitor | None:
    if not settings.monitor_every:
        return None
    given = len(row_start(text.tokenizer))
    return Monitor(text.heldout.ids_RS, settings.monitor_every, _causal_steps(settings), given)


@contextmanager
def _leaving_together(args: Any, folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """After Ctrl-C or SIGTERM the processes leave once the first has written: a launcher kills the
    rest when one is gone. What is there to go on from is said.
    """
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        args.distributed_state.wait_for_everyone()
        saved = checkpoints.newest(folder)
        if saved is not None:
            say(f"saved: {saved}; the same command goes on from there")
        else:
            say(f"{folder} has no checkpoint yet: the same command begins anew")
        raise


def _heldout(measured: dict[str, Any], model: Any, text: Text) -> dict[str, list[Any]]:
    # of questions and answers, what the loss falls on
    rows = text.heldout.ids_RS
    asked_RS = text.heldout.maskable_RS
    if asked_RS is None:
        asked_RS = torch.ones_like(rows, dtype=torch.bool)
    ids = [row[asked].tolist() for row, asked in zip(rows, asked_RS, strict=True)]
    texts: Any = text.tokenizer.batch_decode(ids, skip_special_tokens=True)
    tokens = sum(map(len, ids))
    size = sum(len(part.encode()) for part in texts)
    return {
        "parameters": [model.num_parameters()],
        "loss": [measured["loss"]],
        "bits_per_byte": [measured["loss"] * tokens / math.log(2) / size],
        "tokens": [tokens],
        "bytes": [size],
    }
