"""The sink monitor: while a model trains, where its attention goes on fixed held-out text."""

# R rows, S sequence
from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from sinklab.records.storage import write_beside
from sinklab.sinks.rules import DEFAULT, Rule
from sinklab.training.snapshots import MEASURES, snapshot

MONITOR_FILE = "monitor.json"
COLUMNS = ("step", "causal", "layer", "added", "even_share", *MEASURES)
SUMMARY = {"sink_share": "sink/share", "main_added": "sink/main", "mobility": "sink/mobility"}
SUMMARY |= {"text_sinks": "sink/text_sinks", "activation_ratio": "sink/activation_ratio"}


class SinkMonitor(TrainerCallback):
    """Takes a :func:`~sinklab.training.snapshots` at step 0, every so many steps and at the end, and keeps it in
    checkpoints. It leaves training as it is, to the bit.

    Args:
        ids_RS: held-out text, rows without padding; ``rows`` of them, evenly spaced, are measured.
        every: steps between two measurements.
        rows: how many rows.
        earlier: rows of the run that is gone on from (:func:`monitored`).
        seed: of the masks.
        causal_steps: until this step the model is a causal one and is measured as one.
        rule: what counts as a sink.
        log: called with a few numbers of each measurement, by name (``sink/share``): the Trainer's own ``log``.

    Raises:
        ValueError: for a number below 1 or no text.
    """

    def __init__(
        self,
        ids_RS: Tensor,
        *,
        every: int,
        rows: int = 8,
        earlier: Iterable[dict[str, Any]] = (),
        seed: int = 0,
        causal_steps: int = 0,
        rule: Rule = DEFAULT,
        log: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        if every < 1 or rows < 1 or not len(ids_RS):
            raise ValueError(
                f"the sink monitor needs held-out rows and a number of steps between two measurements, but got "
                f"{len(ids_RS)} rows, of which to read {rows}, and every={every}; set monitor_every to 0 for no monitor"
            )
        self.ids_RS = ids_RS[:: max(1, len(ids_RS) // rows)][:rows]
        self.every, self.seed, self.causal_steps, self.rule, self.log = every, seed, causal_steps, rule, log
        self.rows: list[dict[str, Any]] = list(earlier)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Measure the model before its first step."""
        if state.global_step == 0:
            self.look(model, state)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Measure after every `every` steps."""
        if state.global_step % self.every == 0:
            self.look(model, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Measure the final model."""
        self.look(model, state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the rows so far in the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.save(folder)

    def look(self, model: nn.Module, state: Any) -> None:
        """Measure now, unless this step was measured already."""
        step = state.global_step
        if any(row["step"] == step for row in self.rows):
            return
        # a process alone cannot run a model whose weights are spread over all; otherwise the others need not work
        if not state.is_world_process_zero and not _is_sharded(model):
            return
        # the model of step n has taken steps 0 … n-1
        causal = bool(self.causal_steps) and step <= self.causal_steps
        seen = snapshot(model, self.ids_RS, seed=self.seed, causal=causal, rule=self.rule).as_rows()
        self.rows += [{"step": step, "causal": causal, **row} for row in seen]
        if self.log is not None and state.is_world_process_zero:
            self.log({said: seen[0][name] for name, said in SUMMARY.items() if math.isfinite(seen[0][name])})

    def save(self, folder: Path) -> None:
        """Write the rows so far into a checkpoint."""
        write_beside(folder / MONITOR_FILE, lambda part: part.write_text(json.dumps(self.rows)))

    def columns(self) -> dict[str, list[Any]]:
        """The rows as columns of the table ``monitor``."""
        return {name: [row[name] for row in self.rows] for name in COLUMNS}


def monitored(checkpoint: Path) -> list[dict[str, Any]]:
    """The rows that a checkpoint keeps; none where it keeps none."""
    path = checkpoint / MONITOR_FILE
    return json.loads(path.read_text()) if path.exists() else []


def _is_sharded(model: nn.Module) -> bool:
    """Whether the weights are spread over processes (FSDP, ZeRO-3), so that none can run the model alone."""
    # DeepSpeed's mark of a parameter of which each process holds a part
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return True
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
