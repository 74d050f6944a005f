"""One training run: text to rows to weights, written into a run folder."""

# R rows, S sequence
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from sinklab.core.diffusion import TimeSampler
from sinklab.core.errors import Terminated, on_sigterm
from sinklab.core.registry import rules
from sinklab.lab.data.rows import row_start
from sinklab.lab.data.streams import StreamedRows
from sinklab.lab.records.reading import lost_files, open_run
from sinklab.lab.records.writing import RunWriter
from sinklab.lab.training import adapters, checkpoints
from sinklab.lab.training import model as models
from sinklab.lab.training.checks import arguments, check, explained, tensorboard, variant
from sinklab.lab.training.model import freeze, merge_lora
from sinklab.lab.training.recorders import Counted, History, Recorder, SinkMonitor, Stop
from sinklab.lab.training.settings import TrainSettings
from sinklab.lab.training.text import Text, prepare
from sinklab.lab.training.trainer import DiffusionTrainer, NoisyCollator, Objective, Phases

NEVER = 2**62
"""A step that no run reaches."""


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
    settings. SIGTERM to any of them ends the run behind the step in work: with a checkpoint, and by
    ``SystemExit(143)``.

    Args:
        settings: of the run.
        progress: called with a short text before each stage and at each row of the history; None is
            silent.
        count: called with the steps done and all steps, after each of them.

    Returns:
        the folder of the trained model, ready for :func:`sinklab.core.models.load`.

    Raises:
        ValueError: for a corpus without text, sizes that do not fit, a folder that is taken,
            resuming with changed settings, changed data or without a folder, a loss that is not
            finite or jumps, a full disk, a device without enough memory.
    """
    check(settings)
    settings = checkpoints.with_precision(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = Path(settings.out)
    args = arguments(settings, folder)
    main = args.process_index == 0
    say = progress if progress is not None and main else (lambda text: None)
    earlier = checkpoints.earlier_run(folder, settings)
    lost = sorted(lost_files(folder, earlier)) if earlier else []
    if earlier and earlier.status == "complete" and not lost:
        say(f"the run in {folder} is complete; nothing is left to do")
        return folder / "model"
    checkpoint = _goes_on_from(folder, lost, say) if settings.resume else None
    # faults of the input show here, before a folder is taken
    start = models.started_from(settings) if settings.init_from is not None else None
    text = prepare(settings, say, start.tokenizer if start else None)
    if earlier:
        checkpoints.same_data(folder, earlier, text.sha256)
    model: Any = start.model if start else models.new_model(settings, text.tokenizer)
    models.check_fit(model, text.tokenizer, settings)
    facts: dict[str, Any] = {
        "name": folder.name,
        "family": settings.objective,
        "data_sha256": text.sha256,
    }
    facts |= variant(settings) | (models.source_of(start) if start else {})
    if settings.adapters is not None:
        earlier_facts = adapters.check_start(model, settings)
        facts["adapters"] = {
            "file": Path(settings.adapters).name,
            **dataclasses.asdict(earlier_facts),
        }
    _choose_parameters(model, settings, text, say)
    # every process has looked at the folder before the first one takes it
    args.distributed_state.wait_for_everyone()
    # the weights of a checkpoint come from the facts noted when the run began
    facts = earlier.model if earlier and checkpoint else facts
    kept: dict[str, Any] = {
        "model": facts,
        "settings": dataclasses.asdict(settings),
        "seed": settings.seed,
    }
    run = (
        RunWriter(folder, kind="training", **kept, overwrite=earlier is not None)
        if main
        else nullcontext()
    )
    stop = Stop()
    with _leaving_together(args), run as record, explained(settings), on_sigterm(stop.want):
        trainer, recorders = _trainer(settings, args, text, model, checkpoint, say)
        trainer.add_callback(stop)
        if count is not None and main:
            trainer.add_callback(Counted(count))
        with _kept(recorders, record):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            if stop.wanted:
                raise Terminated(143)
        _finish(trainer, record, text, settings)
    return folder / "model"


def _goes_on_from(folder: Path, lost: list[str], say: Callable[[str], object]) -> Path | None:
    """The last checkpoint of a run; missing files are reported."""
    if lost:
        say(f"{', '.join(lost)} of {folder} cannot be read and will be made again")
    checkpoint = next(reversed(checkpoints.whole_checkpoints(folder / "checkpoints")), None)
    if not checkpoint:
        say(f"{folder} has no checkpoint to resume from; the run starts from the beginning")
    return checkpoint


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
    size = (
        ""
        if isinstance(text.training, StreamedRows)
        else f" on {math.prod(text.training.ids_RS.shape):,} tokens"
    )
    say(
        f"training {count:,} parameters{size}, computing in "
        f"{'bfloat16' if settings.bf16 else 'float32'}"
    )


def _finish(
    trainer: DiffusionTrainer, record: RunWriter | None, text: Text, settings: TrainSettings
) -> None:
    """The held-out loss of the final weights, and the model."""
    heldout, folder = trainer.heldout_losses(), Path(settings.out)
    written = models.whole(trainer)
    if record is not None:
        # a gate that starts anew is in no base and in no file of adapters
        if settings.train_only == "lora" and settings.gate == "none":
            adapters.write(written, settings, trainer.state.global_step)
        merge_lora(written)
        record.table("heldout", _heldout(heldout, written, text))
        tokens = heldout["tokens"].tolist()
        losses = {
            "row": list(range(len(tokens))),
            "loss": heldout["losses"].tolist(),
            "tokens": tokens,
        }
        record.table("heldout_rows", losses)
        with checkpoints.needing_room(folder / "checkpoints", "the model"):
            models.save(written, text.tokenizer, folder, settings)
        # also files that an earlier process left behind
        checkpoints.prune(folder / "checkpoints", settings.keep)
        kept = [*(folder / "model").iterdir(), *folder.glob("sink.*"), *folder.glob(adapters.FILE)]
        record.keep(path for path in kept if path.is_file())
    trainer.accelerator.wait_for_everyone()


def _trainer(
    settings: TrainSettings,
    args: Any,
    text: Text,
    model: Any,
    checkpoint: Path | None,
    say: Callable[[str], object],
) -> tuple[DiffusionTrainer, list[Recorder]]:
    """The Trainer, and the recorders that it fills."""
    autoregressive, sampler = (
        settings.objective == "autoregressive",
        cast(TimeSampler, settings.time_sampler),
    )
    config = model.config
    shared = config.block_length if settings.t_per == "block" else None
    causal, anneal = (round(part * text.steps) for part in (settings.causal_start, settings.anneal))
    # every step of an autoregressive run
    clean = NEVER if autoregressive else causal
    # passes over the rows become steps once the rows are known
    args.max_steps, args.warmup_steps = text.steps, max(1, round(settings.warmup * text.steps))
    if settings.compile:
        model.model.compile(dynamic=False)
    if settings.gradient_checkpointing:
        models.checkpoint_activations(model)
    if checkpoint and isinstance(text.training, StreamedRows):
        text.training.start_at(*checkpoints.read_position(checkpoint))
    phases = Phases(causal, anneal, settings.seed, autoregressive, settings.window)
    of_model, in_blocks = (
        (config.mask_token_id, config.logit_shift),
        config.block_length is not None,
    )
    liger = {"auto": None, "on": True, "off": False}[settings.liger]
    trainer = DiffusionTrainer(
        model=model,
        args=args,
        train_dataset=text.training,
        data_collator=NoisyCollator(settings.seed, settings.batch, sampler, clean, shared),
        objective=Objective(
            phases, *of_model, settings.batch, settings.head_chunk, liger, in_blocks=in_blocks
        ),
        heldout=text.heldout,
        together=max(
            1, min(args.per_device_train_batch_size, settings.head_chunk // settings.length)
        ),
        keep=settings.keep,
        muon_lr=(settings.muon_lr or settings.lr) if settings.optimizer == "muon" else None,
    )
    models.spread_out(trainer, settings)
    # rows of the history are said by `progress`; the Trainer would print them as raw dicts
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    begins = (args.warmup_steps, causal, causal + anneal)
    tokens = settings.batch * settings.length
    recorders: list[Recorder] = [
        History(tokens, checkpoint, say, spike=settings.spike, begins=begins)
    ]
    if settings.monitor_every:
        monitor = SinkMonitor(
            text.heldout.ids_RS,
            every=settings.monitor_every,
            rows=settings.monitor_rows,
            rule=rules.parse(settings.monitor_rule),
            earlier=checkpoint,
            causal_steps=clean,
            given=len(row_start(text.tokenizer)),
            log=trainer.note,
        )
        recorders.append(monitor)
    # the history counts a step once the monitor has looked
    # and TensorBoard closes its file when all have spoken: another would begin in a folder of its
    # own
    for callback in [
        *reversed(recorders),
        *(tensorboard(settings) if args.process_index == 0 else ()),
    ]:
        trainer.add_callback(callback)
    return trainer, recorders


@contextmanager
def _leaving_together(args: Any) -> Iterator[None]:
    """After SIGTERM the processes leave once the first has written: a launcher kills the rest when
    one is gone.
    """
    try:
        yield
    except Terminated:
        args.distributed_state.wait_for_everyone()
        raise


@contextmanager
def _kept(recorders: list[Recorder], record: RunWriter | None) -> Iterator[None]:
    """Write the measurements of the block, also if it fails; a full disk must not hide why."""
    if record is not None:
        for recorder in recorders:
            recorder.write = record.table

    def write() -> None:
        for recorder in recorders:
            recorder.write(recorder.table, recorder.columns())

    try:
        yield
    except BaseException as error:
        try:
            write()
        except OSError as failure:
            error.add_note(f"the history could not be written either: {failure}")
        raise
    write()


def _heldout(measured: dict[str, Any], model: Any, text: Text) -> dict[str, list[Any]]:
    # of questions and answers, what the loss falls on
    rows, asked_RS = text.heldout.ids_RS, text.heldout.maskable_RS
    asked_RS = torch.ones_like(rows, dtype=torch.bool) if asked_RS is None else asked_RS
    ids = [row[asked].tolist() for row, asked in zip(rows, asked_RS, strict=True)]
    texts: Any = text.tokenizer.batch_decode(ids, skip_special_tokens=True)
    tokens, size = sum(map(len, ids)), sum(len(part.encode()) for part in texts)
    return {
        "parameters": [model.num_parameters()],
        "loss": [measured["loss"]],
        "bits_per_byte": [measured["loss"] * tokens / math.log(2) / size],
        "tokens": [tokens],
        "bytes": [size],
    }


def settings_of(folder: str | Path) -> TrainSettings:
    """The settings with which the training run in a folder was made, but ``resume``:
    ``train(settings_of(folder))``, with another ``out``, makes it again. A setting that is newer
    than the run has its default.

    Raises:
        ValueError: if the folder holds no training run, is damaged, or has settings that do not
            exist.
    """
    info = checkpoints.of_training(Path(folder), open_run(folder).info)
    known = get_type_hints(TrainSettings)
    if surplus := [name for name in info.settings if name not in known]:
        raise ValueError(
            f"{folder} has settings that this version of sinklab does not know: "
            f"{', '.join(surplus)}; use the version that wrote it ({info.versions.get('sinklab')})"
        )
    for name, value in info.settings.items():
        kinds = get_args(known[name]) or (known[name],)
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            raise ValueError(
                f"{folder} is damaged: its setting {name} is {value!r}, which no run writes"
            )
    # a run that was interrupted and resumed is reproduced from its start
    return TrainSettings(**info.settings | {"resume": False})
