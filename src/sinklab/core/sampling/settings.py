"""All options of decoding in one record: those that the command line takes and a run folder keeps.

torch loads when a method needs it: `--help` reads the fields alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from sinklab.core.errors import Checked, token_ids
from sinklab.core.registry import Registry, caches, schedules, unmasking_rules

if TYPE_CHECKING:
    from sinklab.core.sampling.canvas import Canvas
    from sinklab.core.sampling.denoisers import Denoiser
    from sinklab.core.sampling.loop import Step


def _denoising(default: Any = None) -> Any:
    """A field that means something to a model that denoises alone."""
    return field(default=default, metadata={"denoising": True})


@dataclass(frozen=True)
class DecodingSettings(Checked):
    """Settings of decoding a canvas: texts and numbers alone. `values` turns them into the
    arguments of `denoise`.

    A rule, schedule or cache is the text of a registered one, with its fields:
    ``threshold:threshold=0.8``. An object may be given too; its text is kept. Ids may be one int, a
    list or a tensor; they are kept as tuples. Raises ValueError for ids that are none, and for an
    object whose class is not registered.
    """

    rule: str = _denoising("low_confidence")
    """Unmasking rule: which proposed tokens are committed first: low_confidence, maskgit_plus,
    topk_margin, entropy, random, positional, left_to_right or origin, or a registered one; its
    fields may follow, as in entropy:alg_temp=0.1 (positions are drawn too) or
    low_confidence:defer_ids=3+4 (ids committed last).
    """
    schedule: str | None = _denoising()
    """How many tokens are committed at each evaluation: even, timed, alpha, threshold, factor or
    entropy_bound, and dynamic or editing for models that attend in blocks; None is even, but timed
    for the rule origin. Fields may follow, as in threshold:threshold=0.8."""
    cache: str = _denoising("none")
    """KV cache between evaluations: none, prefix or dual, or a registered one; its fields may
    follow, as in dual:refresh_every=4.
    """
    steps: int | None = _denoising()
    """Total number of evaluations, for even, timed and alpha; None commits one token per step."""
    block_length: int | None = _denoising()
    """Tokens per block (semi-autoregressive decoding); None decodes everything as one block."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: float | None = None
    """Nucleus sampling: sample from the most probable tokens whose total exceeds this; None samples
    from all.
    """
    top_k: int | None = None
    """Sample from this many of the most probable tokens; None samples from all."""
    cfg_scale: float = _denoising(0.0)
    """Classifier-free guidance towards the prompt; 0 is off."""
    suppress_ids: tuple[int, ...] = ()
    """Token ids that are never written (LLaDA's logits_eos_inf, with the id of end of text)."""
    stop_ids: tuple[int, ...] = ()
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
        chosen: tuple[Any, ...] = (self.rule, self.schedule, self.cache)
        for (kind, registry), value in zip(_REGISTRIES.items(), chosen, strict=True):
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, kind, registry.as_text(registry.parse(value)))
        given: dict[str, Any] = {
            "suppress_ids": self.suppress_ids,
            "stop_ids": self.stop_ids,
        }
        for name, ids in given.items():
            if ids is None:
                ids = ()
            object.__setattr__(self, name, token_ids(name, ids))
        super().__post_init__()

    @classmethod
    def denoising_only(cls) -> tuple[str, ...]:
        """Fields that mean nothing to a model that writes token after token."""
        return tuple(one.name for one in fields(DecodingSettings) if one.metadata.get("denoising"))

    def values(
        self, *, rule: Any = None, schedule: Any = None, cache: Any = None
    ) -> dict[str, Any]:
        """The arguments of `denoise` but for the generator and the stop ids, texts parsed.

        Args:
            rule, schedule, cache: an object or a text, to use in place of the own one.

        Raises ValueError for unknown names (listing the near ones), and for combinations that make
        no sense on any canvas.
        """
        from sinklab.core.sampling.denoisers import cache_of
        from sinklab.core.sampling.loop import planned
        from sinklab.core.sampling.rules import rule_of
        from sinklab.core.sampling.tokens import TokenSampling

        chosen = {"rule": rule, "schedule": schedule, "cache": cache}
        for kind, value in chosen.items():
            if value is None:
                chosen[kind] = getattr(self, kind)
        sampling = TokenSampling(self.temperature, self.top_p, self.top_k)
        rule = rule_of(chosen["rule"])
        plan = planned(rule, chosen["schedule"], sampling)
        if not plan.fixed:
            plan.evaluations([], self.steps)
        return {
            "rule": rule,
            "schedule": plan,
            "cache": cache_of(chosen["cache"]),
            "steps": self.steps,
            "block_length": self.block_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }

    def decode(
        self,
        denoiser: Denoiser,
        canvas: Canvas,
        *,
        eos_ids: Iterable[int] = (),
        text_vocabulary: int | None = None,
        **chosen: Any,
    ) -> Iterator[Step]:
        """`denoise` with these settings: the denoiser limited to text, suppressed and guided, the
        seed sown.

        Args:
            eos_ids: the model's end-of-text ids, for `stop_at_eos`.
            text_vocabulary: ids from here on are no text; None when all are.
            chosen: rule, schedule and cache, as `values` takes them.

        Raises ValueError for settings that do not fit together.
        """
        import torch

        from sinklab.core.sampling.denoisers import guided, suppressed, text_only
        from sinklab.core.sampling.loop import denoise

        values = self.values(**chosen)
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
        if self.text_only and text_vocabulary is not None:
            denoiser = text_only(denoiser, text_vocabulary)
        if self.suppress_ids:
            denoiser = suppressed(denoiser, self.suppress_ids)
        if self.cfg_scale:
            denoiser = guided(denoiser, self.cfg_scale, canvas.prompt_BS, canvas.mask_id)
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        generator = torch.Generator(canvas.ids_BS.device).manual_seed(seed)
        return denoise(denoiser, canvas, generator=generator, stop_ids=stop_ids or None, **values)


_REGISTRIES: dict[str, Registry] = {"rule": unmasking_rules, "schedule": schedules, "cache": caches}
