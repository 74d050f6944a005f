"""Losses, speed and sinks of a model in training, and the end of a run by a signal.

Rows stand in the Trainer's own state, which every checkpoint has: a run that goes on has the tables
of an uninterrupted one.
"""

# R rows, S sequence
import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import TrainerCallback

from sinklab.lab.data.rows import spread
from sinklab.lab.files import Terminated
from sinklab.lab.training.checkpoints import newest
from sinklab.lab.training.monitor import MEASURES, measured

HISTORY = {
    "step": "step",
    "tokens": "tokens",
    "loss": "loss",
    "heldout_loss": "eval_loss",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
    "seconds": "seconds",
}
"""Columns of the history -> their names in the Trainer's log."""
MONITOR = ("step", "causal", "layer", "added", "even_share", *MEASURES)
"""Columns of the monitor."""


@dataclass(frozen=True)
class Monitor:
    """What the sink monitor measures, and when: at step 0, every so many steps, and at the end."""

    ids_RS: Tensor
    """Held-out text, rows without padding; eight of them, evenly spaced, are measured."""
    every: int
    causal_steps: int = 0
    """Until this step the model is a causal one and is measured as one."""
    given: int = 0
    """Tokens at the head of each row that are never masked."""

    def rows(self, model: nn.Module, step: int) -> list[dict[str, Any]]:
        """The measures of a model that has taken so many steps: of all layers, and of each."""
        causal = bool(self.causal_steps) and step <= self.causal_steps
        ids_RS = self.ids_RS[spread(len(self.ids_RS), 8)]
        found = measured(model, ids_RS, causal=causal, given=self.given)
        return [{"step": step, "causal": causal, **row} for row in found]


class Recorder(TrainerCallback):
    """Makes the tables ``history`` and ``monitor``, and stops a run whose loss is not finite.

    Args:
        tokens: in an optimizer step, over all processes.
        say: called with a line at each row of the history.
        monitor: None for a run without.
    """

    def __init__(
        self,
        tokens: int,
        say: Callable[[str], object],
        monitor: Monitor | None = None,
    ) -> None:
        self.tokens = tokens
        self.monitor = monitor
        self.write: Callable[[str, Mapping[str, list[Any]]], object] | None = None
        """Called with a table and its columns whenever it has grown."""
        self.count: Callable[[float, float], object] | None = None
        """Called with the steps done and all steps."""
        self._say = say
        self._started = time.perf_counter()

    def _grown(self, state: Any) -> None:
        """Write the tables; a disk that is full is no reason to stop here: checkpoints say so."""
        if self.write is None:
            return
        log = state.log_history
        lines = [row for row in log if "loss" in row or "eval_loss" in row]
        tables = {
            "history": {
                name: [row.get(said, math.nan) for row in lines] for name, said in HISTORY.items()
            }
        }
        if self.monitor is not None:
            looks = [row for look in log for row in look.get("monitor", ())]
            tables["monitor"] = {name: [row[name] for row in looks] for name in MONITOR}
        with contextlib.suppress(OSError):
            for name, columns in tables.items():
                self.write(name, columns)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Take the rows of the run that goes on; measure a model before its first step."""
        self._started -= max((row.get("seconds", 0.0) for row in state.log_history), default=0.0)
        # a resumed state would bring back the intervals of the session that wrote it
        state.logging_steps = args.logging_steps
        state.eval_steps = args.eval_steps
        state.save_steps = args.save_steps
        if self.count is not None:
            self.count(state.global_step, state.max_steps)
        if state.global_step == 0:
            self.look(model, state)
        self._grown(state)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Count the step, and look where it is time, and at the end."""
        if self.count is not None:
            self.count(state.global_step, state.max_steps)
        if self.monitor is not None and (
            state.global_step % self.monitor.every == 0 or state.global_step >= state.max_steps
        ):
            self.look(model, state)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Keep the tokens seen and the time beside losses and learning rates.

        Raises:
            ValueError: if a loss is not finite.
        """
        row = state.log_history[-1]
        if "loss" not in row and "eval_loss" not in row:
            return
        for name in ("loss", "eval_loss"):
            if not math.isfinite(row.get(name, 0.0)):
                state.log_history.pop()
                raise ValueError(
                    f"the loss must stay finite, but {name} is {row[name]} at step "
                    f"{state.global_step}; lower lr ({args.learning_rate}) in another folder, "
                    f"or go on from {newest(Path(args.output_dir).parent) or 'the beginning'}"
                )
        row["tokens"] = state.global_step * self.tokens
        row["seconds"] = round(time.perf_counter() - self._started, 1)
        line = f"step {state.global_step} of {state.max_steps}"
        if "loss" in row:
            line += f", loss {row['loss']:.3f}"
        if "eval_loss" in row:
            line += f", held out {row['eval_loss']:.3f}"
        self._grown(state)
        self._say(line)

    def look(self, model: nn.Module, state: Any) -> None:
        """Measure the sinks now, unless this step was measured already."""
        step = state.global_step
        looks = [one["step"] for one in state.log_history if "monitor" in one]
        if self.monitor is None or step in looks:
            return
        if state.is_world_process_zero:
            rows = self.monitor.rows(model, step)
            state.log_history.append({"step": step, "monitor": rows})
            self._grown(state)


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
