"""`sinklab validate`: the numbers of another implementation, held against ours."""

from pathlib import Path
from typing import Annotated

import tyro

from sinklab.core.registry import commands
from sinklab.core.sampling.settings import DecodingSettings
from sinklab.lab.cli.command import Reading, say
from sinklab.lab.cli.options import checked
from sinklab.lab.records.writing import refuse_taken


@commands.register("validate")
def validate(
    folder: Annotated[Path, tyro.conf.Positional],
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    model: str | None = None,
    tolerance: float | None = None,
    write: bool = False,
    new_tokens: int = 16,
    reading: Reading = Reading(),  # noqa: B008 (a frozen record)
    decoding: DecodingSettings = DecodingSettings(seed=0),  # noqa: B008
) -> None:
    """Does another implementation compute the same numbers?

    Those of an engine or a port are held against ours, by layer and by evaluation. The folder holds
    cases.json and expected.safetensors; docs/validate.md describes them. Exit status 1 says that
    something differs by more than rounding may; --write makes such a folder with ours, to hold the
    other one to.

    Try
        sinklab validate runs/reference "The old man" --model tiny --write
        sinklab validate runs/reference
        sinklab validate engine-output --model /models/LLaDA-8B-Instruct --device cuda

    Args:
        folder: of the cases.
        prompt: with --write, the beginnings of canvases; token ids for a checkpoint without
            tokenizer files.
        model: a model as of `generate`; the one that the cases name when left out, "tiny" with
            --write.
        tolerance: the greatest difference, in terms of ours plus their standard deviation; that of
            the type in which the other one computed when left out.
        write: write the folder, from the prompts.
        new_tokens: with --write, masks behind each prompt.
        reading: how the weights are loaded.
        decoding: with --write, how the canvas is decoded.
    """
    from sinklab.extras.referee.reference import Reference, verdict, write_reference
    from sinklab.lab.scoring.prompts import encode

    if write:
        refuse_taken(folder)
        if not prompt:
            raise ValueError(
                f'--write needs a prompt, e.g. sinklab validate {folder} "The old man" --write'
            )
        settings = checked(decoding)
        settings.values()
        loaded = reading.load(model or "tiny")
        write_reference(
            loaded, folder, [encode(loaded, text).ids for text in prompt], settings, new_tokens
        )
        say(
            "next: write the numbers of the other one in the same form, and sinklab validate "
            f"FOLDER; ours: {folder}"
        )
        return
    if prompt:
        raise ValueError(
            f"prompts are for --write, but there is {prompt[0]!r}; leave it out, or add --write"
        )
    if (checked(decoding), new_tokens) != (DecodingSettings(seed=0), 16):
        raise ValueError(
            "--new-tokens and the options of decoding are for --write; a case says how it was "
            "decoded"
        )
    reference = Reference(folder)
    held = reference.hold(reading.load(model or reference.model), tolerance)
    for one in held:
        say(one.line())
    say(
        verdict(held, reference.tolerance() if tolerance is None else tolerance, reference.left_out)
    )
    if not all(one.holds for one in held):
        raise SystemExit(1)


validate.listed = {  # type: ignore[attr-defined]
    "group": "check",
    "meant": "check verify test",
    "seldom": True,
}
validate.permissions = ("write",)  # type: ignore[attr-defined]
