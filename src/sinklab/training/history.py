"""What a training run leaves behind while it runs: its history, and checkpoints that can be gone on from."""

# R rows, S sequence
from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback

from sinklab.records import open_run, write_beside

HISTORY_FILE = "history.json"
COLUMNS = ("step", "tokens", "loss", "heldout_loss", "lr", "grad_norm", "seconds")
# what may differ between a run and its continuation: how it runs and what it reports, not what it learns from;
# compilation and thread counts may change the last bits
FREE = frozenset({"resume", "threads", "compile", "log_every", "eval_every", "save_every", "out"})


class History(TrainerCallback):
    """Collects what the Trainer logs, keeps it in each checkpoint, and stops a run whose loss is no number."""

    def __init__(
        self, tokens_per_step: int, earlier: Iterable[dict[str, Any]] = (), say: Callable[[str], object] | None = None
    ) -> None:
        self.say = say or (lambda text: None)
        self.rows: list[dict[str, Any]] = list(earlier)
        self.tokens_per_step = tokens_per_step
        self._first, self._since = 0, time.perf_counter()
        self.started = time.perf_counter() - (self.rows[-1]["seconds"] if self.rows else 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Keep losses and learning rates with the step and the tokens seen.

        Raises:
            ValueError: if a loss is not finite.
        """
        logs = logs or {}
        if "loss" not in logs and "eval_loss" not in logs:
            return
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise ValueError(
                    f"the loss must stay finite, but {name} is {logs[name]} at step {state.global_step}; lower lr "
                    f"({args.learning_rate}) and start again"
                )
        values = (
            state.global_step,
            state.global_step * self.tokens_per_step,
            logs.get("loss", math.nan),
            logs.get("eval_loss", math.nan),
            logs.get("learning_rate", math.nan),
            logs.get("grad_norm", math.nan),
            round(time.perf_counter() - self.started, 1),
        )
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        held = f", held out {logs['eval_loss']:.3f}" if "eval_loss" in logs else ""
        loss = f", loss {logs['loss']:.3f}" if "loss" in logs else ""
        self.say(f"step {state.global_step} of {state.max_steps}{loss}{held}{self._left(state)}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Where this session starts, to tell how long the rest will take."""
        self._first, self._since = state.global_step, time.perf_counter()

    def _left(self, state: Any) -> str:
        done = state.global_step - self._first
        if not done or state.global_step >= state.max_steps:
            return ""
        minutes = (time.perf_counter() - self._since) / done * (state.max_steps - state.global_step) / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the rows so far beside the weights. This file comes last: a checkpoint that has it is whole."""
        target = Path(args.output_dir) / f"checkpoint-{state.global_step}" / HISTORY_FILE
        write_beside(target, lambda part: part.write_text(json.dumps(self.rows)))

    def columns(self) -> dict[str, list[Any]]:
        """The rows as columns of the table ``history``."""
        return {key: [row[key] for row in self.rows] for key in COLUMNS}


def data_hash(tokenizer: PreTrainedTokenizerBase, *rows: Tensor) -> str:
    """SHA-256 of the vocabulary and the packed rows: what a run learned from."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for ids_RS in rows:
        digest.update(json.dumps(list(ids_RS.shape)).encode() + ids_RS.long().contiguous().numpy().tobytes())
    return digest.hexdigest()


def same_data(folder: Path, data: str) -> None:
    """Refuse to go on from a run that learned from other text.

    Raises:
        ValueError: if the run in ``folder`` recorded another hash than ``data``.
    """
    before = open_run(folder).info.model.get("data_sha256", data)
    if before != data:
        raise ValueError(
            f"a resumed run must keep its data, but the corpus, the held-out text or the tokenizer of {folder} has "
            "changed since; restore them or start a new run"
        )


def newest_checkpoint(folder: Path, settings: Mapping[str, Any]) -> Path:
    """The newest whole checkpoint of the run in ``folder``, to go on from with ``settings``.

    Raises:
        ValueError: if there is none, ``run.json`` is missing or damaged, or a setting that matters has changed.
    """
    found = [path.parent for path in folder.glob(f"checkpoints/checkpoint-*/{HISTORY_FILE}")]
    if not found:
        raise ValueError(f"nothing to resume: {folder} has no checkpoint; leave out --resume")
    before = open_run(folder).info.settings
    now = json.loads(json.dumps(settings))
    changed = [
        f"{key}: {before.get(key)!r} → {now[key]!r}" for key in now if key not in FREE and before.get(key) != now[key]
    ]
    if changed:
        raise ValueError(
            f"a resumed run must keep its settings, but these changed: {', '.join(changed)}; start a new run instead"
        )
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]))
