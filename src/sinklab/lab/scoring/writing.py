"""The one writer: texts of a batch, by denoising or token after token, under interventions,
followed step by step.

A single text is a batch of one. ::

    with Writing(loaded, requests, settings, new_tokens, edits).begin() as writer:
        for step in writer.steps():
            …
"""

# B batch rows, P prompt positions, S positions so far, C places in a block, V vocabulary
# N numbers of `MEASURED`
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.compat import stated
from sinklab.core.instrument import BlockKeys, InterventionLog, intervene, position_states
from sinklab.core.instrument.edits.dose import MEASURED, by_row
from sinklab.core.subject import Canvas, DecodingSettings, TokenSampling
from sinklab.core.subject.canvas import pad_left
from sinklab.core.subject.denoisers import FunctionDenoiser
from sinklab.core.subject.tokens import proposals, shaped
from sinklab.lab.checkpoints import Loaded


def ends_of(config: Any) -> list[int]:
    """Ids at which a diffusion model ends a text or a turn."""
    found = [*stated(config, "eos_ids", ()), stated(config, "eot_token_id")]
    return [token for token in found if token is not None]


def stop_ids(loaded: Loaded, until: Sequence[str] = ()) -> set[int]:
    """Ids at which a text ends: the model's ends of text and of turn, and special tokens among
    `until`.
    """
    found = {*loaded.special.stop, *ends_of(loaded.config)}
    tokenizer = loaded.tokenizer
    if tokenizer is not None:
        special = {
            str(tokenizer.convert_ids_to_tokens(token)): token
            for token in tokenizer.all_special_ids
        }
        found |= {special[text] for text in until if text in special}
    return found


def ended(
    loaded: Loaded, ids: Sequence[int], until: Sequence[str], before: Sequence[int] = ()
) -> tuple[list[int], str]:
    """Tokens up to the end of text (left out), and their text up to the first `until` (left out).

    Args:
        before: the token in front of them, without which a SentencePiece tokenizer loses a leading
            space: one of those that an indented line of code begins with.
    """
    stops = stop_ids(loaded, until)
    kept = [*takewhile(lambda token: token not in stops, ids)]
    front, whole, text = (
        str(loaded.needed_tokenizer().decode(list(some), skip_special_tokens=True))
        for some in (before, [*before, *kept], kept)
    )
    # a character may begin in the token before
    if whole.startswith(front):
        text = whole.removeprefix(front)
    ends = [text.find(end) for end in until if end and end in text]
    return kept, text[: min(ends, default=len(text))]


def is_over(loaded: Loaded, ids: Sequence[int], until: Sequence[str]) -> bool:
    """Whether these tokens, which stand for good, hold an end."""
    if stop_ids(loaded, until) & set(ids):
        return True
    if not any(until) or not ids:
        return False
    text = str(loaded.needed_tokenizer().decode(list(ids), skip_special_tokens=True))
    return any(end and end in text for end in until)


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one sample: the same whether it is written first, after an interruption or by
    another process.
    """
    return int(np.random.SeedSequence([seed, sample]).generate_state(1, np.uint64)[0] >> 2)


def seeded(edits: Iterable[Any], sample: int) -> tuple[Any, ...]:
    """The edits with a seed of this sample, so that a random control draws other columns for every
    sample.
    """
    found = []
    for edit in edits:
        if is_random([edit]):
            edit = replace(edit, seed=sample_seed(edit.seed, sample))
        found.append(edit)
    return tuple(found)


def needs_clean_pass(edits: Iterable[Any]) -> bool:
    """Whether an edit chooses in forwards that run unedited."""
    return any(stated(edit, "when") == "clean" for edit in edits)


def is_random(edits: Iterable[Any]) -> bool:
    """Whether an edit draws: then equal rows may differ."""
    return any(stated(edit, "draws") for edit in edits)


def taken(log: InterventionLog, active_B: Tensor | None = None) -> Tensor | int:
    """Removals of each row by edits that choose keys: sums and numbers of entries (B, N, 2); 0 if
    nothing is logged.

    Args:
        log: of one step or forward.
        active_B: rows that it was for, bool; None for all.
    """
    sums: Any = 0
    for removal in log.removals:
        # a window and named positions are no choice: they have no dose
        if isinstance(removal.edit, BlockKeys) and removal.edit.keys.by_attention:
            both_BN2 = torch.stack([torch.stack(pair, -1) for pair in by_row(removal).values()], 1)
            if active_B is not None:
                both_BN2 = both_BN2 * active_B.cpu()[:, None, None]
            sums = sums + both_BN2
    return sums


def totals(taken_N2: Tensor | int) -> dict[str, tuple[float, float]]:
    """The `Dose.totals` of sums that `taken` gives, of one row or several rows together; empty for
    nothing.
    """
    if isinstance(taken_N2, int):
        return {}
    return {
        name: (both[0], both[1]) for name, both in zip(MEASURED, taken_N2.tolist(), strict=True)
    }


@dataclass(frozen=True)
class WritingRequest:
    """One text to write."""

    ids: tuple[int, ...]
    """The prompt."""
    until: tuple[str, ...] = ()
    """The answer ends before the first of these texts."""
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Moment:
    """One model evaluation as one text saw it, and the tokens written after it."""

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


@dataclass(eq=False)
class WritingStep:
    """One model evaluation of a batch, and the tokens written after it."""

    index: int
    block: int
    canvas: Any
    """Layout of the model's input: `open_BS`, `attention_BS` and `mask_id`, as in `Canvas`."""
    before_BS: Tensor
    """Token ids that the model read, int64."""
    after_BS: Tensor
    """The ids after the step; an autoregressive text has one position more."""
    committed_B: Tensor
    """Tokens written by this step."""
    active_B: Tensor
    """Rows that this step was for, bool: the others are over."""
    seen: Any = None
    """Result of the caller's `watch` for this step."""

    @property
    def state_BS(self) -> Tensor:
        """State of every position before the step: 0 masked, 1 committed, 2 prompt, −1 padding;
        int8.
        """
        return position_states(self.canvas, self.before_BS)

    def moment(self, row: int = 0) -> Moment:
        """The step as this row saw it, without padding."""
        real_S = self.canvas.attention_BS[row]
        open_S = self.canvas.open_BS[row]
        written = self.after_BS[row][
            pad(open_S, (0, self.after_BS.shape[1] - len(open_S)), value=True)
        ]
        seen = self.before_BS[row][real_S]
        state_S = self.state_BS[row][real_S]
        return Moment(
            self.index,
            self.block,
            seen.cpu().numpy(),
            state_S.cpu().numpy(),
            int(self.committed_B[row]),
            written.cpu().numpy(),
        )


@dataclass(frozen=True, eq=False)
class Writing:
    """Texts to write in one batch: their model, requests and settings."""

    loaded: Loaded
    requests: Sequence[WritingRequest]
    settings: DecodingSettings
    """With the seed of the batch."""
    new_tokens: int
    edits: Sequence[Any] = ()
    """Interventions they are written under, with their seeds."""
    ends: bool = True
    """Rows are over, too, at the model's ends of text, whatever the settings say, and at an `until`
    text.
    """
    full_forward: bool = False
    """An autoregressive model runs the whole text at every step, without its cache."""
    canvas: Canvas | None = None
    """Canvas that a diffusion model denoises in place of the prompts."""

    @contextmanager
    def begin(self, *, measure: bool = True) -> Iterator[Writer]:
        """A writer, and the interventions for the length of the block.

        A text may end before an edit gets to act: `log.idle` names such edits.

        Args:
            measure: keep the share that the edits really removed.

        Raises:
            ValueError: for settings that the decoder, the model or the interventions refuse.
        """
        writer: Any = ContinuingWriter
        forwards = 1
        if self.loaded.is_diffusion:
            writer = DenoisingWriter
            if self.settings.cfg_scale:
                forwards = 2
        if not self.edits:
            yield writer(self, InterventionLog())
            return
        with intervene(
            self.loaded.model,
            *self.edits,
            forwards_per_step=forwards,
            measure=measure,
            allow_idle=True,
        ) as log:
            yield writer(self, log)


class Writer:
    """Texts that are being written together; tokens of a row after its end count for nothing."""

    statistic: str
    """Statistic of the attention to each key that a trace reads."""
    ids_BS: Tensor
    """The texts as they are now."""

    def __init__(self, texts: Writing, log: InterventionLog, real_BS: Tensor) -> None:
        self.texts = texts
        self.loaded = texts.loaded
        self.requests = texts.requests
        self.log = log
        """Log of the interventions in force."""
        self.pad_B = (~real_BS).sum(1)
        """Padding columns to the left of each row."""
        self.over_B = torch.zeros(len(real_BS), dtype=torch.bool)
        self.evaluations = 0
        """Number of evaluations of the model so far, clean passes apart."""
        self._clean = None
        if needs_clean_pass(texts.edits):
            self._clean = log

    def steps(
        self, watch: Callable[[int], AbstractContextManager[Any]] | None = None
    ) -> Iterator[WritingStep]:
        """Every model evaluation, until all rows are over.

        Args:
            watch: index of a step -> a context that its evaluation runs in, such as a trace; its
                value becomes `WritingStep.seen`. It is called if a step follows, and not behind the
                last one.
        """
        while not bool(self.over_B.all()) and self._is_open(self.evaluations):
            with nullcontext() if watch is None else watch(self.evaluations) as seen:
                step = self._step(self.evaluations)
            step.seen = seen
            self.evaluations += 1
            yield step

    def row(self, row: int) -> list[int]:
        """The tokens that a row has now, up to the first mask."""
        raise NotImplementedError

    def _is_open(self, index: int) -> bool:
        raise NotImplementedError

    def _step(self, index: int) -> WritingStep:
        raise NotImplementedError


class DenoisingWriter(Writer):
    """A canvas that is denoised."""

    statistic = "received"

    def __init__(self, texts: Writing, log: InterventionLog) -> None:
        model: Any = texts.loaded.model
        settings = texts.settings
        if texts.ends and not (settings.stop_ids or ends_of(model.config)):
            settings = replace(settings, stop_at_eos=False)
        canvas = texts.canvas
        if canvas is None:
            canvas = canvas_of(texts.loaded, texts.requests, texts.new_tokens)
        self.canvas = canvas.to(model.device)
        self.ids_BS = self.canvas.ids_BS
        super().__init__(texts, log, self.canvas.attention_BS)
        clean = self._clean
        if clean is None:
            self._steps = model.denoise(self.canvas, settings)
        else:
            denoiser = model.denoiser(self.canvas.attention_mask)
            blocks = denoiser.in_blocks(self.canvas, settings.block_length)

            def evaluate(ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
                with clean.probing():
                    denoiser(ids_BS, wanted_BS)
                return denoiser(ids_BS, wanted_BS)

            own = FunctionDenoiser(evaluate)
            self._steps = settings.decode(own, blocks, **model.config.decoding)
        self._goes_on = False

    def _is_open(self, index: int) -> bool:
        return self._goes_on or bool(
            (self.canvas.open_BS & (self.ids_BS == self.canvas.mask_id)).any()
        )

    def _step(self, index: int) -> WritingStep:
        step = next(self._steps)
        self.ids_BS = step.ids_BS
        active_B = step.candidates_BS.any(1).cpu() & ~self.over_B
        self._goes_on = step.goes_on
        left_BS = step.candidates_BS & ~step.committed_BS & step.masked_BS
        if self.texts.ends and not self._goes_on and not bool(left_BS.any()):
            found = [
                is_over(self.loaded, self.row(row), each.until)
                for row, each in enumerate(self.requests)
            ]
            self.over_B |= torch.tensor(found)
        layout = (self.canvas, step.before_BS, step.ids_BS, step.committed_BS.sum(1), active_B)
        return WritingStep(index, step.block, *layout)

    def row(self, row: int) -> list[int]:
        written = self.ids_BS[row][self.canvas.open_BS[row]].tolist()
        return [*takewhile(lambda token: token != self.canvas.mask_id, written)]


class ContinuingWriter(Writer):
    """Texts that are continued token after token, on top of the model's own cache."""

    statistic = "last_row"

    def __init__(self, texts: Writing, log: InterventionLog) -> None:
        loaded = texts.loaded
        settings = texts.settings
        ids_BP, real_BP = pad_left([list(request.ids) for request in texts.requests], 0)
        self.ids_BS = ids_BP.to(loaded.model.device)
        self._real_BS = real_BP.to(loaded.model.device)
        super().__init__(texts, log, self._real_BS)
        self._start = ids_BP.shape[1]
        check_context(loaded, self._start + texts.new_tokens)
        own = set(settings.stop_ids)
        if settings.stop_at_eos:
            own.update(loaded.special.stop)
        self._stop_ids = [own for _ in texts.requests]
        if texts.ends:
            self._stop_ids = [own | stop_ids(loaded, each.until) for each in texts.requests]
        self._generator = torch.Generator(loaded.model.device).manual_seed(settings.seed or 0)
        self._cache: Any = None
        self._read = 0

    def _is_open(self, index: int) -> bool:
        return index < self.texts.new_tokens

    def _step(self, index: int) -> WritingStep:
        before_BS = self.ids_BS
        real_BS = self._real_BS
        tokens_B = self._tokens(index)
        self.ids_BS = torch.cat([before_BS, tokens_B[:, None]], 1)
        self._real_BS = pad(real_BS, (0, 1), value=True)
        active_B = ~self.over_B
        for row, request in enumerate(self.requests):
            written = self.row(row)
            meets_end = self.texts.ends and is_over(self.loaded, written, request.until)
            self.over_B[row] |= meets_end or written[-1] in self._stop_ids[row]
        open_BS = (
            torch.arange(before_BS.shape[1], device=before_BS.device) >= self._start
        ).expand_as(before_BS)
        canvas = SimpleNamespace(open_BS=open_BS, attention_BS=real_BS, mask_id=-1)
        return WritingStep(
            index, 0, canvas, before_BS, self.ids_BS, torch.ones_like(tokens_B), active_B
        )

    @torch.inference_mode()
    def _tokens(self, index: int) -> Tensor:
        settings = self.texts.settings
        logits_BV = self._logits().float()
        if settings.suppress_ids:
            logits_BV[:, list(settings.suppress_ids)] = -torch.inf
        if bool(logits_BV.isnan().any()):
            raise ValueError(
                f"{self.loaded.name} gave NaN logits at step {index}; try another dtype"
            )
        sampling = TokenSampling(settings.temperature, settings.top_p, settings.top_k)
        cut_BV = None
        if sampling.temperature > 0 and sampling.cuts:
            cut_BV = shaped(logits_BV, sampling)
        return proposals(logits_BV, cut_BV, sampling, None, self._generator)[1]

    def _logits(self) -> Tensor:
        if self._clean is not None:
            with self._clean.probing():
                self._run()
            # drop the cache entries of the clean pass: the edited one reads its own past
            if self._read:
                self._cache.crop(self._read - self.ids_BS.shape[1])
            else:
                self._cache = None
        logits_BV = self._run()
        self._read = self.ids_BS.shape[1]
        if self.texts.full_forward:
            self._read = 0
        return logits_BV

    def _run(self) -> Tensor:
        given: dict[str, Any] = {"use_cache": not self.texts.full_forward, "logits_to_keep": 1}
        if not bool(self._real_BS.all()):
            position_BS = (self._real_BS.long().cumsum(1) - 1).clamp(min=0)
            given |= {
                "attention_mask": self._real_BS.long(),
                "position_ids": position_BS[:, self._read :],
            }
        model: Any = self.loaded.model
        out = model(self.ids_BS[:, self._read :], past_key_values=self._cache, **given)
        self._cache = out.past_key_values
        return out.logits[:, -1]

    def row(self, row: int) -> list[int]:
        return self.ids_BS[row, self._start :].tolist()


def check_context(loaded: Loaded, positions: int) -> None:
    """Raise ValueError if an autoregressive model has not so many positions."""
    limit = loaded.config.max_position_embeddings
    if positions > limit:
        raise ValueError(
            f"a prompt and its new tokens must fit the model's context of {limit} positions, got "
            f"{positions}; shorten the prompt or request fewer tokens"
        )


def closed(config: Any, ids: Sequence[int]) -> list[int]:
    """The ids of a whole text with its closing tokens ([SEP] of a masked language model), unless
    they are there.
    """
    closing = config.closing_of(ids)
    if closing and tuple(ids[-len(closing) :]) == closing:
        return [*ids]
    return [*ids, *closing]


def canvas_of(loaded: Loaded, requests: Sequence[WritingRequest], new_tokens: int) -> Canvas:
    """The prompts, padded to the left, with so many masks behind; with 0 their own masks are to be
    filled.

    Raises ValueError if they do not fit the model, or have no masks to fill.
    """
    config = loaded.config
    prompts = [list(request.ids) for request in requests]
    if new_tokens == 0:
        ids_BS, real_BS = pad_left([closed(config, ids) for ids in prompts], 0)
        limit = config.text_positions
        return Canvas.infill(
            ids_BS, mask_id=config.mask_token_id, attention_BS=real_BS, context=limit
        )
    return Canvas.from_prompts(
        prompts,
        new_tokens=new_tokens,
        mask_id=config.mask_token_id,
        pad_id=0,
        context=config.text_positions,
        multiple=config.block_columns,
        closing=config.closing_of(prompts[0]),
    )
