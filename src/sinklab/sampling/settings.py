"""All options of decoding in one record: what the command line takes and a run folder keeps.

torch loads where a method needs it: `--help` reads the fields alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from sinklab.sampling.token_ids import token_ids

if TYPE_CHECKING:
    from sinklab.sampling.canvas import Canvas
    from sinklab.sampling.denoisers import Denoiser
    from sinklab.sampling.loop import Step


RULE_NUMBERS = ("alg_temp", "defer_ids")
SCHEDULE_NUMBERS = ("threshold", "factor", "gamma", "eps", "pooled")
CACHE_NUMBERS = ("refresh_every", "cache_keep", "cache_sinks", "cache_neighbours", "cache_protect")


@dataclass(frozen=True)
class DecodingSettings:
    """How a canvas is decoded: names and numbers alone. `values` turns them into the arguments of `denoise`.

    Ids may be given as one int, a list or a tensor; they are kept as tuples. Raises ValueError for ids that are none.
    """

    rule: str = "low_confidence"
    """Which proposals are committed first: low_confidence, maskgit_plus, topk_margin, entropy, random, positional,
    left_to_right or origin."""
    schedule: str | None = None
    """How many are committed at each evaluation: even, timed, threshold, factor or entropy_bound; None is even, but
    timed for the rule origin."""
    cache: str = "none"
    """What is remembered between evaluations: none, prefix, dual or sink_refresh; or, with all but a share of the
    columns evicted, sink, evict, received or random."""
    steps: int | None = None
    """Evaluations in all, for even and timed; None commits one token per step."""
    block_length: int | None = None
    """Write block after block of this many tokens; None writes everything as one block."""
    temperature: float = 0.0
    """0 takes the most probable token; higher is more varied."""
    top_p: float | None = None
    """Draw among the most probable tokens that together pass this probability; None draws among all."""
    top_k: int | None = None
    """Draw among this many of the most probable tokens; None draws among all."""
    alg_temp: float | None = None
    """Draw the positions too, by their scores at this temperature; None takes the best ones."""
    threshold: float | None = None
    """With schedule threshold: commit every candidate at least this confident (0.9 when left out)."""
    factor: float | None = None
    """With schedule factor: Fast-dLLM's factor (1 when left out)."""
    gamma: float | None = None
    """With schedule entropy_bound: the bound in nats (0.1 when left out)."""
    eps: float | None = None
    """With schedule timed: where time ends (0.001 when left out)."""
    pooled: bool = False
    """With schedule timed: rank the candidates of all rows together, as SMDM's sampler does."""
    refresh_every: int | None = None
    """With a cache: recompute everything at every so manieth evaluation of a block; None only where a block begins."""
    cache_keep: float | None = None
    """With a cache that evicts: the share of the columns outside the block that it keeps (0.5 when left out)."""
    cache_sinks: int | None = None
    """With a cache that evicts: most attended columns per layer and key head that are kept first (4 for sink, 0 for the
    others when left out); with sink_refresh: recomputed with the block (8 when left out)."""
    cache_neighbours: int | None = None
    """With a cache that evicts: columns on either side of the block that are kept next (0 when left out)."""
    cache_protect: str | None = None
    """With a cache that evicts: whose sinks are kept, those of the choosing evaluation (now), of the first one of the
    canvas (first) or of the block before (earlier); now when left out."""
    cfg_scale: float = 0.0
    """Classifier-free guidance towards the prompt; 0 is off."""
    suppress_ids: tuple[int, ...] = ()
    """Tokens that are never written (LLaDA's logits_eos_inf, with the id of end of text)."""
    defer_ids: tuple[int, ...] = ()
    """With rule low_confidence: tokens committed last (LLaDA's confidence_eos_eot_inf)."""
    stop_ids: tuple[int, ...] = ()
    """A row is over once one of these stands with no mask to its left; what is open to the right is filled with it."""
    stop_at_eos: bool = False
    """Take the model's end-of-text ids as stop_ids too."""
    text_only: bool = True
    """Leave out ids that are no text (a multimodal model's image codes)."""
    seed: int | None = None
    """Seed of all noise; None draws one from the global generator."""

    def __post_init__(self) -> None:
        for name in ("suppress_ids", "defer_ids", "stop_ids"):
            given = getattr(self, name)
            object.__setattr__(self, name, () if given is None else token_ids(name, given))

    def values(self, **given: Any) -> dict[str, Any]:
        """The arguments of `denoise` but for the generator and the stop ids, names resolved.

        Args:
            given: a rule, schedule or cache, an object or a name, to use in place of the own name.

        Raises ValueError for unknown names (listing the near ones), for numbers that belong to something else, and for
        combinations that make no sense on any canvas.
        """
        from sinklab.sampling.caches import CACHES
        from sinklab.sampling.loop import planned
        from sinklab.sampling.named import made, rule_by_name, schedule_by_name
        from sinklab.sampling.tokens import TokenSampling

        named: dict[str, Any] = {kind: value for kind, value in given.items() if isinstance(value, str)}
        if named:
            return replace(self, **named).values(**{kind: given[kind] for kind in given.keys() - named})
        numbers = {"rule": RULE_NUMBERS, "schedule": SCHEDULE_NUMBERS, "cache": CACHE_NUMBERS}
        for kind, names in numbers.items():
            if given.get(kind) is not None and (surplus := self._numbers(names)):
                raise ValueError(
                    f"where a {kind} object is given, its numbers go into it, got {given[kind]} and {surplus}; leave "
                    f"them out, or name the {kind}."
                )
        sampling = TokenSampling(self.temperature, self.top_p, self.top_k)
        rule = given.get("rule")
        rule = rule_by_name(self.rule, **self._numbers(RULE_NUMBERS)) if rule is None else rule
        plan = self.schedule if given.get("schedule") is None else given["schedule"]
        if isinstance(plan, str) or self._numbers(SCHEDULE_NUMBERS):
            plan = schedule_by_name(plan or planned(rule, None, sampling).name, **self._numbers(SCHEDULE_NUMBERS))
        plan = planned(rule, plan, sampling)
        if not plan.fixed:
            plan.evaluations([], self.steps)
        cache = given.get("cache")
        cache = (
            made("cache", CACHES, self.cache, self._numbers(CACHE_NUMBERS), prefix="cache_") if cache is None else cache
        )
        plain = ("steps", "block_length", "temperature", "top_p", "top_k")
        return {"rule": rule, "schedule": plan, "cache": cache, **{name: getattr(self, name) for name in plain}}

    def decode(
        self,
        denoiser: Denoiser,
        canvas: Canvas,
        *,
        eos_ids: Iterable[int] = (),
        text_vocabulary: int | None = None,
        **given: Any,
    ) -> Iterator[Step]:
        """`denoise` with these settings: the denoiser limited to text, suppressed and guided, the seed sown.

        Args:
            eos_ids: the model's end-of-text ids, for `stop_at_eos`.
            text_vocabulary: ids from here on are no text; None when all are.
            given: a rule, schedule or cache object to use in place of the name.

        Raises ValueError for settings that do not fit together.
        """
        import torch

        from sinklab.sampling.denoisers import guided, limited, suppressed
        from sinklab.sampling.loop import denoise

        values = self.values(**given)
        stop_ids = {*self.stop_ids, *(eos_ids if self.stop_at_eos else ())}
        if self.stop_at_eos and not stop_ids:
            raise ValueError("stop_at_eos needs the id of end of text, but the model names none; give stop_ids.")
        if both := stop_ids & set(self.suppress_ids):
            raise ValueError(f"a suppressed token cannot end a row, got {sorted(both)} as both; choose one.")
        if self.text_only and text_vocabulary is not None:
            denoiser = limited(denoiser, text_vocabulary)
        if self.suppress_ids:
            denoiser = suppressed(denoiser, self.suppress_ids)
        denoiser = guided(denoiser, self.cfg_scale, canvas.prompt_BS, canvas.mask_id)
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        generator = torch.Generator(canvas.ids_BS.device).manual_seed(seed)
        return denoise(denoiser, canvas, generator=generator, stop_ids=stop_ids or None, **values)

    def _numbers(self, names: Iterable[str]) -> dict[str, Any]:
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name in names if (value := getattr(self, name)) != defaults[name]}
