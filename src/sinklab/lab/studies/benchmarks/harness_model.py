"""The lm-eval model «sinklab»: any loaded model, diffusion or autoregressive, any decoder, any
intervention.

Importing this module registers it:
`lm_eval --model sinklab --model_args pretrained=tiny,mask_sinks=5`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from sinklab.core.errors import known_fields
from sinklab.core.instrument import BlockKeys
from sinklab.lab.checkpoints import Loaded, load
from sinklab.lab.data import row_start
from sinklab.lab.scoring.prompts import in_chat
from sinklab.lab.scoring.requests import limit_of, without_steps
from sinklab.lab.scoring.task import check_decoding
from sinklab.lab.studies import Audience, Row, as_progress, nothing
from sinklab.lab.studies.benchmarks.requests import (
    RequestCache,
    Unit,
    continuations,
    request_key,
    rolled,
    scored,
    whole_texts,
    writing_jobs,
    written,
)
from sinklab.lab.studies.benchmarks.study import TWO_STAGE, EvalSettings
from sinklab.lab.studies.benchmarks.two_stage import answered, questions

READING = ("dtype", "device", "device_map", "revision", "allow_pickle", "sink")


ELSEWHERE = {"text": "", "logprob": math.nan, "greedy": False}
"""Answer to a request of another shard, until it is there."""


@register_model("sinklab")
class SinklabLM(TemplateLM):
    """One model for all of lm-eval's requests.

    Answers depend neither on the batch they are written in (see `needs_own_batch`) nor on the
    number of processes; requests with an answer in the cache are not run again.
    """

    def __init__(
        self,
        pretrained: str | Loaded = "tiny",
        *,
        settings: EvalSettings | None = None,
        progress: Audience = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **given: Any,
    ) -> None:
        """Make it from a loaded model, or a name with its arguments.

        Args:
            pretrained: a loaded model, or an argument of `sinklab.load`.
            settings: of the run; else made from `given`.
            progress: shows how far it is.
            batch_size: prompts that are written together; "auto" is the default number.
            max_batch_size: not used.
            given: fields of `EvalSettings`, and dtype, device, device_map, revision, allow_pickle,
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
        self.edits = settings.interventions(by_last_row=not self.is_diffusion)
        self.scored_edits = without_steps(settings.interventions())
        """Edits of likelihood requests."""
        self.tokenizer = self.loaded.needed_tokenizer()
        if settings.chat and self.tokenizer.chat_template is None:
            raise ValueError(f"{self.loaded.name} has no known chat format; leave out --chat")
        # blocks are the default protocol, also of a run over several models
        check_decoding(self.loaded, settings, self.edits, "block_length")
        if self.is_diffusion:
            settings.values()
        self.tasks: dict[str, Any] = {}
        """Tasks that a run asks of it, as lm-eval's `evaluate` takes them."""
        self.cache = RequestCache(None, "")
        """Cache of answers, in memory; a run puts its own here."""
        self.shard = 0, 1
        """Shard of the requests that are answered here, and of how many."""
        self.asked: set[str] = set()
        """Keys of all requests, of whichever shard."""
        self.progress = as_progress(progress)
        self.moved: Callable[[float], object] = nothing
        """Told how many of the answers that are in work are done, a part of one too."""
        self.told: dict[tuple[str, int, int], Row] = {}
        """(task, document, number of the request) -> answer."""
        self._spent: dict[str, float] = {}
        self._documents: dict[str, set[tuple[str, int]]] = {}

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

    def answers(
        self, asked: Sequence[Any], doing: str, answer: Callable[[Any, list[Any]], Iterator[Unit]]
    ) -> list[Row]:
        """The answers to requests, in their order, kept for the tables.

        Args:
            asked: requests, made of lm-eval's.
            doing: words for the stage with a place for their number, such as "writing {} answers".
            answer: says of all of them, whatever is answered, which are answered together, and how;
                the answers are kept as they come.
        """
        names = {each.key: each for each in asked}
        units = {request_key(*keys): (keys, run) for keys, run in answer(self, [*names.values()])}
        total = len(names)
        done = self._answered(names)
        stage = doing.format(total)
        if done:
            stage += f", {done} of them there already"
        self.progress.stage(stage)
        self.progress.count(done, total)
        self.moved = lambda answers: self.progress.count(done + answers, total)

        place, shards = self.shard
        for number, (keys, run) in enumerate(units.values()):
            if number % shards != place or self.cache.has(keys):
                continue
            began = time.perf_counter()
            self.cache.add(run())
            documents = {names[key].document for key in keys}
            task = min(documents)[0]
            self._spent[task] = self._spent.get(task, 0.0) + time.perf_counter() - began
            self._documents.setdefault(task, set()).update(documents)
            done = self._answered(names)
            self.progress.count(done, total)
        self.asked.update(names)
        found = [self.cache.get(each.key) or ELSEWHERE for each in asked]
        places = [(*each.document, each.number) for each in asked]
        self.told |= dict(zip(places, found, strict=True))
        return found

    def whole(self) -> float:
        """Seconds that all documents of the tasks take, at the rate of those answered here, with as
        many shards.
        """
        documents = {name: len(task.eval_docs) for name, task in self.tasks["tasks"].items()}
        seconds = [
            spent * documents[task] / len(self._documents[task])
            for task, spent in self._spent.items()
        ]
        return sum(seconds) / self.shard[1]

    def _answered(self, keys: Iterable[str]) -> int:
        """Number of these requests that have an answer."""
        return sum(self.cache.get(key) is not None for key in keys)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, each up to its end.

        Raises:
            ValueError: for settings that the decoder refuses, and interventions that do not fit a
                prompt.
        """
        ways: dict[bool, tuple[Any, Any]] = {
            True: (questions, answered),
            False: (writing_jobs, written),
        }
        texts = [""] * len(requests)
        for is_two_stage, (asked, units) in ways.items():
            some = [
                place
                for place, each in enumerate(requests)
                if (each.task_name == TWO_STAGE) is is_two_stage
            ]
            if some:
                jobs = asked(self, [requests[place] for place in some])
                answers = self.answers(jobs, "writing {} answers", units)
                for place, answer in zip(some, answers, strict=True):
                    texts[place] = str(answer["text"])
        return texts

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation in nats, and whether greedy decoding writes it.

        The choices of one question share their random numbers. Whether a continuation is greedy is
        asked only if it is the only one of its document: with several choices, none of the common
        metrics reads it.
        """
        answers = self.answers(
            continuations(self, requests), "scoring {} continuations" + self._chosen, scored
        )
        return [(float(answer["logprob"]), bool(answer["greedy"])) for answer in answers]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each whole text in nats; for a diffusion model, its Monte Carlo
        bound.
        """
        answers = self.answers(
            whole_texts(self, requests), "scoring {} texts" + self._chosen, rolled
        )
        return [float(answer["logprob"]) for answer in answers]

    @property
    def _chosen(self) -> str:
        """Note on masking for a stage of likelihoods: there is no step before to choose in."""
        for edit in self.scored_edits:
            if isinstance(edit, BlockKeys) and edit.when != "now":
                return ", blocked keys chosen in a clean pass over each text"
        return ""

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError("loglikelihood scores ids itself")
