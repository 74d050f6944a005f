"""Answers to several prompts at once, by denoising or token after token, under interventions, watched or not."""

# B batch rows, P prompt positions, S positions so far, Q positions that run, C places in a block, V vocabulary
# B batch rows, S positions so far
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinklab.checkpoints.loading import Loaded
from sinklab.probing.intervention import intervene
from sinklab.probing.log import InterventionLog
from sinklab.probing.recording import Recording
from sinklab.probing.statistics import position_states
from sinklab.probing.tracing import trace
from sinklab.sampling.canvas import Canvas, left_padded
from sinklab.sampling.settings import DecodingSettings
from sinklab.sampling.tokens import sample_tokens
from sinklab.scoring.decoding import COMMITTED, PROMPT, asks_clean_pass, denoised
from sinklab.scoring.sink_facts import SinkFacts
from sinklab.scoring.text_ends import ended, is_over
from sinklab.studies.trace.writing import seeded

Taken = tuple[Tensor, Callable[[], Tensor]]
"""Rows that a step was for, bool (B,), and what gives the state of every position before it, (B, S)."""


@dataclass(frozen=True)
class Asked:
    """One text to write."""

    ids: tuple[int, ...]
    """The prompt."""
    until: tuple[str, ...]
    """The answer ends before the first of these texts."""
    seed: int


class DenoisingRows:
    statistic = "received"

    def __init__(
        self,
        loaded: Loaded,
        asked: Sequence[Asked],
        settings: DecodingSettings,
        new_tokens: int,
        asking: InterventionLog | None,
    ) -> None:
        model: Any = loaded.model
        config = model.config
        self.loaded, self._asked, self._settings, self._asking = loaded, asked, settings, asking
        if settings.stop_at_eos and not (config.eos_ids or config.eot_token_id is not None or settings.stop_ids):
            # the default, and this model names no end of text
            self._settings = replace(settings, stop_at_eos=False)
        canvas = Canvas.from_prompts(
            [list(request.ids) for request in asked],
            new_tokens=new_tokens,
            mask_id=config.mask_token_id,
            pad_id=0,
            context=config.text_positions,
        )
        self._canvas = canvas.to(model.device)
        self.pad_B = (~self._canvas.attention_BS).sum(1)
        self._ids_BS = self._canvas.ids_BS

    def steps(self) -> Iterator[Taken]:
        """Every model evaluation. What a row writes after its end counts for nothing."""
        over_B = torch.zeros(len(self._asked), dtype=torch.bool)
        for step in denoised(self.loaded.model, self._canvas, self._settings, self._asking):
            self._ids_BS, todo_BC = step.ids_BS, step.choice.todo_BC
            yield todo_BC.any(1).cpu() & ~over_B, partial(position_states, self._canvas, step.before_BS)
            if not bool((todo_BC & ~step.choice.chosen_BC).any()):
                over_B |= self._over(step.ids_BS)
                if bool(over_B.all()):
                    return

    def _over(self, ids_BS: Tensor) -> Tensor:
        """Rows whose finished blocks hold an end."""
        found = []
        for row, request in enumerate(self._asked):
            written = ids_BS[row][self._canvas.open_BS[row]].tolist()
            masked = written.index(self._canvas.mask_id) if self._canvas.mask_id in written else len(written)
            found.append(is_over(self.loaded, written[:masked], request.until))
        return torch.tensor(found)

    def row(self, row: int) -> list[int]:
        """The tokens that a row has now, up to the first mask."""
        written = self._ids_BS[row][self._canvas.open_BS[row]].tolist()
        mask_id = self._canvas.mask_id
        return written[: written.index(mask_id)] if mask_id in written else written


class ContinuingRows:
    statistic = "last_row"

    def __init__(
        self,
        loaded: Loaded,
        asked: Sequence[Asked],
        settings: DecodingSettings,
        new_tokens: int,
        asking: InterventionLog | None,
    ) -> None:
        self.loaded, self._asked, self._settings, self._new = loaded, asked, settings, new_tokens
        model: Any = loaded.model
        self._reader = _Reader(model, asking, [list(request.ids) for request in asked])
        self.pad_B = (~self._reader.real_BS).sum(1)
        self._begun = self._reader.ids_BS.shape[1]
        limit = model.config.max_position_embeddings
        if self._begun + new_tokens > limit:
            raise ValueError(
                f"prompt and new tokens must fit the model's context of {limit} positions, got "
                f"{self._begun + new_tokens}; shorten the prompt or ask for fewer tokens"
            )

    def steps(self) -> Iterator[Taken]:
        """One token a row at a time, on top of the model's own cache."""
        settings, model = self._settings, self.loaded.model
        text_size = getattr(model.config, "text_vocab_size", None) if settings.text_only else None
        generator = torch.Generator(model.device).manual_seed(settings.seed or 0)
        over_B = torch.zeros(len(self._asked), dtype=torch.bool)
        for index in range(self._new):
            with torch.inference_mode():
                logits_BV = self._reader()[:, :text_size].float()
                if settings.suppress_ids:
                    logits_BV[:, list(settings.suppress_ids)] = -torch.inf
                if bool(logits_BV.isnan().any()):
                    raise ValueError(f"{self.loaded.name} gave NaN logits at step {index}; try another dtype")
                tokens_B = sample_tokens(
                    logits_BV, settings.temperature, generator, top_p=settings.top_p, top_k=settings.top_k
                )
            active_B, state_BS = ~over_B, self._states()
            self._reader.append(tokens_B)
            for row, request in enumerate(self._asked):
                over_B[row] = over_B[row] or self._is_over(row, request.until)
            yield active_B, partial(torch.clone, state_BS)
            if bool(over_B.all()):
                return

    def _is_over(self, row: int, until: Sequence[str]) -> bool:
        written = self.row(row)
        return written[-1] in self._settings.stop_ids or is_over(self.loaded, written, until)

    def _states(self) -> Tensor:
        state_BS = torch.where(self._reader.real_BS, PROMPT, -1)
        state_BS[:, self._begun :] = COMMITTED
        return state_BS

    def row(self, row: int) -> list[int]:
        """The tokens that a row has now."""
        return self._reader.ids_BS[row, self._begun :].tolist()


class _Reader:
    """The texts of a batch to the logits of their next tokens, (B, V), on top of the model's own cache."""

    def __init__(self, model: Any, asking: InterventionLog | None, prompts: list[list[int]]) -> None:
        self._model, self._asking = model, asking
        ids_BP, real_BP = left_padded(prompts, 0)
        self.ids_BS, self.real_BS = ids_BP.to(model.device), real_BP.to(model.device)
        self._cache: Any = None
        self._read = 0

    def append(self, tokens_B: Tensor) -> None:
        """The tokens that were chosen."""
        self.ids_BS = torch.cat([self.ids_BS, tokens_B[:, None]], 1)
        self.real_BS = torch.nn.functional.pad(self.real_BS, (0, 1), value=True)

    def __call__(self) -> Tensor:
        if self._asking is not None:
            with self._asking.probing():
                self._run()
            # what the clean pass wrote goes, so that the edited one reads its own past
            if self._cache is not None and self._read:
                self._cache.crop(self._read - self.ids_BS.shape[1])
            else:
                self._cache = None
        logits_BV = self._run()
        self._read = self.ids_BS.shape[1]
        return logits_BV

    def _run(self) -> Tensor:
        padded: dict[str, Tensor] = {}
        if not bool(self.real_BS.all()):
            places_BS = (self.real_BS.long().cumsum(1) - 1).clamp(min=0)
            padded = {"attention_mask": self.real_BS.long(), "position_ids": places_BS[:, self._read :]}
        out = self._model(
            self.ids_BS[:, self._read :], past_key_values=self._cache, use_cache=True, logits_to_keep=1, **padded
        )
        self._cache = out.past_key_values
        return out.logits[:, -1]


DRAWING_RULES = ("random", "positional", "origin")
DYNAMIC_SCHEDULES = ("threshold", "factor", "entropy_bound")


@dataclass(frozen=True)
class Answer:
    """What was written, up to its end."""

    text: str
    ids: tuple[int, ...]
    """Tokens up to the end of text; those after an `until` text included."""
    steps: int
    """Model evaluations that the row took part in; where it is 1, a closed loop took nothing away."""
    sinks: tuple[dict[str, Any], ...] = ()
    """Facts of `SinkFacts.row`; empty where nobody watched."""


def is_lonely(settings: DecodingSettings, edits: Sequence[Any]) -> bool:
    """Whether an answer would depend on the other rows of its batch, so that it is written alone.

    True where random numbers are drawn (for the tokens, the positions or a random control), and where rows wait for one
    another under something that counts forwards.
    """
    draws = settings.temperature > 0 or bool(settings.alg_temp) or settings.rule in DRAWING_RULES
    draws = draws or settings.pooled or any(getattr(edit, "control", None) == "random" for edit in edits)
    return draws or (settings.schedule in DYNAMIC_SCHEDULES and (bool(edits) or settings.cache != "none"))


def write_batch(
    loaded: Loaded,
    asked: Sequence[Asked],
    settings: DecodingSettings,
    new_tokens: int,
    edits: Sequence[Any] = (),
    *,
    watch: bool = False,
) -> list[Answer]:
    """Write the answers to several prompts of any lengths.

    A row is what it would be alone, up to rounding; see `is_lonely` for what must be written alone (the seed of the
    first request is taken). Writing ends when every row has met its end.

    Args:
        watch: trace every step, and say what sinks did (`Answer.sinks`).

    Raises:
        ValueError: for what the decoder, the model or the interventions refuse, and NaN logits.
    """
    seed = asked[0].seed
    settings = replace(settings, seed=seed)
    own = seeded(tuple(edits), seed)
    forwards = 2 if settings.cfg_scale and loaded.family == "diffusion" else 1
    # every row may end with its first step: `Answer.steps` tells
    options: dict[str, Any] = {"forwards_per_step": forwards, "measure": watch, "allow_idle": True}
    block = intervene(loaded.model, *own, **options) if own else nullcontext()
    kind: Any = DenoisingRows if loaded.family == "diffusion" else ContinuingRows
    with block as log:
        asking = log if asks_clean_pass(own) else None
        writing = kind(loaded, asked, settings, new_tokens, asking)
        facts = SinkFacts(writing.pad_B, getattr(loaded.model.config, "sink_count", 0)) if watch else None
        return _written(writing, facts, log, asked)


class _Over(Exception):
    """The batch is written: there is no further step."""


def _written(
    writing: Any, facts: SinkFacts | None, log: InterventionLog | None, asked: Sequence[Asked]
) -> list[Answer]:
    steps, counts_B = writing.steps(), torch.zeros(len(asked), dtype=torch.int64)
    while True:
        taken, recording = _next(steps, writing, watched=facts is not None)
        if taken is None:
            break
        active_B, state_BS = taken
        counts_B += active_B
        if facts is not None and recording is not None:
            facts.add(recording, writing.statistic, state_BS(), active_B, log)
        elif log is not None:
            # what nobody reads would fill the memory of a long run
            log.removals.clear()
    answers = []
    for row, request in enumerate(asked):
        ids, text = ended(writing.loaded, writing.row(row), request.until, request.ids[-1:])
        sinks = () if facts is None else tuple(facts.row(row))
        answers.append(Answer(text, tuple(ids), int(counts_B[row]), sinks))
    return answers


def _next(steps: Iterator[Taken], writing: Any, *, watched: bool) -> tuple[Taken | None, Recording | None]:
    if not watched:
        return next(steps, None), None
    try:
        with trace(writing.loaded.model, (writing.statistic,), steps=(0,)) as recording:
            taken = next(steps, None)
            if taken is None:
                # raised through the trace, which refuses a block in which no model ran
                raise _Over
    except _Over:
        return None, None
    return taken, recording
