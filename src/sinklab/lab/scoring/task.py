"""One text of a study: its settings, and the checks before anything runs."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, cast

from sinklab.core.subject import Canvas, DecodingSettings, TokenSampling
from sinklab.core.subject.settings import DENOISING_ONLY
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring.prompts import Prompt
from sinklab.lab.scoring.requests import needs_mask, start_token
from sinklab.lab.scoring.writing import (
    WritingRequest,
    canvas_of,
    check_context,
    needs_clean_pass,
)


def check_decoding(
    loaded: Loaded, settings: DecodingSettings, edits: Iterable[Any], *spared: str
) -> None:
    """Refuse settings that this model cannot follow, before anything runs.

    Args:
        loaded: the model.
        settings: of decoding.
        edits: interventions that it writes under.
        spared: fields for models that denoise, which another model may leave aside.

    Raises:
        ValueError: for a diffusion model without a mask token, a cache if edits choose in clean
            passes, and settings that only a diffusion model can follow.
    """
    if loaded.is_diffusion:
        needs_mask(loaded, "writing")
        if settings.cache != "none" and needs_clean_pass(edits):
            raise ValueError(
                "when=clean runs an unedited forward before each edited one, which would "
                f"overwrite what cache={settings.cache} remembers; decode without a cache"
            )
        return
    usual = {one.name: one.default for one in fields(settings)}
    own = [name for name in DENOISING_ONLY if name not in spared]
    surplus = [name for name in own if getattr(settings, name) != usual[name]]
    if surplus:
        raise ValueError(
            f"{loaded.name} is autoregressive and writes token after token: {', '.join(surplus)} "
            "can be set for diffusion models only; leave it out"
        )


@dataclass(frozen=True, eq=False)
class Task:
    """One text of a study: its model, prompt, settings and seed."""

    loaded: Loaded
    prompt: Prompt
    settings: Any
    """`DecodingSettings` with `new_tokens` and `full_forward`, such as those of a study."""
    seed: int
    edits: tuple[Any, ...] = ()
    """Interventions it is written under."""

    @property
    def is_diffusion(self) -> bool:
        """Whether the model denoises; else it writes token after token."""
        return self.loaded.is_diffusion

    @property
    def is_fast(self) -> bool:
        """Whether a trace that is not to be exact may measure a fast decoder."""
        model: Any = self.loaded.model
        may_be = self.is_diffusion and not self.edits and not self.settings.exact
        return may_be and model.denoiser().is_fast

    @property
    def positions(self) -> int:
        """Canvas positions of the finished text."""
        return len(self.prompt.ids) + self.settings.new_tokens

    @property
    def most_steps(self) -> int:
        """Steps that the text may take at most."""
        tokens = self.settings.new_tokens
        if tokens == 0 and self.is_diffusion:
            tokens = self.prompt.ids.count(self.loaded.config.mask_token_id)
        return max(self.settings.steps or 0, tokens)

    def started(self) -> tuple[int, ...]:
        """The ids that the text starts from: an autoregressive model needs one at least.

        Raises:
            ValueError: for an empty prompt if such a model names no beginning or end of text.
        """
        if self.is_diffusion or self.prompt.ids:
            return self.prompt.ids
        return (start_token(self.loaded, "the prompt", "give a prompt"),)

    def canvas(self) -> Canvas:
        """The canvas of a diffusion model. Raises ValueError for a prompt that does not fit."""
        return canvas_of(self.loaded, [WritingRequest(self.prompt.ids)], self.settings.new_tokens)

    def check(self) -> None:
        """Refuse a text that cannot be written, before anything runs.

        Raises:
            ValueError: for a prompt that does not fit and settings that the decoder refuses.
        """
        settings = self.settings
        model = cast(Any, self.loaded.model)
        check_decoding(self.loaded, settings, self.edits)
        if self.is_diffusion:
            if settings.full_forward:
                raise ValueError(
                    f"full_forward is a choice for autoregressive models, and {self.loaded.name} "
                    "denoises; leave it out"
                )
            model.denoise(self.canvas().to(model.device), settings)
            return
        if settings.new_tokens == 0:
            raise ValueError(
                f"0 new tokens fill the masks of a prompt, and {self.loaded.name}, which is "
                "autoregressive, has none; ask for new tokens"
            )
        check_context(self.loaded, self.positions)
        self.started()
        TokenSampling(settings.temperature, settings.top_p, settings.top_k)
