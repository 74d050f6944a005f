"""Models that answer common questions by themselves, as `sinklab.load` and `sinklab.wrap` return
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, wraps
from html import escape
from typing import TYPE_CHECKING, Any, Literal, cast

from sinklab.core.errors import known_fields
from sinklab.core.instrument.edits.intervention import Intervention
from sinklab.lab.checkpoints import loading, wrapping
from sinklab.lab.checkpoints.families import known_families

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from sinklab.lab.scoring.settings import Scored
    from sinklab.lab.short_road.compare import Comparison
    from sinklab.lab.short_road.runs import Run


class Loss(float):
    """Nats per token."""

    scored: Scored
    """The score that it is made of, with its Monte Carlo error, and the dose of the edits."""


@dataclass(frozen=True)
class LM(loading.Loaded):
    """A model ready to use; all that takes a :class:`~sinklab.lab.checkpoints.Loaded` takes it."""

    again: Callable[[], loading.Loaded] | None = field(default=None, repr=False, compare=False)
    """Loads it once more, for a worker; None for a model that was not loaded but wrapped."""

    def __repr__(self) -> str:
        model, config = self.model, self.backbone
        shape = f"{config.num_hidden_layers} layers × {config.num_attention_heads} heads"
        kind = f"{self.family}, {shape}, {model.num_parameters() / 1e6:,.1f} M parameters"
        sink = (
            f", sink_kind={model.config.sink_kind}"
            if getattr(model.config, "sink_count", 0)
            else ""
        )
        return (
            f"LM {self.name[-100:]!r} ({kind}, {str(model.dtype).removeprefix('torch.')} on "
            f"{model.device}{sink})"
        )

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    def as_module(self) -> Any:
        """The bare model, for functions of the core: `trace`, `intervene` and `denoise` ask for
        it.
        """
        return self.model

    def watch(
        self,
        prompts: str | Sequence[str],
        new_tokens: int = 64,
        *,
        progress: Callable[[str], object] | None = None,
        workers: int = 0,
        gpus_per_worker: int = 0,
        **settings: Any,
    ) -> Run:
        """Write a text under observation; the run, as `sinklab.open_run` opens one.

            run = lm.watch("The house stood", 32)

        It lies in a temporary folder, which is deleted with the object, until ``run.save(folder)``.

        Args:
            prompts: a text to continue, or several, a sample each.
            new_tokens: to write behind each; 0 fills the masks of the prompts.
            progress: called with a short text at each stage.
            workers: processes, by Ray, that load the model too and share the prompts; the run is
                the same.
            gpus_per_worker: GPUs that each of them has.
            settings: other fields of :class:`sinklab.lab.studies.trace.study.StudySettings`:
                ``edits``, ``statistics``, ``seed``, ``rule``, …; the run is that of ``sinklab
                trace`` with the same ones.

        Raises:
            ValueError: for an unknown field, a prompt that does not fit, settings that the model
                or the decoder refuse, and workers without Ray or for a wrapped model.
        """
        from sinklab.lab.short_road.runs import in_memory
        from sinklab.lab.studies.trace.study import StudySettings, study

        known_fields("watch", settings, (one.name for one in fields(StudySettings)))
        if self._continues_by_rereading:
            settings.setdefault("full_forward", True)
        if not getattr(self.model.config, "gives_states", True):
            without = tuple(one for one in StudySettings.statistics if one != "massive_activations")
            settings.setdefault("statistics", without)
        chosen = StudySettings(prompts=cast(Any, prompts), new_tokens=new_tokens, **settings)
        how: dict[str, Any] = {"workers": workers, "gpus_per_worker": gpus_per_worker}
        return in_memory(lambda folder: study(self, folder, chosen, progress=progress, **how))

    def generate(
        self,
        prompt: str | Sequence[int],
        new_tokens: int | None = None,
        *,
        chat: bool = False,
        **options: Any,
    ) -> str:
        """Continue a prompt; return the whole text, or with `chat` the answer alone.

            lm.generate("The house", 32, temperature=0.7)

        Args:
            prompt: text, or token ids.
            new_tokens: to write; 0 fills the masks of the prompt. None: 64, or with DiffusionGemma,
                which writes whole canvases, the number of its generation config.
            chat: put the prompt into the model's chat format.
            options: those of the model's own way to write: of ``lm.model.generate``, for a model
                that fills masks (``schedule=``, ``seed=``, …) and for an autoregressive one
                (transformers'); the fields of :class:`sinklab.extras.zoo.Renoising` for
                DiffusionGemma.

        Raises:
            ValueError: for several prompts, a chat format that is absent, and for settings that
                make no sense.
            TypeError: for an option that does not exist.
        """
        import torch

        from sinklab.lab.scoring.prompts import encode
        from sinklab.lab.scoring.writing import closed
        from sinklab.lab.studies.about import text_of

        model = cast(Any, self.model)
        ids = encode(self, prompt, chat).ids if isinstance(prompt, str) else prompt
        if any(isinstance(one, str) for one in ids):
            raise ValueError(
                f"generate continues one prompt, a text or token ids, got {len(ids)} texts: call "
                "it for each, or watch them together"
            )
        if new_tokens == 0:
            if self.family != "diffusion" or not hasattr(model, "denoise"):
                fact = f"0 new tokens fill the masks of a prompt, and {self.name} has none"
                raise ValueError(f"{fact}; leave new_tokens out")
            ids = closed(model.config, ids)
        ids_1P = torch.tensor([[*ids]], dtype=torch.int64, device=model.device)
        length = {} if new_tokens is None else {"max_new_tokens": new_tokens or None}
        with self.few_threads():
            if self._continues_by_rereading:
                written_1S = self._reread(ids, new_tokens or 64, options)
            elif self.family == "diffusion" and not hasattr(model, "denoise"):
                family: Any = known_families()[self.published_family]
                written_1S = family.generate(model, ids_1P, **length, **options)
            else:
                real = {"attention_mask": torch.ones_like(ids_1P)}
                written_1S = model.generate(
                    ids_1P, **{"max_new_tokens": 64, **length, **real, **options}
                )
        return text_of(self, written_1S[0, len(ids) if chat else 0 :])

    @property
    def _continues_by_rereading(self) -> bool:
        """Whether this is a wrapped autoregressive module, which reads the whole text again for
        every token.
        """
        return self.family == "autoregressive" and hasattr(self.model, "foreign")

    def _reread(self, ids: Sequence[int], new_tokens: int, options: dict[str, Any]) -> Any:
        """Ids (1, S) of a text continued token after token; options are fields of
        `DecodingSettings`.
        """
        from sinklab.core.subject.settings import DecodingSettings
        from sinklab.lab.scoring.writing import Writing, WritingRequest

        known_fields("generate", options, (one.name for one in fields(DecodingSettings)))
        request = WritingRequest(tuple(ids))
        texts = Writing(self, [request], DecodingSettings(**options), new_tokens, full_forward=True)
        with texts.begin() as writer:
            for _ in writer.steps():
                pass
        return writer.ids_BS

    def loss(
        self,
        text: str | Sequence[int],
        *,
        edits: Sequence[Intervention | str] | str = (),
        samples: int = 32,
        seed: int = 0,
    ) -> Loss:
        """Loss of a text, in nats per token: the negative of its log-likelihood, with or without
        edits.

            lm.loss(text, edits=[MaskSinks(k=1, layers=[2], heads=[3])]) - lm.loss(text)

        A diffusion model's is the Monte Carlo bound of :func:`sinklab.lab.scoring.rolling` over
        random masks, the same masks whatever the edits are, so that differences are paired. An
        autoregressive model's is exact, given the beginning (or else end) of text, or if the model
        names neither, the first token. Edits that choose by attention do so in a clean pass over
        the same text; the attention they removed is ``lm.loss(…).scored.dose``.

        Args:
            text: text, or token ids.
            edits: interventions, or their text such as ``"block_keys:keys=top:k=1"``; a single text
                is one edit.
            samples: masks of a diffusion model; more of them, less noise.
            seed: of the masks.

        Raises:
            ValueError: for an empty text, text of a model without tokenizer that is no ids, a model
                without mask token, and edits that do not fit a text that is read once.
        """
        from sinklab.lab.scoring import LikelihoodSettings, rolling, score
        from sinklab.lab.scoring.arms import without_closing
        from sinklab.lab.scoring.prompts import ids_to_score
        from sinklab.lab.scoring.requests import digest, limit_of

        # of [CLS] … [SEP] the scores put the second behind every text
        ids = without_closing(self.model, ids_to_score(self, text))
        how = LikelihoodSettings(samples=samples, seed=seed)
        given = [edits] if isinstance(edits, str) else edits
        # a start token is given and not part of the loss; so is the first one of a model that names
        # none
        is_given = ids[:1] == [self.special.bos]
        if (
            self.family == "autoregressive"
            and self.special.bos is None
            and self.special.eos is None
        ):
            is_given = True
        start = ids[:is_given]
        with self.few_threads():
            if start and 1 < len(ids) <= limit_of(self):
                # masks belong to the text, not to its start
                groups = [digest(ids, (0,))]
                (scored,) = score(self, [(start, ids[1:])], how, groups=groups, edits=given)
            else:
                scored = rolling(self, ids[len(start) :], how, edits=given)
        found = Loss(-scored.logprob / scored.tokens)
        found.scored = scored
        return found

    def compare(
        self,
        arms: Mapping[str, Any],
        texts: Sequence[str | Sequence[int]] | None = None,
        *,
        read: str | Sequence[int] = "all",
        samples: int = 32,
        seed: int = 0,
        controls: bool = False,
        progress: Callable[[str], object] | None = None,
    ) -> Comparison:
        """Score texts under several arms, each a set of edits, and with no edit: what each costs.

            sinks = TopKeys(1)
            costs = lm.compare({"sinks": BlockKeys(sinks), "random": BlockKeys(Random(sinks))})
            costs.summary()

        All arms read the same masks, so that their differences are paired. Losses are those of
        :meth:`loss`, token by token; a causal model is given the first token of each text. The
        result has ``summary()``, ``plot()`` and ``to_pandas()``.

        Args:
            arms: name -> an edit, its text, or several that act together.
            texts: texts, or lists of token ids, equal ones once; eight stretches of the excerpt in
                the package, of 64 tokens each, when left out.
            read: positions of the tokens whose loss counts: "all", "from32" (from position 32 on)
                or numbers.
            samples: masks of a text for a diffusion model.
            seed: of masks, and of random controls.
            controls: score every arm on two models that learned nothing too, this one with shuffled
                weights and with fresh ones.
            progress: called with a short text for each text.

        Raises:
            ValueError: for no arms, a text that does not fit the model, edits that do not fit a
                text that is read once, and losses that are NaN.
        """
        from sinklab.lab.short_road.compare import compare

        how: dict[str, Any] = {"read": read, "samples": samples, "seed": seed}
        with self.few_threads():
            return compare(self, arms, texts, controls=controls, progress=progress, **how)


@wraps(loading.load)
def load(*args: Any, **settings: Any) -> LM:  # noqa: D103 (the docstring is the wrapped one)
    if args and hasattr(args[0], "forward"):
        raise TypeError(
            f"load reads a model by its name or folder, got a {type(args[0]).__name__} that is "
            "there already; use sinklab.wrap(model, tokenizer)"
        )
    loaded = loading.load(*args, **settings)
    parts = {one.name: getattr(loaded, one.name) for one in fields(loaded)}
    return LM(**parts, again=partial(loading.load, *args, **settings))


def wrap(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None = None,
    mask_id: int | None = None,
    kind: Literal["autoregressive", "diffusion", "masked"] | None = None,
) -> LM:
    """Wrap any module that maps token ids (B, S) to logits (B, S, V) in an object like those of
    `load`.

        lm = sinklab.wrap(BertForMaskedLM.from_pretrained("…"), tokenizer)
        lm.watch("Paris is the capital of", 8).explore()

    The module is put into evaluation mode and otherwise unchanged. Its attention must go through
    torch's ``scaled_dot_product_attention`` or the attention functions of transformers. It takes
    ``attention_mask`` if texts of unequal length are to ride in one batch.

    Args:
        model: a model of transformers, or any other module.
        tokenizer: of its texts; without one prompts are token ids ("5 17 3") and pages show ids.
        mask_id: id of [MASK]; when left out, that of tokenizer or config.
        kind: ``"autoregressive"`` reads from left to right; ``"masked"`` fills masks between [CLS]
            and [SEP], which it always sees; ``"diffusion"`` fills masks, with nothing around a
            text. When left out, the kind of the class (…ForCausalLM, …ForMaskedLM).

    Raises:
        ValueError: if the kind cannot be told or a forward disproves it, a model that fills masks
            names no [MASK], an encoder-decoder, and a module that does not give logits or, without
            a config, attends unseen.
    """
    if isinstance(model, loading.Loaded):
        raise TypeError(
            f"wrap takes a bare module, but {model.name} answers by itself already; use it as it is"
        )
    wrapping.check_module(model)
    chosen = wrapping.kind_of(model) if kind is None else kind
    sizes = wrapping.sizes_of(model) or _looked_at(model.eval())
    parts = wrapping.wrapped(model, tokenizer, mask_id, chosen, sizes)
    if parts["family"] == "diffusion" and parts["special"].mask is None:
        raise ValueError(
            f"{type(model).__name__} is to fill masks, but neither its tokenizer nor its config "
            "says which id is [MASK]; pass mask_id="
        )
    return LM(**parts, name=_name_of(model), revision=None)


def _name_of(model: nn.Module) -> str:
    """The folder or Hub name that a model of transformers was read from, else its class."""
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def _looked_at(model: nn.Module) -> dict[str, int]:
    """Sizes of a module without a config: those that one forward over four tokens shows."""
    import torch

    from sinklab.core.instrument.tracing import trace
    from sinklab.lab.checkpoints.wrapped import logits_of

    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    ids_1S = torch.zeros(1, 4, dtype=torch.int64, device=device)
    with torch.inference_mode(), trace(model) as recording:
        logits_1SV = logits_of(model(ids_1S), ids_1S, model)
    shape = recording.array("received").shape
    widths = [one.embedding_dim for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    sizes = {
        "num_hidden_layers": shape[2],
        "num_attention_heads": shape[3],
        "vocab_size": logits_1SV.shape[-1],
    }
    # its layers need not be items of a list, whose outputs are its hidden states
    return sizes | {"hidden_size": widths[0] if widths else 0, "gives_states": False}
