"""All options of decoding in one record: those that the command line takes and a run folder keeps.

Texts and numbers alone, which a run folder can hold and `--help` reads without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.core.errors import Checked, limited, whole_numbers
from sinklab.core.registry import Registry, caches, schedules, unmasking_rules

if TYPE_CHECKING:
    from sinklab.core.subject.canvas import Canvas
    from sinklab.core.subject.denoisers import Denoiser
    from sinklab.core.subject.loop import Step

DENOISING_ONLY = ("rule", "schedule", "cache", "steps", "block_length", "cfg_scale")
"""Fields that mean nothing to a model that writes token after token."""


@dataclass(frozen=True)
class DecodingSettings(Checked):
    """Settings of decoding a canvas.

    A rule, schedule or cache is the text of a registered one with its fields, such as
    ``threshold:threshold=0.8``; an object becomes its text. Raises ValueError for an object whose
    class is not registered.
    """

    rule: str = "low_confidence"
    """Unmasking rule: which proposed tokens are committed first. `sinklab list` prints all; fields
    may follow, as in low_confidence:defer_ids=3+4 (ids committed last).
    """
    schedule: str | None = None
    """How many tokens are committed at each evaluation: even, timed or another registered one; None
    is even, but timed for the rule origin. Fields may follow, as in timed:eps=1e-5.
    """
    cache: str = "none"
    """KV cache between evaluations: none or a registered one, with its fields."""
    steps: int | None = None
    """Total number of evaluations, for schedules that take one; None commits one token per step."""
    block_length: int | None = None
    """Tokens per block (semi-autoregressive decoding); None decodes everything as one block."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: float | None = None
    """Nucleus sampling: sample from the most probable tokens whose total exceeds this; None samples
    from all.
    """
    top_k: int | None = None
    """Sample from this many of the most probable tokens; None samples from all."""
    cfg_scale: float = 0.0
    """Classifier-free guidance towards the prompt; 0 is off."""
    suppress_ids: tuple[int, ...] = limited((), read=whole_numbers)
    """Token ids that are never written (LLaDA's logits_eos_inf, with the id of end of text)."""
    stop_ids: tuple[int, ...] = limited((), read=whole_numbers)
    """Stop tokens: a row ends once one is committed with no mask to its left, and is filled with it
    to the right.
    """
    stop_at_eos: bool = False
    """Take the model's end-of-text ids as stop_ids too."""
    text_only: bool = True
    """Never write ids that are not text (a multimodal model's image codes)."""
    seed: int | None = None
    """Random seed; None draws one from the global generator."""

    def __post_init__(self) -> None:
        chosen: tuple[tuple[str, Any, Registry], ...] = (
            ("rule", self.rule, unmasking_rules),
            ("schedule", self.schedule, schedules),
            ("cache", self.cache, caches),
        )
        for name, value, registry in chosen:
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, registry.as_text(registry.parse(value)))
        super().__post_init__()

    def values(self) -> dict[str, Any]:
        """The rule, schedule and cache as objects. Raises ValueError for unknown names, and for
        combinations that make no sense on any canvas.
        """
        from sinklab.core.subject.denoisers import cache_of
        from sinklab.core.subject.rules import rule_of
        from sinklab.core.subject.schedules import schedule_of
        from sinklab.core.subject.tokens import TokenSampling

        rule = rule_of(self.rule)
        sampling = TokenSampling(self.temperature, self.top_p, self.top_k)
        schedule = schedule_of(self.schedule, rule, sampling)
        if not schedule.fixed:
            schedule.evaluations([], self.steps)
        return {"rule": rule, "schedule": schedule, "cache": cache_of(self.cache)}

    def decode(
        self,
        denoiser: Denoiser,
        canvas: Canvas,
        *,
        eos_ids: Iterable[int] = (),
        text_vocabulary: int | None = None,
        **chosen: Any,
    ) -> Iterator[Step]:
        """`denoise` with these settings, guided and with the seed sown.

        Args:
            eos_ids: the model's end-of-text ids, for `stop_at_eos`.
            text_vocabulary: ids from here on are no text; None when all are.
            chosen: a rule, schedule or cache in place of the one set, an object or a text.
        """
        import torch

        from sinklab.core.subject.denoisers import guided
        from sinklab.core.subject.loop import denoise

        stop_ids = set(self.stop_ids)
        if self.stop_at_eos:
            stop_ids.update(eos_ids)
        if self.stop_at_eos and not stop_ids:
            raise ValueError(
                "stop_at_eos needs the id of end of text, but the model names none; give stop_ids."
            )
        both = stop_ids & set(self.suppress_ids)
        if both:
            raise ValueError(
                f"a suppressed token cannot end a row, got {sorted(both)} as both; choose one."
            )
        if not self.text_only:
            text_vocabulary = None
        if self.cfg_scale:
            denoiser = guided(denoiser, self.cfg_scale, canvas.prompt_BS, canvas.mask_id)
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        values: dict[str, Any] = {
            "rule": self.rule,
            "schedule": self.schedule,
            "cache": self.cache,
        }
        values |= {name: value for name, value in chosen.items() if value is not None}
        return denoise(
            denoiser,
            canvas,
            steps=self.steps,
            block_length=self.block_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            generator=torch.Generator(canvas.ids_BS.device).manual_seed(seed),
            stop_ids=stop_ids or None,
            suppress_ids=self.suppress_ids,
            text_vocabulary=text_vocabulary,
            **values,
        )
