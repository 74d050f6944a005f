"""The lm-eval model «sinklab»: any loaded model, diffusion or autoregressive, any decoder, any
intervention.

Importing this module registers it:
`lm_eval --model sinklab --model_args pretrained=tiny,mask_sinks=5`.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from sinklab.core.errors import known_fields
from sinklab.lab.checkpoints import Loaded, load
from sinklab.lab.data import row_start
from sinklab.lab.scoring.prompts import in_chat
from sinklab.lab.scoring.requests import by_last_query, limit_of, scoring_edits
from sinklab.lab.scoring.task import check_decoding
from sinklab.lab.studies import Row, nothing
from sinklab.lab.studies.benchmarks.requests import ANSWERS, Part, Place, place_of
from sinklab.lab.studies.benchmarks.study import FEWSHOT_SEED, TWO_STAGE, EvalSettings
from sinklab.lab.studies.benchmarks.two_stage import BATCH, answered

READING = ("dtype", "device", "device_map", "revision", "sink")


PART = 32
"""Documents of a part: an interrupted run makes one anew."""


@register_model("sinklab")
class SinklabLM(TemplateLM):
    """One model for all of lm-eval's requests, each answered once.

    Answers depend neither on the batch they are written in (see `needs_own_batch`) nor on the
    number of processes; what is answered is not run again.
    """

    def __init__(
        self,
        pretrained: str | Loaded = "tiny",
        *,
        settings: EvalSettings | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **given: Any,
    ) -> None:
        """Make it from a loaded model, or a name with its arguments.

        Args:
            pretrained: a loaded model, or an argument of `sinklab.load`.
            settings: of the run; else made from `given`.
            batch_size: prompts that are written together; "auto" is the default number.
            max_batch_size: not used.
            given: fields of `EvalSettings`, and dtype, device, device_map, revision,
                sink.

        Raises:
            ValueError: for an unknown argument (with the near one) and anything that this model
                cannot do.
        """
        super().__init__()
        reading = {name: given.pop(name) for name in READING if name in given}
        if reading.get("device") == "cuda:0" and not torch.cuda.is_available():
            # the default of lm-eval's command line
            del reading["device"]
        if settings is None:
            own = (field.name for field in fields(EvalSettings))
            known_fields("the model sinklab", given, ["pretrained", *READING, *own])
            if batch_size not in (None, "auto"):
                given.setdefault("batch", int(str(batch_size)))
            settings = EvalSettings(**given)
        elif given:
            raise ValueError(f"give settings or their fields, not both: got {', '.join(given)}")
        if not isinstance(pretrained, Loaded):
            pretrained = load(pretrained, **reading)
        self.loaded = pretrained
        self.settings = settings
        self.is_diffusion = self.loaded.is_diffusion
        self.edits = settings.interventions()
        how = {"is_diffusion": self.is_diffusion, "over_steps": True}
        self.scored_edits = scoring_edits(self.edits, **how)
        """Edits of likelihood requests."""
        if not self.is_diffusion:
            self.edits = by_last_query(self.edits)
        self.tokenizer = self.loaded.needed_tokenizer()
        if settings.chat and self.tokenizer.chat_template is None:
            raise ValueError(f"{self.loaded.name} has no known chat format; leave out --chat")
        # blocks are the default protocol, also of a run over several models
        check_decoding(self.loaded, settings, self.edits, "block_length")
        if self.is_diffusion:
            settings.values()
        self.tasks: dict[str, Any] = {}
        """Tasks that a run asks of it, as lm-eval's `evaluate` takes them."""
        self.asked: list[list[Any]] = []
        """Their requests in parts."""
        self.told: Part = {}
        """Answers so far."""
        self.spent: dict[str, tuple[float, int]] = {}
        """Task -> seconds that its answers took in this process, and to how many documents."""

    # -- who and where

    @property
    def eot_token_id(self) -> int | None:
        if self.loaded.special.eos is None:
            return self.tokenizer.eos_token_id
        return self.loaded.special.eos

    @property
    def max_length(self) -> int:
        """Positions that context and continuation have together."""
        return limit_of(self.loaded)

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name.replace("/", "__")

    # -- text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, with the tokenizer's beginning of text for a model that reads it so,
        unless the text has it already.
        """
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            begun = first is not None and string.startswith(str(first))
            begins = not self.is_diffusion or bool(row_start(self.tokenizer))
            add_special_tokens = begins and not self.settings.chat and not begun
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]
        return list(ids)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The messages in the model's chat format. Raises ValueError if it cannot be used."""
        return in_chat(self.loaded, chat_history, answered=add_generation_prompt)

    # -- requests

    def ask(self, tasks: dict[str, Any]) -> None:
        """Take the tasks of a run, as lm-eval's `evaluate` takes them, and their requests, in parts
        of one task.
        """
        self.tasks = tasks
        for name, task in tasks["tasks"].items():
            # the same worked examples whenever requests are made
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            chat = self.settings.chat
            task.build_all_requests(
                limit=self.settings.limit,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                chat_template=self.apply_chat_template if chat else None,
                tokenizer_name=self.tokenizer_name if chat else "",
            )
            parts: dict[int, list[Any]] = {}
            for one in task.instances:
                part = one.doc_id // (BATCH if name == TWO_STAGE else PART)
                parts.setdefault(part, []).append(one)
            self.asked += parts.values()

    def answered(self, requests: Sequence[Any], tick: Any = nothing) -> list[Row]:
        """The answers to requests, in their order.

        Args:
            requests: of lm-eval.
            tick: called with the number of answers, or the part of one, that there are more.
        """
        kinds: dict[Any, dict[Place, Any]] = {}
        for request in requests:
            answer = ANSWERS[request.request_type]
            if request.task_name == TWO_STAGE:
                answer = answered
            if place_of(request) not in self.told:
                kinds.setdefault(answer, {})[place_of(request)] = request
        for answer, asked in kinds.items():
            self.told |= answer(self, asked, tick)
        return [self.told[place_of(request)] for request in requests]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, each up to its end.

        Raises:
            ValueError: for settings that the decoder refuses, and interventions that do not fit a
                prompt.
        """
        return [str(answer["text"]) for answer in self.answered(requests)]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation in nats, and whether greedy decoding writes it.

        The choices of one question share their random numbers. Whether a continuation is greedy is
        asked only if it is the only one of its document: with several choices, none of the common
        metrics reads it.
        """
        answers = self.answered(requests)
        return [(float(answer["logprob"]), bool(answer["greedy"])) for answer in answers]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Not answered. Raises ValueError."""
        raise ValueError("whole texts are scored by lm.loss, not by lm-eval; leave the task out")

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError("loglikelihood scores ids itself")
