"""`sinklab train`, `generate` and `info`: a model is made, writes and is described."""

# B batch rows, P prompt positions
import inspect
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import tyro

from sinklab.core.subject.settings import DecodingSettings
from sinklab.lab.cli.command import SAMPLING, Reading, say, spelt, working
from sinklab.lab.cli.options import checked, value_of
from sinklab.lab.cli.progress import waiting
from sinklab.lab.studies.base import text_of
from sinklab.lab.training.settings import RECIPES, VARIANTS, TrainSettings, recipe

DEFAULT = "laptop-scratch"
Word = Annotated[str, tyro.conf.Positional]


def train_command(arguments: Sequence[str]) -> Callable[..., None]:
    """The command with the defaults of the recipe that these arguments name, so that --help shows
    the settings of the run.

    Args:
        arguments: behind ``sinklab train``.

    Raises:
        ValueError: for an unknown recipe or variant, or a run folder that cannot be reproduced.
    """
    name = DEFAULT
    if arguments and not arguments[0].startswith("-"):
        name = arguments[0]
    variant = value_of(arguments, "--variant")
    again = value_of(arguments, "--reproduce")
    if again is not None and not (variant is None and name == DEFAULT):
        raise ValueError(
            "--reproduce takes every setting from the run folder; leave out the recipe and "
            "--variant"
        )

    filled = recipe(name, variant)

    def train(
        recipe: Word = DEFAULT,
        variant: str | None = None,
        settings: Any = filled,
    ) -> None:
        """Train a diffusion language model: from scratch, from a causal model, or its sink alone.

        The first word is a recipe; it sets every flag below, and flags given override it. Without
        one, a small model learns from --corpus in a few minutes. The run folder keeps all settings,
        and --resume continues an interrupted run exactly. After the name of a recipe, --help shows
        its settings.

        Recipes
            {recipes}

        Try
            sinklab train --corpus my_texts/ --out runs/plain && sinklab report runs/plain
            sinklab train --corpus my_texts/ --heldout my_valid/ --steps 5000 --causal-start 0.4 \\
                --compile
            sinklab train laptop-causal --corpus my_texts/
            sinklab train laptop-from-causal --variant sink --corpus my_texts/
            sinklab train --reproduce runs/plain --out runs/again
            sinklab train qwen-0.5b --variant gate --init-from /models/Qwen2.5-0.5B --corpus \\
                /data/fineweb
            accelerate launch --config_file launch/eight_gpus.yaml -m sinklab train scratch-472m
            --variant sink

        Args:
            recipe: one of the recipes above.
            variant: the sink or gate of the model: {variants}.
            settings: of the training.
        """
        if recipe != name:
            raise ValueError(f"the recipe comes first: sinklab train {recipe} …")
        _train(checked(settings), again)

    recipes = "\n    ".join(f"{name}: {about}" for name, about in RECIPES.items())
    train.__doc__ = inspect.cleandoc(train.__doc__ or "").format(
        recipes=recipes, variants=", ".join(VARIANTS)
    )
    return train


def _compared(weights: Path, again: Path) -> str:
    """Sentence that says whether the weights are those of a run that was reproduced."""
    theirs = again / "model" / weights.name
    if not theirs.is_file():
        return f"{again} was not finished, so there are no weights to compare with"
    word = "differ from"
    if weights.read_text() == theirs.read_text():
        word = "equal"
    return f"the weights {word} those of {again}, compared bit for bit"


def _train(settings: TrainSettings, again: str | None) -> None:
    from transformers.utils import logging

    from sinklab.lab.training.run import train as run

    if again is not None and Path(settings.out).resolve() == Path(again).resolve():
        raise ValueError(
            f"a run is reproduced in a folder of its own, but --out is {again} too; give another "
            "--out"
        )
    logging.disable_progress_bar()
    with working() as progress:
        folder = run(settings, progress=progress.stage, count=progress.count)
    if os.environ.get("RANK", "0") != "0":
        return
    say(f"model: {folder}")
    if again is not None:
        say(_compared(folder / "weights.sha256", Path(again)))
    page = shlex.join(["sinklab", "report", str(folder.parent)])
    say(f"next: {page}, or {shlex.join(['sinklab', 'trace', '--model', str(folder)])}")
    if settings.train_only == "sink":
        sink = str(folder.parent / "sink.safetensors")
        words = ["sinklab", "trace", "--model", str(settings.init_from), "--sink", sink]
        say(f"the sink alone: {shlex.join(words)}")


WRITING = DecodingSettings(block_length=32, seed=0, **SAMPLING)


def generate(
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional],
    model: str = "tiny",
    new_tokens: int = 64,
    chat: bool = False,
    stream: bool = False,
    reading: Reading = Reading(),  # noqa: B008 (a frozen record)
    decoding: DecodingSettings = WRITING,
) -> None:
    """Write text.

    By denoising a canvas of [MASK] tokens, or as the model writes: token after token, or in
    canvases. Put the model's mask token (<|mask|> in the packaged models) into a prompt and pass
    --new-tokens 0 to fill blanks instead (infilling). For a checkpoint without tokenizer files,
    prompts and output are token ids.

    Try
        sinklab generate "It was a dark and stormy night"
        sinklab generate "The old man" --model tiny-sink --temperature 0 --rule low_confidence \\
            --stream
        sinklab generate "The <|mask|><|mask|> was burning." --new-tokens 0
        sinklab generate "The old man" --rule low_confidence \\
            --schedule threshold:threshold=0.5 --cache dual
        sinklab generate "What is 17 + 25?" --chat --model /models/LLaDA-8B-Instruct --dtype \\
            bfloat16 --device cuda

    Args:
        prompt: one or more prompts; they are written in one batch.
        model: "tiny", "tiny-sink" or "tiny-causal" (inside the package), a folder, or a name on the
            Hub.
        new_tokens: tokens to write after each prompt; 0 fills the masks inside the prompts.
        chat: put each prompt into the model's chat format, and print the answer alone.
        stream: show the canvas while it changes (one prompt).
        reading: how the weights are loaded.
        decoding: how the canvas is decoded.
    """
    if not prompt:
        raise ValueError('generate needs a prompt, e.g. sinklab generate "Once upon a time"')
    if stream and len(prompt) > 1:
        raise ValueError(
            f"--stream shows one canvas, but there are {len(prompt)} prompts; leave out --stream"
        )
    if new_tokens < 0:
        raise ValueError(
            f"new_tokens must be at least 0, which fills the masks of a prompt, but is {new_tokens}"
        )
    from transformers import TextDiffusionStreamer

    from sinklab.core.subject.canvas import pad_left
    from sinklab.core.subject.generation import GenerateByDenoising
    from sinklab.lab.scoring.prompts import encode

    settings = checked(decoding)
    settings.values()
    loaded = reading.load(model, fills_masks=False)
    if not loaded.is_diffusion or not isinstance(loaded.model, GenerateByDenoising):
        for text in prompt:
            say(_written(loaded, text, new_tokens, settings, chat=chat, stream=stream), exact=True)
        return
    # padded here: nothing reads the padding, and not every tokenizer has a token for it
    ids_BP, real_BP = pad_left(
        [encode(loaded, text, chat).ids for text in prompt], loaded.special.pad or 0
    )
    # a streamer asks its tokenizer for text, and for nothing else
    streamer = None
    if stream:
        tokenizer = loaded.needed_tokenizer()
        plain: Any = SimpleNamespace(decode=lambda row, **how: spelt(tokenizer.decode(row, **how)))
        streamer = TextDiffusionStreamer(plain)
    writer: Any = loaded.model
    written = writer.generate(
        ids_BP, real_BP, max_new_tokens=new_tokens or None, settings=settings, streamer=streamer
    )
    if not stream:
        for row, real_P in zip(written, real_BP, strict=True):
            # padding on the left is no token of the prompt
            start = int((~real_P).sum())
            if chat:
                start = len(real_P)
            say(text_of(loaded, row[start:]), exact=True)


def _written(
    loaded: Any, text: str, new_tokens: int, settings: DecodingSettings, *, chat: bool, stream: bool
) -> str:
    """Text of a model that does not fill masks: written token after token, or by renoising whole
    canvases.

    Raises ValueError for options of models that fill masks.
    """
    import torch

    from sinklab.lab.short_road.models import LM

    renoises = loaded.is_diffusion
    own = {"seed", "temperature", "top_p", "top_k"}
    how = "writes token after token"
    if renoises:
        own = {"seed"}
        how = "renoises whole canvases"
    usual = asdict(WRITING)
    changed = [name for name, value in asdict(settings).items() if value != usual[name]]
    wrong = [name for name in [*["stream"] * stream, *changed] if name not in own]
    if wrong:
        flags = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise ValueError(
            f"{loaded.name} {how}: {flags} can be set for models that fill masks; leave it out"
        )
    torch.manual_seed(settings.seed or 0)
    drawn = {
        "temperature": settings.temperature,
        "top_p": settings.top_p or 1.0,
        "top_k": settings.top_k or 0,
    }
    sampling = {"do_sample": True, **drawn} if settings.temperature else {"do_sample": False}
    return LM(**vars(loaded)).generate(
        text, new_tokens, chat=chat, **({"seed": settings.seed or 0} if renoises else sampling)
    )


def info(model: Word, json: bool = False) -> None:
    """Sizes, special ids and memory of a model; no weights are read.

    From its config.json alone.

    Try
        sinklab info tiny-sink
        sinklab info GSAI-ML/LLaDA-8B-Instruct
        sinklab info /models/Dream-v0-Instruct-7B --json

    Args:
        model: "tiny", "tiny-sink" or "tiny-causal" (inside the package), a folder, a config.json,
            or a name on the Hub.
        json: print one JSON object instead of lines.
    """
    from json import dumps

    from sinklab.lab.checkpoints.info import describe

    with waiting(f"reading the config of {model}"):
        facts = describe(model)
    if json:
        say(dumps(facts.as_dict(), indent=2))
    else:
        say("\n".join(facts.lines()))
