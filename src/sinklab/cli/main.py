"""`sinklab COMMAND`: one function a command; `--help` on each is made from its docstring and types."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from sinklab.cli.battery import battery
from sinklab.cli.caching import caches
from sinklab.cli.command import command as command_of
from sinklab.cli.probing import probe
from sinklab.cli.showing import compare, report, tour
from sinklab.cli.tables import evaluate_command, onetoken, table1
from sinklab.cli.training import _value, train_command
from sinklab.cli.watching import Inputs, Study, chosen, mask, watch
from sinklab.cli.writing import Reading, write
from sinklab.registry import studies
from sinklab.sampling.settings import DecodingSettings

ABOUT = "A laboratory for attention sinks in diffusion language models. Start with `sinklab tour`: no download needed."

STUDY_DEFAULTS = Study()
INPUT_DEFAULTS = Inputs()
READING_DEFAULTS = Reading()
WRITING_DEFAULTS = DecodingSettings(block_length=32, seed=0)


def generate(
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional],
    model: str = "tiny",
    new_tokens: int = 64,
    chat: bool = False,
    stream: bool = False,
    reading: tyro.conf.OmitArgPrefixes[Reading] = READING_DEFAULTS,
    decoding: tyro.conf.OmitArgPrefixes[DecodingSettings] = WRITING_DEFAULTS,
) -> None:
    """Write text by denoising a canvas of [MASK] tokens.

    Put the model's mask token (<|mask|> in the packaged models) into a prompt and pass --new-tokens 0 to fill blanks
    instead (infilling). For a checkpoint without tokenizer files a prompt is token ids, and ids are printed.

    Try
        sinklab generate "It was a dark and stormy night"
        sinklab generate "The old man" --model tiny-sink --temperature 0.7 --rule random --stream
        sinklab generate "The <|mask|><|mask|> was burning." --new-tokens 0
        sinklab generate "The old man" --schedule threshold --threshold 0.5 --cache dual
        sinklab generate "What is 17 + 25?" --chat --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda

    Args:
        prompt: one or more prompts; they are written in one batch.
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        new_tokens: tokens to write after each prompt; 0 fills the masks inside the prompts.
        chat: put each prompt into the model's chat format, and print the answer alone.
        stream: show the canvas while it changes (one prompt).
        reading: how the weights are read.
        decoding: how the canvas is decoded.
    """
    for line in write(prompt, model, new_tokens, chat, stream, reading, decoding):
        print(line)


def info(model: Annotated[str, tyro.conf.Positional], json: bool = False) -> None:
    """Say what a model is and what memory it needs, from its config.json alone; no weights are read.

    Try
        sinklab info tiny-sink
        sinklab info GSAI-ML/LLaDA-8B-Instruct
        sinklab info /models/Dream-v0-Instruct-7B --json

    Args:
        model: "tiny" or "tiny-sink" (inside the package), a folder, a config.json, or a name on the Hub.
        json: print one JSON object instead of lines.
    """
    from json import dumps

    from sinklab.checkpoints.model_card import describe

    facts = describe(model)
    print(dumps(facts.as_dict(), indent=2) if json else "\n".join(facts.lines()))


def trace(
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    model: str = "tiny",
    out: Path = Path("runs/trace"),
    inputs: tyro.conf.OmitArgPrefixes[Inputs] = INPUT_DEFAULTS,
    reading: tyro.conf.OmitArgPrefixes[Reading] = READING_DEFAULTS,
    settings: tyro.conf.OmitArgPrefixes[Study] = STUDY_DEFAULTS,
) -> None:
    """Let a model write, record what attention every token receives at every step, and keep it in a run folder.

    The run folder holds run.json, Parquet tables and safetensors arrays; `sinklab report` turns it into a page, pandas
    reads it as it is. Each sample is written when it ends: an interrupted run is readable, and --resume goes on with
    it. Autoregressive models are watched too, on top of their own cache. Under `accelerate launch` the prompts are
    dealt to the processes and their folders joined.

    Try
        sinklab trace "The house stood at the end of a" --out runs/house && sinklab report runs/house
        sinklab trace --model tiny-sink --new-tokens 96 --rule random --out runs/sink
        sinklab trace --model tiny-sink --cache dual --statistics all --layers 0 -1 --every 4 --out runs/dual
        sinklab trace --prompts questions.jsonl --samples 30 --chat --model /models/LLaDA-8B-Instruct --dtype bfloat16
        sinklab trace "The house" --edits mask_sinks:k=5 window_attention:radius=16 --maps 3:5:2 --out runs/edited
        accelerate launch --num_processes 4 -m sinklab.cli trace --prompts questions.jsonl --device cuda --resume

    Args:
        prompt: beginnings to continue, one sample each; three stock ones when left out.
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        out: folder to write; it must be empty or absent, but for --resume.
        inputs: where the prompts come from.
        reading: how the weights are read.
        settings: what to write, watch and score.
    """
    for line in watch(chosen(settings, prompt, inputs), model, out, reading, inputs.resume):
        print(line)


def train() -> None:
    """Train a diffusion language model: from scratch, from a causal model, or nothing but its sink."""
    # a stand-in for the list of commands: `train_command` makes the real one, with the defaults of its recipe


WATCHING = (tour, generate, info, trace, mask, compare, report, train)
SCORING = (evaluate_command, battery, probe, caches, table1, onetoken)
COMMANDS: tuple[Callable[..., None], ...] = (*WATCHING, *SCORING)


def _app(arguments: Sequence[str]) -> tyro.extras.SubcommandApp:
    """The commands: a line for each in the list of them, all of its docstring in the help of the one that is asked."""
    app = tyro.extras.SubcommandApp()
    for name, kind in studies.items():
        chosen = arguments[:1] == [name]
        again = _value(arguments, "--reproduce") if chosen else None
        function = command_of(name, kind(), None if again is None else Path(again)) if chosen else _other
        app.command(function, name=name, help=None if chosen else (kind.__doc__ or "").splitlines()[0])
    for command in COMMANDS:
        if command is train and arguments[:1] == ["train"]:
            command = train_command(arguments[1:])
        lines = (command.__doc__ or "").splitlines()
        app.command(help=None if command.__name__ in arguments[:1] else lines[0])(command)
    return app


def _other() -> None:
    """Stands in the list of commands for a study that is not the one asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a mistake in the input, or a disk that refuses, is one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # the models live on this machine or are named by the user; their progress bars are noise here
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        _app(arguments).cli(args=arguments, prog="sinklab", description=ABOUT)
    except (ValueError, OSError) as error:
        print(f"sinklab: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sinklab: interrupted; what was written so far is kept", file=sys.stderr)
        return 130
    return 0
