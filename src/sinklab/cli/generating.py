"""`sinklab generate` and `sinklab info`: prompts to ids, ids to text; and what a model is."""

# B batch rows, P prompt positions
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sinklab.cli.command import Reading
from sinklab.sampling.settings import DecodingSettings

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.checkpoints.loading import Loaded


WRITING_DEFAULTS = DecodingSettings(block_length=32, seed=0)


def generate(
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional],
    model: str = "tiny",
    new_tokens: int = 64,
    chat: bool = False,
    stream: bool = False,
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008 (a frozen record)
    decoding: tyro.conf.OmitArgPrefixes[DecodingSettings] = WRITING_DEFAULTS,
) -> None:
    """Write text by denoising a canvas of [MASK] tokens.

    Put the model's mask token (<|mask|> in the packaged models) into a prompt and pass --new-tokens 0 to fill blanks
    instead (infilling). For a checkpoint without tokenizer files, prompts and output are token ids.

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
        reading: how the weights are loaded.
        decoding: how the canvas is decoded.
    """
    if not prompt:
        raise ValueError('generate needs a prompt, e.g. sinklab generate "Once upon a time"')
    if stream and len(prompt) > 1:
        raise ValueError(f"--stream shows one canvas, but there are {len(prompt)} prompts; leave out --stream")
    decoding.values()
    loaded = reading.load(model)
    if loaded.family != "diffusion":
        raise ValueError(
            f"generate writes by denoising, but {model} is {loaded.family}; load a diffusion model such as 'tiny'"
        )
    for line in _written(loaded, _prompt_ids(loaded, prompt, chat), new_tokens, chat, stream, decoding):
        print(line)


def info(model: Annotated[str, tyro.conf.Positional], json: bool = False) -> None:
    """Show the architecture of a model and the memory it needs, from its config.json alone; no weights are read.

    Try
        sinklab info tiny-sink
        sinklab info GSAI-ML/LLaDA-8B-Instruct
        sinklab info /models/Dream-v0-Instruct-7B --json

    Args:
        model: "tiny" or "tiny-sink" (inside the package), a folder, a config.json, or a name on the Hub.
        json: print one JSON object instead of lines.
    """
    from json import dumps

    from sinklab.checkpoints.loading import describe

    facts = describe(model)
    print(dumps(facts.as_dict(), indent=2) if json else "\n".join(facts.lines()))


def _written(
    loaded: Loaded,
    prompts: tuple[Tensor, Tensor],
    new_tokens: int,
    chat: bool,
    stream: bool,
    decoding: DecodingSettings,
) -> list[str]:
    """The texts of one batch of prompts; none when they were streamed to the terminal."""
    ids_BP, attention_BP = prompts
    model: Any = loaded.model
    written = model.generate(
        ids_BP, attention_BP, max_new_tokens=new_tokens or None, settings=decoding, streamer=_streamer(loaded, stream)
    )
    if stream:
        return []
    shown = written[:, ids_BP.shape[1] :] if chat else written
    if loaded.tokenizer is None:
        # padding on the left is no token of the prompt
        padded = [int((~row).sum()) for row in attention_BP]
        return [" ".join(map(str, row[start:].tolist())) for row, start in zip(shown, padded, strict=True)]
    return [str(loaded.tokenizer.decode(row, skip_special_tokens=True)) for row in shown]


def _streamer(loaded: Loaded, stream: bool) -> Any:
    if not stream:
        return None
    from transformers import TextDiffusionStreamer

    return TextDiffusionStreamer(loaded.needed_tokenizer())


def _prompt_ids(loaded: Loaded, prompts: Sequence[str], chat: bool) -> tuple[Tensor, Tensor]:
    """Left-padded ids (B, P) and where they are real, bool (B, P)."""
    from sinklab.sampling.canvas import left_padded
    from sinklab.scoring.prompts import encode

    # padded here: nothing reads the padding, and not every tokenizer has a token for it
    return left_padded([encode(loaded, prompt, chat).ids for prompt in prompts], loaded.special.pad or 0)
