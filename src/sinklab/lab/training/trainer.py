"""The masked-diffusion and next-token objectives on `transformers.Trainer`.

Noise belongs to a row of the run: it is the same on every rank, in every micro-batch, before and
after a restart.
"""

# B batch, S sequence, R rows (of the run or held out), M masked positions (row-major), V vocabulary
import math
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, SequentialSampler, default_collate
from transformers import Trainer

from sinklab.core.subject.head import IGNORE_INDEX
from sinklab.core.subject.sinks import sink_of
from sinklab.lab.data.noise import sample_times
from sinklab.lab.data.rows import Rows, place_generator

MEASURED_TOKENS = 4096
"""Tokens of held-out rows that are measured at a time."""
NEVER = 2**62
"""A step that no run reaches."""
# purpose of a draw: neighbouring places of different kinds must not share a generator
_TIME, _MASK, _STEP_TIMES = range(3)


def row_times(seed: int, rows_B: Tensor, batch: int, sampler: str) -> Tensor:
    """Diffusion times (B, 1) of each row of the run.

    Args:
        seed: of the run.
        rows_B: ordinals of the rows; row n belongs to step n // batch.
        batch: rows of an optimizer step, over all ranks.
        sampler: ``iid`` draws from (seed, row) alone; ``low_discrepancy`` spreads the rows of a
            step evenly, drawing from (seed, step) and the row's place in its step.

    Raises:
        ValueError: if the sampler is unknown or ``batch`` < 1.
    """
    if sampler == "iid":
        drawn = [
            sample_times(1, generator=place_generator(seed, _TIME, row)) for row in rows_B.tolist()
        ]
        return torch.stack(drawn)
    steps: dict[int, Tensor] = {}
    for step in {row // batch for row in rows_B.tolist()}:
        generator = place_generator(seed, _STEP_TIMES, step)
        steps[step] = sample_times(batch, sampler=sampler, generator=generator)[:, None]
    return torch.stack([steps[row // batch][row % batch] for row in rows_B.tolist()])


def row_masks(seed: int, rows_B: Tensor, t_BS: Tensor) -> Tensor:
    """Masks that `corrupt` draws in each row under a generator of
    (seed, row), bool (B, S).
    """
    drawn = [
        torch.rand(t_BS.shape[1], generator=place_generator(seed, _MASK, row))
        for row in rows_B.tolist()
    ]
    return torch.stack(drawn) < t_BS


@dataclass(frozen=True)
class NoisyCollator:
    """Rows of the run to a batch with its noise: adds ``t`` and ``masked`` (B, S), drawn by the
    process that loads the data.

    No noise is drawn for rows of the first ``clean_steps`` steps, which are spent as a causal
    language model.
    """

    seed: int
    batch: int
    sampler: str
    clean_steps: int = 0

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        """The batch."""
        batch = default_collate(rows)
        rows_B = batch["row"]
        if int(rows_B[0]) // self.batch < self.clean_steps:
            return batch
        t_B1 = row_times(self.seed, rows_B, self.batch, self.sampler)
        t_BS = t_B1.expand(batch["input_ids"].shape)
        masked_BS = row_masks(self.seed, rows_B, t_BS)
        if "maskable" in batch:
            masked_BS &= batch["maskable"]
        return batch | {"t": t_BS, "masked": masked_BS}


def maskable(batch: Mapping[str, Tensor]) -> Tensor:
    """Bool (B, S): tokens that noise may mask."""
    if "maskable" in batch:
        return batch["maskable"]
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)


def asked_causally(batch: Mapping[str, Tensor]) -> Tensor:
    """Bool (B, S): tokens that have a predecessor to be predicted from."""
    asked_BS = maskable(batch).clone()
    asked_BS[:, 0] = False
    return asked_BS


@dataclass(frozen=True)
class Objective:
    """Loss that the model is trained on, and how its head is run."""

    causal_steps: int
    """Steps before this one train a causal language model; `NEVER` for every step."""
    mask_id: int
    shifted: bool
    """The model moves its outputs by one itself (``logit_shift``)."""
    in_blocks: bool = False
    """Attention is in blocks: each is denoised behind the clean ones before it."""

    def targets(
        self, batch: Mapping[str, Tensor], step: int, tokens: Tensor | float
    ) -> dict[str, Any]:
        """Arguments that define this micro-batch's share of the loss of a step.

        It is the mean cross-entropy over ``tokens`` predicted tokens if the step is causal, else
        the masked-token loss (Eq. 3–4 of «One Token Is Enough»): Σ 1 / (t · tokens) · cross-entropy
        over the masks.
        """
        ids_BS = batch["input_ids"]
        call: dict[str, Any] = {}
        if "attention_mask" in batch:
            call["attention_mask"] = batch["attention_mask"]
        if step < self.causal_steps:
            labels_BS = ids_BS.masked_fill(~asked_causally(batch), IGNORE_INDEX)
            if not self.shifted:
                labels_BS = F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)
            weights_BS = torch.ones(ids_BS.shape, device=ids_BS.device) / tokens
            call |= {"input_ids": ids_BS, "causal": True}
        else:
            masked_BS = batch["masked"]
            labels_BS = ids_BS.masked_fill(~masked_BS, IGNORE_INDEX)
            weights_BS = 1 / (batch["t"].float() * tokens)
            call["input_ids"] = ids_BS.masked_fill(masked_BS, self.mask_id)
            if self.in_blocks:
                call["clean"] = ids_BS
        return call | {"labels": labels_BS, "label_weights": weights_BS}

    def counted(self, batch: Mapping[str, Tensor], step: int) -> Tensor:
        """Bool (B, S): tokens that count in the mean of the loss."""
        if step < self.causal_steps:
            return asked_causally(batch)
        return maskable(batch)


def _ignore_signals(worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


NOISE_SEED = 0
"""Seed of held-out noise: not the run's own, so that runs of different seeds compare."""


class DiffusionTrainer(Trainer):
    """`transformers.Trainer` with the masked-diffusion (or next-token) objective as its loss.

    The gradient is that of the mean over all tokens of an optimizer step: it does not depend on
    micro-batches or ranks. Rows come in the order of the dataset.
    """

    def __init__(
        self,
        *args: Any,
        objective: Objective,
        heldout: Rows,
        together: int,
        **kwargs: Any,
    ) -> None:
        kwargs["eval_dataset"] = heldout
        super().__init__(*args, **kwargs)
        self.objective: Objective = objective
        self.heldout = heldout
        self.together = together
        self.cursor: list[int] | None = None
        """Cursor of a stream after the last row that was consumed."""
        self._tokens: Tensor | float = 1.0

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: Any
    ) -> tuple[list, None]:
        """The micro-batches of an optimizer step; tokens in its loss are counted over all
        processes.
        """
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples:
            step = self.state.global_step
            counted = [self.objective.counted(sample, step).sum() for sample in samples]
            here = torch.stack(counted).sum().to(self.args.device)
            self._tokens = self.accelerator.reduce(here, reduction="sum")
            if "cursor" in samples[-1]:
                self.cursor = samples[-1]["cursor"][-1].tolist()
        return samples, None

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """This micro-batch's share of the loss of its step, scaled to undo the Trainer's own
        division.
        """
        out = model(**self.objective.targets(inputs, self.state.global_step, self._tokens))
        # the Trainer divides by the micro-batches, and gradients are averaged over processes
        loss = out.loss * self.current_gradient_accumulation_steps * self.accelerator.num_processes
        if return_outputs:
            return loss, out
        return loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Held-out loss under fixed noise."""
        metrics = {f"{metric_key_prefix}_loss": self.heldout_losses()["loss"]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    @cached_property
    def _measured(self) -> dict[str, Tensor]:
        """The held-out rows with their noise, evenly spread times."""
        collator = NoisyCollator(NOISE_SEED, len(self.heldout), "low_discrepancy")
        return collator([self.heldout[number] for number in range(len(self.heldout))])

    @torch.no_grad()
    def heldout_losses(self) -> dict[str, Any]:
        """``loss``: nats per token over all held-out rows; ``losses`` (R,) float64: of each row,
        under the objective of the last phase; ``tokens`` (R,): number of tokens in each row's mean.

        Every process works on its share; all get the whole result.
        """
        self.model_wrapped.eval()
        count = len(self.heldout)
        device = self.accelerator.device
        ranks = self.accelerator.num_processes
        rank = self.accelerator.process_index
        sums_R = torch.zeros(count, dtype=torch.float64)
        for turn in range(math.ceil(count / (self.together * ranks))):
            first = (turn * ranks + rank) * self.together
            # the last group is filled up with repeated rows: one shape to compile, one number of
            # calls on each rank
            places = [min(first + number, count - 1) for number in range(self.together)]
            batch = {name: part[places].to(device) for name, part in self._measured.items()}
            sums_B = self._sums(batch).to(sums_R)
            own = max(0, min(self.together, count - first))
            sums_R[first : first + own] = sums_B[:own]
        sums_R = self.accelerator.reduce(sums_R.to(device), reduction="sum").cpu()
        tokens_R = self.objective.counted(self._measured, NEVER - 1).sum(dim=1)
        return {
            "loss": (sums_R.sum() / tokens_R.sum()).item(),
            "losses": sums_R / tokens_R,
            "tokens": tokens_R,
        }

    def _sums(self, batch: dict[str, Tensor]) -> Tensor:
        """Weighted cross-entropy of each row (B,)."""
        call = self.objective.targets(batch, NEVER - 1, 1.0)
        labels_BS = call.pop("labels")
        weights_BS = call.pop("label_weights")
        asked_BS = labels_BS != IGNORE_INDEX
        logits_MV = self.model_wrapped(**call, logits_to_keep=asked_BS).logits
        losses_M = F.cross_entropy(logits_MV.float(), labels_BS[asked_BS], reduction="none")
        weighted_M = losses_M * weights_BS[asked_BS].to(losses_M)
        return losses_M.new_zeros(len(labels_BS)).index_add(0, asked_BS.nonzero()[:, 0], weighted_M)

    def get_train_dataloader(self) -> DataLoader:
        """The Trainer's; Ctrl-C and a scheduler's SIGTERM reach its workers too, which must read
        on until the step is done.
        """
        loader: Any = super().get_train_dataloader()
        # rows and their noise follow from their numbers: a worker has nothing else to begin with
        getattr(loader, "base_dataloader", loader).worker_init_fn = _ignore_signals
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The order is in the dataset."""
        dataset: Any = train_dataset
        if dataset is None:
            dataset = self.train_dataset
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return None
        return SequentialSampler(dataset)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Names of the parameters that decay: all but norms and biases, and the sink if its kind
        says so.
        """
        whole: Any = self.model
        names = super().get_decay_parameter_names(model)
        sink = sink_of(whole.config)
        if sink is None or sink.weight_decay:
            return names
        return [name for name in names if name.rpartition(".")[2] not in sink.tensors]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint, whose state has the place in the stream."""
        if self.cursor is not None:
            place: Any = {"step": self.state.global_step, "cursor": self.cursor}
            self.state.log_history.append(place)
        super()._save_checkpoint(model, trial)
