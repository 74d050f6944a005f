"""Records of a model in training: losses and speed at each step logged, and the paths of its
attention.

A recorder keeps its rows in each checkpoint, so that a resumed run has the table of an
uninterrupted one.
"""

# R rows, S sequence
import contextlib
import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from sinklab.core.sinks import DEFAULT
from sinklab.lab.files import Terminated, read_json
from sinklab.lab.records.info import undamaged
from sinklab.lab.records.storage import write_text
from sinklab.lab.training.checkpoints import HISTORY_FILE, named_checkpoint, no_resuming
from sinklab.lab.training.snapshots import MEASURES, snapshot

LOGGED = {
    "loss": "loss",
    "heldout_loss": "eval_loss",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
}
"""Columns of the history -> their names in the Trainer's log."""
MONITOR_FILE = "monitor.json"
SUMMARY = {"sink_share": "sink/share", "main_added": "sink/main", "mobility": "sink/mobility"}
SUMMARY |= {"text_sinks": "sink/text_sinks", "activation_ratio": "sink/activation_ratio"}


class Recorder(TrainerCallback):
    """Collects the rows of a table while the Trainer runs.

    Args:
        earlier: checkpoint of the run that this one resumes, with rows that come first.

    Raises:
        ValueError: if that checkpoint's rows are damaged.
    """

    table: ClassVar[str]
    """The table in the run folder."""
    file: ClassVar[str]
    """The file in each checkpoint."""
    names: ClassVar[tuple[str, ...]]
    """The columns."""

    def __init__(self, earlier: Path | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.write: Callable[[str, dict[str, list[Any]]], object] | None = None
        """Called with the table and its columns whenever it has grown."""
        if earlier is not None and (earlier / self.file).exists():
            with undamaged(earlier / self.file, no_resuming(earlier)):
                self.rows = [dict(row) for row in read_json(earlier / self.file)]

    def save(self, checkpoint: Path) -> None:
        """Write the rows so far into a checkpoint."""
        write_text(checkpoint / self.file, json.dumps(self.rows))

    def columns(self) -> dict[str, list[Any]]:
        """The rows as columns of the table."""
        return {name: [row[name] for row in self.rows] for name in self.names}

    def grow(self, *rows: dict[str, Any]) -> None:
        """Add rows, also on the disk; one that is full is no reason to stop here: checkpoints and
        the end say so.
        """
        self.rows += rows
        if self.write is None:
            return
        with contextlib.suppress(OSError):
            self.write(self.table, self.columns())


class History(Recorder):
    """Collects what the Trainer logs, and stops a run whose loss is not finite.

    Args:
        tokens_per_step: tokens in an optimizer step, over all processes.
        earlier: checkpoint of the run that this one resumes.
        say: called with a line at each row.
    """

    table = "history"
    file = HISTORY_FILE
    names = ("step", "tokens", *LOGGED, "tokens_per_second", "seconds")

    def __init__(
        self,
        tokens_per_step: int,
        earlier: Path | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(earlier)
        self.say = say
        self.tokens_per_step = tokens_per_step
        self._since = self._clock = self.started = time.perf_counter()
        if self.rows:
            self.started -= self.rows[-1]["seconds"]
        self._first = self._steps = 0
        self._busy = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the start of this session, to tell how long the rest will take."""
        self._first = state.global_step
        self._since = self._clock = time.perf_counter()
        # a resumed state would bring back the intervals of the session that wrote it
        state.logging_steps = args.logging_steps
        state.eval_steps = args.eval_steps
        state.save_steps = args.save_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the time of training itself, without measuring and saving."""
        now = time.perf_counter()
        self._busy += now - self._clock
        self._clock = now
        self._steps += 1

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The time of measuring and of saving is none of training."""
        self._clock = time.perf_counter()

    on_save = on_evaluate

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Keep losses and learning rates with the step and the tokens seen.

        Raises:
            ValueError: if a loss is not finite.
        """
        logs = logs or {}
        if "loss" not in logs and "eval_loss" not in logs:
            return
        self._refuse_no_number(args, state, logs)
        row = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
        row |= {name: logs.get(said, math.nan) for name, said in LOGGED.items()}
        row["tokens_per_second"] = math.nan
        line = f"step {state.global_step} of {state.max_steps}"
        if "loss" in logs:
            if self._busy:
                row["tokens_per_second"] = self._steps * self.tokens_per_step / self._busy
            self._busy = 0.0
            self._steps = 0
            line += f", loss {logs['loss']:.3f}"
        if "eval_loss" in logs:
            line += f", held out {logs['eval_loss']:.3f}"
        self.grow(row | {"seconds": round(time.perf_counter() - self.started, 1)})
        if self.say is not None:
            self.say(line + self._left(state))

    def _refuse_no_number(self, args: Any, state: Any, logs: dict[str, float]) -> None:
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise ValueError(
                    f"the loss must stay finite, but {name} is {logs[name]} at step "
                    f"{state.global_step}; lower lr ({args.learning_rate}) and start again, or "
                    f"resume from {named_checkpoint(args.output_dir)}"
                )

    def _left(self, state: Any) -> str:
        done = state.global_step - self._first
        left = state.max_steps - state.global_step
        if not done or left <= 0:
            return ""
        minutes = (time.perf_counter() - self._since) / done * left / 60
        if minutes < 1:
            return ", less than a minute left"
        return f", about {minutes:.0f} min left"


class Counted(TrainerCallback):
    """Tells how far a run is after each step."""

    def __init__(self, count: Callable[[float, float], object]) -> None:
        self._count = count

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count no steps, or those of the run that is resumed."""
        self._count(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count one more step."""
        self._count(state.global_step, state.max_steps)


class Stop(TrainerCallback):
    """Ctrl-C and SIGTERM end a run with a checkpoint behind the step in work: in all processes the
    same one. A second Ctrl-C ends it at once, unless there are several processes, whose launcher
    repeats the first.

    Args:
        say: called with what happens now.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._group: Any = None
        self.wanted = 0
        """the signal that came"""

    def want(self, number: int, frame: object) -> None:
        """Note the signal; nothing else happens before the step ends."""
        if number == self.wanted == signal.SIGINT and self._group is None:
            raise KeyboardInterrupt
        is_first = not self.wanted
        self.wanted = number
        # a signal may come in the middle of another line
        with contextlib.suppress(RuntimeError):
            if is_first and self._group is None:
                self._say("the step in work is finished and saved; a second Ctrl-C ends at once")
            elif is_first:
                self._say("the step in work is finished and saved")

    def end(self) -> None:
        """Raise what ends the program, if a signal came: KeyboardInterrupt or Terminated."""
        if self.wanted == signal.SIGINT:
            raise KeyboardInterrupt
        if self.wanted:
            raise Terminated(143)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A group of its own, so that no GPU is waited for."""
        if args.world_size > 1:
            self._group = dist.new_group(backend="gloo")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log, save and stop if a signal came to any process."""
        if self._group is not None:
            anywhere = torch.tensor(self.wanted)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._group)
            self.wanted = int(anywhere)
        if self.wanted:
            control.should_log = control.should_save = control.should_training_stop = True


class SinkMonitor(Recorder):
    """Takes a :func:`~sinklab.lab.training.snapshots` at step 0, every so many steps and at the
    end. It leaves training as it is, to the bit.

    Args:
        ids_RS: held-out text, rows without padding; ``rows`` of them, evenly spaced, are measured.
        every: steps between two measurements.
        rows: how many rows.
        earlier: checkpoint of the run that this one resumes.
        causal_steps: until this step the model is a causal one and is measured as one.
        log: called with a few numbers of each measurement, by name (``sink/share``): the Trainer's
            own ``log``.
    """

    table = "monitor"
    file = MONITOR_FILE
    names = ("step", "causal", "layer", "added", "even_share", *MEASURES)

    def __init__(
        self,
        ids_RS: Tensor,
        *,
        every: int,
        rows: int = 8,
        earlier: Path | None = None,
        causal_steps: int = 0,
        given: int = 0,
        log: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        super().__init__(earlier)
        self.ids_RS = ids_RS[:: max(1, len(ids_RS) // rows)][:rows]
        self.every = every
        self.causal_steps = causal_steps
        self.given = given
        self.log = log

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Measure the model before its first step."""
        if state.global_step == 0:
            self.look(model, state)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Measure after every `every` steps."""
        if state.global_step % self.every == 0:
            self.look(model, state)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Measure the final model."""
        if state.global_step >= state.max_steps:
            self.look(model, state)

    def look(self, model: nn.Module, state: Any) -> None:
        """Measure now, unless this step was measured already."""
        step = state.global_step
        if any(row["step"] == step for row in self.rows):
            return
        # a process alone cannot run a model whose weights are spread over all; otherwise the others
        # need not work
        if not state.is_world_process_zero and not _is_sharded(model):
            return
        # the model of step n has taken steps 0 … n-1
        causal = bool(self.causal_steps) and step <= self.causal_steps
        seen = snapshot(model, self.ids_RS, causal=causal, rule=DEFAULT, given=self.given).as_rows()
        self.grow(*({"step": step, "causal": causal, **row} for row in seen))
        if self.log is not None and state.is_world_process_zero:
            numbers = {said: seen[0][name] for name, said in SUMMARY.items()}
            self.log({said: value for said, value in numbers.items() if math.isfinite(value)})


def _is_sharded(model: nn.Module) -> bool:
    """Whether the weights are spread over processes (FSDP): none can run the model alone."""
    for parameter in model.parameters():
        # under FSDP2
        if isinstance(parameter, DTensor):
            return True
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
