"""The history of a training run: losses and speed at each step logged, and when a run must stop."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sinklab.training.checkpoints import HISTORY_FILE, named_checkpoint

COLUMNS = ("step", "tokens", "loss", "heldout_loss", "lr", "grad_norm", "tokens_per_second", "seconds")
RECENT = 20
"""Logged losses whose median a spike is measured against."""
FEWEST = 5
"""Logged losses before a spike can be detected."""


class History(TrainerCallback):
    """Collects what the Trainer logs, keeps it in each checkpoint, and stops a run whose loss is not finite or spikes.

    Args:
        tokens_per_step: tokens in an optimizer step, over all processes.
        earlier: rows of the run that this one resumes.
        say: called with a line at each row.
        spike: stop when a loss is more than so many times the median of the last 20; 0 is never.
        begins: steps before which losses do not compare with later ones: the end of warm-up, of the causal phase, ….
    """

    def __init__(
        self,
        tokens_per_step: int,
        earlier: Iterable[dict[str, Any]] = (),
        say: Callable[[str], object] | None = None,
        *,
        spike: float = 0.0,
        begins: Iterable[int] = (),
    ) -> None:
        self.say = say or (lambda text: None)
        self.rows: list[dict[str, Any]] = list(earlier)
        self.tokens_per_step = tokens_per_step
        self.spike, self.begins = spike, sorted(begins)
        self.started = time.perf_counter() - (self.rows[-1]["seconds"] if self.rows else 0.0)
        self._first, self._since = 0, time.perf_counter()
        self._clock, self._busy, self._steps = self._since, 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Where this session starts, to tell how long the rest will take."""
        self._first, self._since = state.global_step, time.perf_counter()
        self._clock = self._since
        # a resumed state would bring back the intervals of the session that wrote it
        state.logging_steps, state.eval_steps, state.save_steps = args.logging_steps, args.eval_steps, args.save_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the time of training itself, without measuring and saving."""
        now = time.perf_counter()
        self._busy, self._clock, self._steps = self._busy + now - self._clock, now, self._steps + 1

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The time of measuring is none of training."""
        self._clock = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The time of saving is none of training."""
        self._clock = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Keep losses and learning rates with the step and the tokens seen.

        Raises:
            ValueError: if a loss is not finite, or spikes.
        """
        logs = logs or {}
        if "loss" not in logs and "eval_loss" not in logs:
            return
        self._refuse_no_number(args, state, logs)
        self._refuse_spike(args, state, logs)
        values = (
            state.global_step,
            state.global_step * self.tokens_per_step,
            logs.get("loss", math.nan),
            logs.get("eval_loss", math.nan),
            logs.get("learning_rate", math.nan),
            logs.get("grad_norm", math.nan),
            self._speed() if "loss" in logs else math.nan,
            round(time.perf_counter() - self.started, 1),
        )
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        held = f", held out {logs['eval_loss']:.3f}" if "eval_loss" in logs else ""
        loss = f", loss {logs['loss']:.3f}" if "loss" in logs else ""
        self.say(f"step {state.global_step} of {state.max_steps}{loss}{held}{self._left(state)}")

    def _speed(self) -> float:
        speed = self._steps * self.tokens_per_step / self._busy if self._busy else math.nan
        self._busy, self._steps = 0.0, 0
        return speed

    def _refuse_no_number(self, args: Any, state: Any, logs: dict[str, float]) -> None:
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise ValueError(
                    f"the loss must stay finite, but {name} is {logs[name]} at step {state.global_step}; lower lr "
                    f"({args.learning_rate}) and start again, or resume from {named_checkpoint(args.output_dir)}"
                )

    def _refuse_spike(self, args: Any, state: Any, logs: dict[str, float]) -> None:
        if not self.spike or "loss" not in logs:
            return
        begin = max((step for step in self.begins if step < state.global_step), default=0)
        # rows of checkpoints of an older version may lack keys; a mean over steps before `begin` is another quantity
        before = [row["loss"] for row in self.rows if row["step"] > begin and not math.isnan(row["loss"])][-RECENT:]
        if len(before) < FEWEST or state.global_step <= begin:
            return
        median = statistics.median(before)
        if logs["loss"] > self.spike * median:
            raise ValueError(
                f"the loss must not spike, but at step {state.global_step} it is {logs['loss']:.4g}, more than "
                f"{self.spike:g} times the median of the last {len(before)} logged ({median:.4g}), at lr "
                f"{logs.get('learning_rate', math.nan):.3g}; lower lr or resume from "
                f"{named_checkpoint(args.output_dir)} with --resume, or raise --spike (0: never stop)"
            )

    def _left(self, state: Any) -> str:
        done = state.global_step - self._first
        if not done or state.global_step >= state.max_steps:
            return ""
        minutes = (time.perf_counter() - self._since) / done * (state.max_steps - state.global_step) / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"

    def save(self, checkpoint: Path) -> None:
        """Write the rows so far into a checkpoint."""
        (checkpoint / HISTORY_FILE).write_text(json.dumps(self.rows))

    def columns(self) -> dict[str, list[Any]]:
        """The rows as columns of the table ``history``."""
        return {key: [row.get(key, math.nan) for row in self.rows] for key in COLUMNS}


def earlier_rows(checkpoint: Path | None) -> list[dict[str, Any]]:
    """The rows that a checkpoint keeps.

    Raises:
        ValueError: if they are damaged.
    """
    if checkpoint is None:
        return []
    try:
        rows = json.loads((checkpoint / HISTORY_FILE).read_text())
        return [dict(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{checkpoint / HISTORY_FILE} is damaged ({error}); remove {checkpoint} to resume from the one before it"
        ) from error
