"""The masked-diffusion and next-token objectives on `transformers.Trainer`."""

# B batch, S sequence, R held-out rows
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer

from sinklab.training.checkpoints import prune, refuse_broken_weights, write_checkpoint, write_position
from sinklab.training.heldout import HeldOut
from sinklab.training.objective import Phases, asked_causally, causal_call, diffusion_call, sight


@dataclass(frozen=True)
class Objective:
    """What the model is asked, and how its head is run."""

    phases: Phases
    mask_id: int
    shifted: bool
    """The model moves its outputs by one itself (``logit_shift``)."""
    batch: int
    """Rows of an optimizer step, over all processes."""
    head_chunk: int = 4096
    liger: bool | None = None

    def call(self, batch: dict[str, Tensor], step: int, tokens: Tensor | float) -> dict[str, Any]:
        """Arguments of the model for a micro-batch of this step with ``tokens`` tokens in its loss."""
        if self.phases.is_causal(step):
            asked = causal_call(batch, tokens, shifted=self.shifted)
        else:
            asked = diffusion_call(batch, self.mask_id, tokens)
        seen = sight(batch, self.phases.visible(step, batch["input_ids"].shape[1]))
        return asked | seen | {"head_chunk": self.head_chunk, "liger": self.liger}

    def tokens(self, batch: dict[str, Tensor], step: int) -> Tensor | None:
        """Tokens that count in the loss of this micro-batch; None when every row has the same number."""
        causal = self.phases.is_causal(step)
        if "maskable" not in batch and not (causal and "documents" in batch):
            return None
        return (asked_causally(batch) if causal else batch["maskable"]).sum()


class DiffusionTrainer(Trainer):
    """`transformers.Trainer` whose loss is the masked-diffusion (or next-token) objective.

    The gradient is that of the mean over all tokens of an optimizer step: it does not depend on micro-batches or ranks.
    Rows come in the order of the dataset. Checkpoints appear under their names when they are whole.
    """

    def __init__(self, *args: Any, objective: Objective, heldout: HeldOut, keep: int = 2, **kwargs: Any) -> None:
        kwargs["eval_dataset"] = heldout.rows
        super().__init__(*args, **kwargs)
        self.objective: Objective = objective
        self.heldout, self.keep = heldout, keep
        self.cursor: list[int] | None = None
        """Of a stream: where it may go on after the last row that was consumed."""
        self._tokens: Tensor | float = 1.0
        self._writing: Path | None = None

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple[list, None]:
        """The micro-batches of an optimizer step; tokens in its loss are counted over all processes."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples:
            self._tokens = self._counted(samples)
            if "cursor" in samples[-1]:
                self.cursor = samples[-1]["cursor"][-1].tolist()
        return samples, None

    def _counted(self, samples: list[dict[str, Tensor]]) -> Tensor | float:
        step = self.state.global_step
        counts = [self.objective.tokens(sample, step) for sample in samples]
        if any(count is None for count in counts):
            length = samples[0]["input_ids"].shape[1]
            return float(self.objective.batch * (length - self.objective.phases.is_causal(step)))
        here = torch.stack([count for count in counts if count is not None]).sum().to(self.args.device)
        return self.accelerator.reduce(here, reduction="sum")

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This micro-batch's share of the loss of its step, scaled for what the Trainer does with it."""
        call = self.objective.call(inputs, self.state.global_step, self._tokens)
        out = model(**call)
        # the Trainer divides by the micro-batches, and gradients are averaged over processes
        loss = out.loss * self.current_gradient_accumulation_steps * self.accelerator.num_processes
        return (loss, out) if return_outputs else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Held-out loss under fixed noise."""
        metrics = {f"{metric_key_prefix}_loss": self.heldout_losses()["loss"]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def note(self, values: dict[str, float]) -> None:
        """Tell the trackers something besides the losses, without taking the turn of the log of this step."""
        due = self.control.should_log
        self.log(values)
        self.control.should_log = due

    def heldout_losses(self) -> dict[str, Any]:
        """``loss`` (nats per token) and, per held-out row, ``losses`` (R,) and the ``tokens`` (R,) that they count."""
        model = self.model_wrapped
        model.eval()
        causal = self.objective.phases.autoregressive
        return self.heldout.measure(model, self.accelerator, causal=causal, shifted=self.objective.shifted)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The order is in the dataset."""
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return None if isinstance(dataset, torch.utils.data.IterableDataset) else SequentialSampler(dataset)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Everything but norms, biases and sinks decays."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.rpartition(".")[2].startswith("sink_")]

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writing or self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        root, step = Path(str(self.args.output_dir)), self.state.global_step
        whole: Any = self.model
        refuse_broken_weights(whole, step, root)

        def fill(folder: Path) -> None:
            self._writing = folder.parent
            try:
                super(DiffusionTrainer, self)._save_checkpoint(model, trial)
            finally:
                self._writing = None
            self.save_position(folder)

        first = self.is_world_process_zero()
        write_checkpoint(root, step, fill, first=first, wait=self.accelerator.wait_for_everyone)
        if first:
            prune(root, self.keep)

    def save_position(self, folder: Path) -> None:
        """Add to a checkpoint what the Trainer does not know: where the stream was, and what callbacks keep."""
        if not self.is_world_process_zero():
            return
        if self.cursor is not None:
            write_position(folder, self.state.global_step * self.objective.batch, self.cursor)
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "save"):
                callback.save(folder)
