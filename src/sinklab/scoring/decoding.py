"""Writing a text step by step, by denoising or token after token, in one form that a recorder can follow."""

# S canvas positions seen at a step, V vocabulary
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.checkpoints.loading import Loaded
from sinklab.probing.log import InterventionLog
from sinklab.sampling.canvas import Canvas
from sinklab.sampling.loop import Step
from sinklab.sampling.settings import DecodingSettings
from sinklab.sampling.tokens import sample_tokens
from sinklab.scoring.prompts import Prompt
from sinklab.sinks.states import COMMITTED, MASKED, PROMPT
from sinklab.studies.trace.settings import StudySettings


def asks_clean_pass(edits: Iterable[Any]) -> bool:
    """Whether an edit chooses in forwards that run unedited."""
    return any(getattr(edit, "source", None) == "clean_pass" for edit in edits)


def check_cache(edits: Iterable[Any], cache: str) -> None:
    """Raise ValueError for a cache, where edits choose in clean passes."""
    if cache != "none" and asks_clean_pass(edits):
        raise ValueError(
            "source=clean_pass runs an unedited forward before each edited one, which would overwrite what "
            f"cache={cache} remembers; decode without a cache"
        )


class CleanPassFirst:
    """A denoiser that runs each evaluation unedited before it runs it edited."""

    def __init__(self, denoiser: Any, log: InterventionLog) -> None:
        self._denoiser, self._log = denoiser, log

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        with self._log.probing():
            self._denoiser(ids_BS, wanted_BS)
        return self._denoiser(ids_BS, wanted_BS)


def denoised(model: Any, canvas: Canvas, settings: DecodingSettings, asking: InterventionLog | None) -> Iterator[Step]:
    """The steps of `model.denoise`, each evaluation behind a clean one.

    Args:
        asking: the log of interventions that choose in clean passes; None for a plain run.
    """
    if asking is None:
        return model.denoise(canvas, settings)
    config, real_BS = model.config, canvas.attention_BS
    eos_ids = [*config.eos_ids, *([] if config.eot_token_id is None else [config.eot_token_id])]
    denoiser = CleanPassFirst(model.denoiser(None if bool(real_BS.all()) else real_BS), asking)
    return settings.decode(denoiser, canvas, eos_ids=eos_ids, text_vocabulary=config.text_vocab_size)


DENOISING_ONLY: tuple[str, ...] = ("rule", "schedule", "cache", "steps", "block_length", "alg_temp", "threshold")
DENOISING_ONLY += ("factor", "gamma", "eps", "pooled", "refresh_every", "cfg_scale", "defer_ids")
DENOISING_ONLY += ("cache_keep", "cache_sinks", "cache_neighbours", "cache_protect")


@dataclass(frozen=True, eq=False)
class Moment:
    """One model evaluation and what was written after it."""

    index: int
    block: int
    ids_S: np.ndarray
    """Token ids that the model read, int64."""
    state_S: np.ndarray
    """State of each position: 0 masked, 1 committed, 2 prompt; int8."""
    committed: int
    """Tokens written by this step."""
    written: np.ndarray
    """The completion after this step, int64."""


@dataclass(frozen=True, eq=False)
class Task:
    """One text to write: by whom, from what, how, with which seed."""

    loaded: Loaded
    prompt: Prompt
    settings: StudySettings
    seed: int
    edits: tuple[Any, ...] = ()
    """Interventions it is written under."""

    @property
    def is_diffusion(self) -> bool:
        """Whether the model denoises; else it writes token after token."""
        return self.loaded.family == "diffusion"

    @property
    def asks_clean_pass(self) -> bool:
        """Whether an intervention chooses in forwards that run unedited."""
        return asks_clean_pass(self.edits)

    @property
    def positions(self) -> int:
        """Canvas positions of the finished text."""
        return len(self.prompt.ids) + self.settings.new_tokens

    @property
    def most_steps(self) -> int:
        """Steps that the text may take at most."""
        return max(self.settings.steps or 0, self.settings.new_tokens)

    def moments(self, log: InterventionLog | None = None) -> Iterator[Moment]:
        """Write the text; every `next` runs the model once.

        Args:
            log: of the interventions in force; needed where one of them chooses in clean passes.
        """
        return _denoised(self, log) if self.is_diffusion else _continued(self, log)

    def started(self) -> list[int]:
        """The ids that an autoregressive model starts from: it needs one at least.

        Raises:
            ValueError: for an empty prompt where the model names no beginning of text.
        """
        if self.prompt.ids:
            return list(self.prompt.ids)
        bos = self.loaded.special.bos
        if bos is None:
            raise ValueError(
                f"{self.loaded.name} is autoregressive and needs a token to start from, but the prompt is empty and "
                "the model names no beginning of text; give a prompt"
            )
        return [bos]

    def canvas(self) -> Canvas:
        """The canvas of a diffusion model. Raises ValueError for a prompt that does not fit."""
        config: Any = self.loaded.model.config
        return Canvas.from_prompts(
            [list(self.prompt.ids)],
            new_tokens=self.settings.new_tokens,
            mask_id=config.mask_token_id,
            pad_id=0,
            context=config.text_positions,
        )

    def check(self) -> None:
        """Refuse what cannot be written, before anything runs.

        Raises:
            ValueError: for a prompt that does not fit and settings that the decoder refuses.
        """
        settings, loaded = self.settings, self.loaded
        if self.is_diffusion:
            config: Any = loaded.model.config
            if config.mask_token_id is None:
                raise ValueError(
                    f"a study needs a model with a mask token, but {loaded.name} has mask_token_id None; set it in its "
                    "config"
                )
            if settings.full_forward:
                raise ValueError(
                    f"full_forward is a choice for autoregressive models, and {loaded.name} denoises; leave it out"
                )
            canvas = self.canvas()
            model: Any = loaded.model
            model.denoise(canvas.to(model.device), settings)
            check_cache(self.edits, settings.cache)
            return
        if surplus := settings.changed(DENOISING_ONLY):
            raise ValueError(
                f"{loaded.name} is autoregressive and writes token after token: {', '.join(surplus)} can be set for "
                "diffusion models only; leave it out"
            )
        if settings.new_tokens < 1:
            raise ValueError(f"new_tokens must be at least 1, got {settings.new_tokens}")
        limit = loaded.model.config.max_position_embeddings
        if self.positions > limit:
            raise ValueError(
                f"prompt and new tokens must fit the model's context of {limit} positions, got {self.positions}; "
                "shorten the prompt or ask for fewer tokens"
            )
        self.started()
        sample_tokens(torch.zeros(1, 2), settings.temperature, torch.Generator(), **_cuts(settings))


def _cuts(settings: StudySettings) -> dict[str, Any]:
    return {"top_p": settings.top_p, "top_k": settings.top_k}


def _denoised(task: Task, log: InterventionLog | None) -> Iterator[Moment]:
    model: Any = task.loaded.model
    canvas = task.canvas().to(model.device)
    settings = replace(task.settings, seed=task.seed)
    open_S = canvas.open_BS[0].cpu().numpy()
    for step in denoised(model, canvas, settings, log if task.asks_clean_pass else None):
        masked_S = step.masked_BS[0].cpu().numpy()
        state_S = np.where(masked_S, MASKED, np.where(open_S, COMMITTED, PROMPT)).astype(np.int8)
        ids_S = step.before_BS[0].cpu().numpy()
        after_S = step.ids_BS[0].cpu().numpy()
        yield Moment(step.index, step.block, ids_S, state_S, int(step.committed_BS.sum()), after_S[open_S])


def _continued(task: Task, log: InterventionLog | None) -> Iterator[Moment]:
    model: Any = task.loaded.model
    settings = task.settings
    generator = torch.Generator(model.device).manual_seed(task.seed)
    ids = task.started()
    begun = len(ids)
    stop_ids = {*settings.stop_ids, *(task.loaded.special.stop if settings.stop_at_eos else ())}
    text_size = getattr(model.config, "text_vocab_size", None) if settings.text_only else None
    reader = _Reader(model, log if task.asks_clean_pass else None, settings.full_forward)
    for index in range(settings.new_tokens):
        seen_S = np.array(ids)
        with torch.inference_mode():
            logits_V = reader(ids)[:text_size].float()
            if settings.suppress_ids:
                logits_V[list(settings.suppress_ids)] = -torch.inf
            if bool(logits_V.isnan().any()):
                raise ValueError(f"{task.loaded.name} gave NaN logits at step {index}; try another dtype")
            token = sample_tokens(logits_V[None], settings.temperature, generator, **_cuts(settings))
        ids.append(int(token[0]))
        state_S = np.where(np.arange(len(seen_S)) < begun, PROMPT, COMMITTED).astype(np.int8)
        yield Moment(index, 0, seen_S, state_S, 1, np.array(ids[begun:]))
        if ids[-1] in stop_ids:
            return


class _Reader:
    """Ids of a text to the logits of its next token, (V,), on top of the model's own cache."""

    def __init__(self, model: Any, log: InterventionLog | None, full: bool) -> None:
        self._model, self._log, self._full = model, log, full
        self._cache: Any = None
        self._read = 0

    def __call__(self, ids: list[int]) -> Tensor:
        if self._log is not None:
            with self._log.probing():
                self._run(ids)
            if self._cache is not None and self._read:
                # what the clean pass wrote goes, so that the edited one reads its own past
                self._cache.crop(self._read - len(ids))
            elif self._cache is not None:
                self._cache = None
        logits_V = self._run(ids)
        self._read = len(ids)
        return logits_V

    def _run(self, ids: list[int]) -> Tensor:
        fresh = ids if self._full else ids[self._read :]
        ids_1Q = torch.tensor([fresh], device=self._model.device)
        if self._full:
            return self._model(ids_1Q, use_cache=False, logits_to_keep=1).logits[0, -1]
        out = self._model(ids_1Q, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        return out.logits[0, -1]
