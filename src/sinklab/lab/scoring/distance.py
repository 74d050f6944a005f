"""Distance between the text of a model under edits and its text without them: in free runs, and at
a fixed order.

Distance of outputs is not quality: a text may be another one and as good (arXiv 2605.09313 keeps
the two apart).
"""

# B batch, S positions, N new tokens, M committed tokens of a step (row-major), V vocabulary
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.probing import Dose, Intervention, InterventionLog, RemovalRecord, intervene
from sinklab.lab.scoring.writing import ContinuingWriter, Writing, WritingStep, needs_clean_pass


@dataclass(frozen=True)
class Distance:
    """Changes of some texts by edits, by row of the batch."""

    agreement_B: Tensor
    """Share of the clean text's tokens that the edited run, left to itself, wrote at the same
    place.
    """
    kl_B: Tensor
    """Nats from the clean distribution of a token to the edited one, mean over the tokens of the
    text, each at the step and on the canvas at which the clean run committed it."""
    same_B: Tensor
    """Share of these tokens that is the likeliest one under the edits, too, on the same
    canvases.
    """
    texts: tuple[tuple[int, ...], ...]
    """Texts of the edited run."""
    removals: tuple[RemovalRecord, ...]
    """Removals by the edits in the free run."""

    def dose(self, row: int) -> Dose:
        """Dose of one text."""
        return Dose.of(self.removals, torch.arange(len(self.texts)) == row)


@torch.inference_mode()
def output_distances(texts: Writing, arms: Sequence[Sequence[Intervention]]) -> list[Distance]:
    """The texts written without edits (those of `texts` are left out), then once under each set of
    edits.

    Both runs have the same seed, so that they are paired. On the clean run's canvases edits choose
    as they do while writing: a closed loop removes at each step the keys chosen at the one before.

    Raises:
        ValueError: for guidance or a cache: a canvas alone does not repeat their evaluations.
    """
    settings = texts.settings
    if settings.cfg_scale or settings.cache != "none":
        raise ValueError(
            "a distance at fixed order evaluates the canvases of a run without guidance and cache, "
            f"but cfg_scale is {settings.cfg_scale} and cache {settings.cache!r}; leave them out"
        )
    steps, written, _ = _written(replace(texts, edits=()))
    clean_MV = _at_fixed_order(texts, steps, written, ())
    rows_M = torch.cat([_committed(step).nonzero()[:, 0].cpu() for step in steps])
    found = []
    for edits in arms:
        _, others, log = _written(replace(texts, edits=tuple(edits)))
        edited_MV = _at_fixed_order(texts, steps, written, edits)
        kl_M = torch.nn.functional.kl_div(
            edited_MV, clean_MV, reduction="none", log_target=True
        ).nansum(-1)
        same_M = (edited_MV.argmax(-1) == clean_MV.argmax(-1)).double()
        shares = [
            sum(a == b for a, b in zip(one, other, strict=False)) / max(len(one), 1)
            for one, other in zip(written, others, strict=True)
        ]
        agreement_B = torch.tensor(shares, dtype=torch.float64)
        kl_B, same_B = (_mean_by_row(values_M, rows_M, len(written)) for values_M in (kl_M, same_M))
        found.append(
            Distance(agreement_B, kl_B, same_B, tuple(map(tuple, others)), tuple(log.removals))
        )
    return found


def _written(texts: Writing) -> tuple[list[WritingStep], list[list[int]], InterventionLog]:
    with texts.begin() as writer:
        steps = [*writer.steps()]
        return steps, [writer.row(row) for row in range(len(texts.requests))], writer.log


def _committed(step: WritingStep) -> Tensor:
    """Positions that a step wrote, bool (B, S); the next one of an autoregressive text."""
    if step.after_BS.shape[1] > step.before_BS.shape[1]:
        return step.active_B[:, None]
    return step.before_BS != step.after_BS


def _at_fixed_order(
    texts: Writing,
    steps: Sequence[WritingStep],
    written: Sequence[Sequence[int]],
    edits: Sequence[Intervention],
) -> Tensor:
    """Log-probabilities (M, V) of every token when it was committed, on the CPU, float32 or
    better.
    """
    model: Any = texts.loaded.model
    with intervene(model, *edits, measure=False, allow_idle=True) as log:
        if not texts.loaded.is_diffusion:
            forced = _Forced(replace(texts, edits=tuple(edits)), log)
            forced.follow(steps)
            return torch.cat(forced.seen)
        denoiser = model.denoiser(steps[0].canvas.attention_mask)
        found = []
        for step in steps:
            if needs_clean_pass(edits):
                with log.probing():
                    denoiser(step.before_BS, _committed(step))
            found.append(_log_probabilities(denoiser(step.before_BS, _committed(step))))
        return torch.cat(found)


class _Forced(ContinuingWriter):
    """Writes the text of another run, and keeps the tokens it would have written itself."""

    def follow(self, steps: Sequence[WritingStep]) -> None:
        self.given = steps
        self.seen = list[Tensor]()
        for _ in self.steps():
            pass

    def _tokens(self, index: int) -> Tensor:
        step = self.given[index]
        self.seen.append(_log_probabilities(self._logits()[step.active_B.to(self.ids_BS.device)]))
        return step.after_BS[:, -1]


def _log_probabilities(logits_MV: Tensor) -> Tensor:
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)).log_softmax(-1).cpu()


def _mean_by_row(values_M: Tensor, rows_M: Tensor, rows: int) -> Tensor:
    sums_B = torch.zeros(rows, dtype=torch.float64).index_add(0, rows_M, values_M.double())
    return sums_B / rows_M.bincount(minlength=rows)
