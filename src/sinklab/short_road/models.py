"""What `sinklab.load` returns: a loaded model that answers common questions by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from html import escape
from typing import TYPE_CHECKING, Any, cast

from sinklab.checkpoints import loading
from sinklab.errors import known_fields
from sinklab.probing.intervention import Intervention

if TYPE_CHECKING:
    from sinklab.scoring.settings import Scored
    from sinklab.short_road.runs import Run


class Loss(float):
    """Nats per token."""

    scored: Scored
    """The score that it is made of, with its Monte Carlo error, and the dose of the edits."""


@dataclass(frozen=True)
class LM(loading.Loaded):
    """A model ready to use; all that takes a :class:`~sinklab.checkpoints.Loaded` takes it."""

    def __repr__(self) -> str:
        model, config = self.model, getattr(self.model.config, "backbone", self.model.config)
        shape = f"{config.num_hidden_layers} layers × {config.num_attention_heads} heads"
        kind = f"{self.family}, {shape}, {model.num_parameters() / 1e6:,.1f} M parameters"
        sink = f", sink_kind={model.config.sink_kind}" if getattr(model.config, "sink_count", 0) else ""
        return f"LM {self.name[-100:]!r} ({kind}, {str(model.dtype).removeprefix('torch.')} on {model.device}{sink})"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    def as_module(self) -> Any:
        """What the core works on when it is given this: `trace`, `intervene` and `denoise` ask for it."""
        return self.model

    def watch(
        self,
        prompts: str | Sequence[str],
        new_tokens: int = 64,
        *,
        progress: Callable[[str], object] | None = None,
        **settings: Any,
    ) -> Run:
        """Write a text under observation; the run, as `sinklab.open_run` opens one.

            run = lm.watch("The house stood", 32)

        It lies in a temporary folder, which is deleted with the object, until ``run.save(folder)``.

        Args:
            prompts: a text to continue, or several, a sample each.
            new_tokens: to write behind each.
            progress: called with a short text at each stage.
            settings: other fields of :class:`sinklab.studies.trace.study.StudySettings`: ``edits``, ``statistics``,
                ``seed``, ``rule``, …; the run is that of ``sinklab trace`` with the same ones.

        Raises:
            ValueError: for an unknown field, a prompt that does not fit, and what the model or the decoder refuse.
        """
        from sinklab.short_road.runs import in_memory
        from sinklab.studies.trace.study import StudySettings, study

        known_fields("watch", settings, (one.name for one in fields(StudySettings)))
        chosen = StudySettings(prompts=cast(Any, prompts), new_tokens=new_tokens, **settings)
        return in_memory(lambda folder: study(self, folder, chosen, progress=progress))

    def generate(
        self, prompt: str | Sequence[int], new_tokens: int | None = None, *, chat: bool = False, **options: Any
    ) -> str:
        """What the model writes behind a prompt, the prompt included; with `chat` the answer alone.

            lm.generate("The house", 32, temperature=0.7)

        Args:
            prompt: text, or token ids.
            new_tokens: to write; 0 fills the masks of the prompt. None: 64, or with DiffusionGemma, which writes whole
                canvases, what its generation config says.
            chat: put the prompt into the model's chat format.
            options: those of the model's own way to write: of ``lm.model.generate``, for a model that fills masks
                (``schedule=``, ``seed=``, …) and for an autoregressive one (transformers'); the fields of
                :class:`sinklab.scoring.Renoising` for DiffusionGemma.

        Raises:
            ValueError: for a chat format that is absent, and for settings that make no sense.
            TypeError: for an option that does not exist.
        """
        import torch

        from sinklab.scoring import Renoising, renoise
        from sinklab.scoring.prompts import encode
        from sinklab.studies.base import text_of

        ids, model = encode(self, prompt, chat).ids if isinstance(prompt, str) else prompt, cast(Any, self.model)
        if new_tokens == 0 and not hasattr(model, "denoise"):
            raise ValueError(f"0 new tokens fill the masks of a prompt, and {self.name} has none; leave new_tokens out")
        ids_1P = torch.tensor([[*ids]], dtype=torch.int64, device=model.device)
        length = {} if new_tokens is None else {"max_new_tokens": new_tokens or None}
        if self.family == "diffusion" and not hasattr(model, "denoise"):
            *_, last = renoise(model, ids_1P, Renoising.of(model, **length, **options))
            written_1S = last.ids_BS
        else:
            real = {"attention_mask": torch.ones_like(ids_1P)}
            written_1S = model.generate(ids_1P, **{"max_new_tokens": 64, **length, **real, **options})
        return text_of(self, written_1S[0, len(ids) if chat else 0 :])

    def loss(
        self, text: str | Sequence[int], *, edits: Sequence[Intervention | str] = (), samples: int = 32, seed: int = 0
    ) -> Loss:
        """What a text costs, in nats per token: the negative of its log-likelihood, with or without edits.

            lm.loss(text, edits=[MaskSinks(k=1, layers=[2], heads=[3])]) - lm.loss(text)

        A diffusion model's is the Monte Carlo bound of :func:`sinklab.scoring.rolling` over random masks, the same
        masks whatever the edits are, so that differences are paired. An autoregressive model's is exact, given the
        beginning (or else end) of text. Edits that choose by attention do so in a clean pass over the same text; what
        they took away is ``lm.loss(…).scored.dose``.

        Args:
            text: text, or token ids.
            edits: interventions, or their text such as ``"mask_sinks:k=1"``.
            samples: masks of a diffusion model; more of them, less noise.
            seed: of the masks.

        Raises:
            ValueError: for an empty text, a model without mask token or (for text) tokenizer, and edits that do not
                fit a text that is read once.
        """
        from sinklab.registry import interventions
        from sinklab.scoring import LikelihoodSettings, rolling, score
        from sinklab.scoring.requests import limit_of

        ids = list(self.needed_tokenizer()(text)["input_ids"] if isinstance(text, str) else text)
        how, given = LikelihoodSettings(samples=samples, seed=seed), [interventions.parse(edit) for edit in edits]
        # a start token is given, and not what the text costs
        start = ids[: ids[:1] == [self.special.bos]]
        if start and 1 < len(ids) <= limit_of(self):
            (scored,) = score(self, [(start, ids[1:])], how, edits=given)
        else:
            scored = rolling(self, ids[len(start) :], how, edits=given)
        found = Loss(-scored.logprob / scored.tokens)
        found.scored = scored
        return found

    def strength(
        self, texts: str | None = None, *, progress: Callable[[str], object] | None = None, **settings: Any
    ) -> Run:
        """How strong the model's sinks are, by the protocol of Gu et al. (arXiv 2410.10781); a run in memory.

            lm.strength().table("summary")[["input", "start", "ratio", "sink"]]

        ``sink`` is the share of heads whose first token gets more than ``epsilon`` of the attention.

        Args:
            texts: corpus of natural text, such as a .jsonl.gz file; an excerpt of the package when left out.
            progress: called with a short text at each stage.
            settings: other fields of :class:`sinklab.studies.strength.StrengthSettings`: ``rows``, ``length``,
                ``epsilon``, ``ratios``, ``seed``, …

        Raises:
            ValueError: for an unknown field, a model without tokenizer, and texts that do not fill a sequence.
        """
        from sinklab.short_road.runs import in_memory
        from sinklab.studies.strength.study import Strength, StrengthSettings

        known_fields("strength", settings, (one.name for one in fields(StrengthSettings)))
        chosen = StrengthSettings(texts=texts, **settings)
        return in_memory(lambda folder: Strength()(self, folder, chosen, progress=progress))


@wraps(loading.load)
def load(*args: Any, **settings: Any) -> LM:  # noqa: D103 (the docstring is the wrapped one)
    loaded = loading.load(*args, **settings)
    return LM(**{field.name: getattr(loaded, field.name) for field in fields(loaded)})
