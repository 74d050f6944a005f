"""`sinklab train`, `generate` and `info`: a model is made, writes and is described."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tyro

from sinklab.core.subject.settings import DecodingSettings
from sinklab.lab.cli.command import SAMPLING, Reading
from sinklab.lab.cli.options import MARK, REQUIRED, Command
from sinklab.lab.cli.progress import say, working
from sinklab.lab.registry import commands
from sinklab.lab.training.settings import RECIPES, VARIANTS, TrainSettings, recipe

DEFAULT = "laptop-scratch"


@dataclass(frozen=True)
class Variant:
    """Read before the other options of `train`, whose defaults follow from it."""

    variant: str | None = None


@commands.register("train")
@dataclass(frozen=True)
class Train(Command):
    """A model with a sink or without, its causal twin, or the sink alone.

    Trained from scratch, or made of a causal model. The first word is a recipe; it sets every flag
    below, and flags given override it. Without one, a small model learns from --corpus in a few
    minutes. The run folder keeps all settings; the same command goes on with an interrupted run.
    After the name of a recipe, --help shows its settings.

    Recipes
        {recipes}

    Try
        sinklab train --corpus my_texts/ --out runs/plain && sinklab report runs/plain
        sinklab train --corpus my_texts/ --heldout my_valid/ --steps 5000 --causal-start 0.4 \\
            --compile
        sinklab train laptop-causal --corpus my_texts/
        sinklab train laptop-from-causal --variant sink --corpus my_texts/
        sinklab train --config runs/plain --out runs/again
        sinklab train qwen-0.5b --variant gate --init-from /models/Qwen2.5-0.5B --corpus \\
            /data/fineweb
        accelerate launch --config_file launch/eight_gpus.yaml -m sinklab train \\
            scratch-472m --variant sink
    """

    recipe: MARK.Positional[str] = DEFAULT
    """One of the recipes above."""
    variant: str | None = None
    """The sink or gate of the model: plain, sink, gate, zero, 2-sinks, 4-sinks, end, kv, logit."""
    settings: TrainSettings = TrainSettings()
    first: str = DEFAULT
    """First word of the arguments, whose settings these are."""
    group = "train"

    def about(self) -> str:
        """Help, with the recipes."""
        recipes = "\n        ".join(f"{name}: {about}" for name, about in RECIPES.items())
        return str(self.__doc__).format(recipes=recipes)

    def hidden(self) -> tuple[str, ...]:
        """Fields that `filled` sets."""
        return ("first",)

    def filled(self, arguments: Sequence[str]) -> Train:
        """The command with the settings of the recipe, so that --help shows those of the run.
        Raises ValueError for an unknown recipe or variant.
        """
        name = DEFAULT
        if arguments and not arguments[0].startswith("-"):
            name = arguments[0]
        how: dict[str, Any] = {"args": arguments, "return_unknown_args": True, "add_help": False}
        variant = tyro.cli(Variant, **how)[0].variant
        return Train(name, variant, recipe(name, variant), name)

    def decided(self) -> set[str]:
        """Those of a recipe or variant that is named."""
        names = set[str]()
        if self.variant is not None:
            names |= {name for fields in VARIANTS.values() for name in fields}
        if self.recipe != DEFAULT:
            usual = vars(recipe(DEFAULT))
            names |= {name for name, own in vars(self.settings).items() if own != usual[name]}
        return names

    def run(self) -> None:
        """Train, and say where the model is and what to do next."""
        from transformers.utils import logging

        from sinklab.lab.training.run import train as run

        settings = self.settings
        if self.recipe != self.first:
            raise ValueError(f"the recipe comes first: sinklab train {self.recipe} …")
        logging.disable_progress_bar()
        with working() as progress:
            folder = run(settings, progress=progress.stage, count=progress.count)
        if os.environ.get("RANK", "0") != "0":
            return
        say(f"model: {folder}")
        page = shlex.join(["sinklab", "report", str(folder.parent)])
        say(f"next: {page}, or {shlex.join(['sinklab', 'trace', '--model', str(folder)])}")
        if settings.train_only == "sink":
            sink = str(folder.parent / "sink.safetensors")
            words = ["sinklab", "trace", "--model", str(settings.init_from), "--sink", sink]
            say(f"the sink alone: {shlex.join(words)}")


WRITING = DecodingSettings(block_length=32, seed=0, **SAMPLING)


@commands.register("generate")
@dataclass(frozen=True)
class Generate(Command):
    """Write text.

    By denoising a canvas of [MASK] tokens, or as the model writes: token after token, or in
    canvases. Put the model's mask token (<|mask|> in the packaged models) into a prompt and pass
    --new-tokens 0 to fill blanks instead (infilling). For a checkpoint without tokenizer files,
    prompts and output are token ids.

    Try
        sinklab generate "It was a dark and stormy night"
        sinklab generate "The old man" --model tiny-sink --temperature 0 --rule low_confidence
        sinklab generate "The <|mask|><|mask|> was burning." --new-tokens 0
        sinklab generate "The old man" --rule low_confidence \\
            --schedule threshold:threshold=0.5 --cache dual
        sinklab generate "What is 17 + 25?" --chat --model /models/LLaDA-8B-Instruct --dtype \\
            bfloat16 --device cuda
    """

    prompt: MARK.Positional[tuple[str, ...]] = ()
    """One or more prompts."""
    model: str = "tiny"
    """"tiny", "tiny-sink" or "tiny-causal" (inside the package), a folder, or a name on the Hub."""
    new_tokens: int = 64
    """Tokens to write after each prompt; 0 fills the masks inside the prompts."""
    chat: bool = False
    """Put each prompt into the model's chat format, and print the answer alone."""
    reading: Reading = Reading()
    decoding: DecodingSettings = WRITING
    group = "watch"

    def run(self) -> None:
        """Print the texts."""
        prompt, new_tokens = self.prompt, self.new_tokens
        if not prompt:
            raise ValueError('generate needs a prompt, e.g. sinklab generate "Once upon a time"')
        if new_tokens < 0:
            raise ValueError(
                "new_tokens must be at least 0, which fills the masks of a prompt, but is "
                f"{new_tokens}"
            )
        from sinklab.core.subject.generation import GenerateByDenoising
        from sinklab.lab.short_road.models import LM

        self.decoding.values()
        lm = LM(**vars(self.reading.load(self.model, fills_masks=False)))
        if lm.is_diffusion and isinstance(lm.model, GenerateByDenoising):
            how: dict[str, Any] = {"settings": self.decoding}
        else:
            how = self._drawn(lm)
        for text in prompt:
            say(lm.generate(text, new_tokens, chat=self.chat, **how))

    def _drawn(self, lm: Any) -> dict[str, Any]:
        """Options for a model that does not fill masks: written token after token, or by renoising
        whole canvases. Raises ValueError for options of models that fill masks.
        """
        import torch

        settings = self.decoding
        own = {"seed"} if lm.is_diffusion else {"seed", "temperature", "top_p", "top_k"}
        usual = asdict(WRITING)
        changed = [name for name, value in asdict(settings).items() if value != usual[name]]
        wrong = [name for name in changed if name not in own]
        if wrong:
            flags = ", ".join("--" + name.replace("_", "-") for name in wrong)
            raise ValueError(
                f"{flags} can be set for models that fill masks, but {lm.name} writes in another "
                "way; leave it out"
            )
        if lm.is_diffusion:
            return {"seed": settings.seed or 0}
        torch.manual_seed(settings.seed or 0)
        if not settings.temperature:
            return {"do_sample": False}
        drawn = {"temperature": settings.temperature, "top_p": settings.top_p or 1.0}
        return {"do_sample": True, "top_k": settings.top_k or 0, **drawn}


@commands.register("info")
@dataclass(frozen=True)
class Info(Command):
    """Sizes, special ids and memory of a model; no weights are read.

    From its config.json alone.

    Try
        sinklab info tiny-sink
        sinklab info GSAI-ML/LLaDA-8B-Instruct
        sinklab info /models/Dream-v0-Instruct-7B --json
    """

    model: MARK.Positional[str] = REQUIRED
    """"tiny", "tiny-sink" or "tiny-causal" (inside the package), a folder, a config.json, or a name
    on the Hub.
    """
    json: bool = False
    """Print one JSON object instead of lines."""
    group = "check"

    def run(self) -> None:
        """Print them."""
        from json import dumps

        from sinklab.lab.checkpoints.info import describe

        facts = describe(self.model)
        if self.json:
            say(dumps(facts.as_dict(), indent=2))
        else:
            say("\n".join(facts.lines()))
