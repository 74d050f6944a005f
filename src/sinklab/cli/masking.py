"""`sinklab mask`: the same texts with and without an intervention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from sinklab.cli.watching import Inputs, Study, chosen, compare_masked
from sinklab.cli.writing import Reading

# the two runs are compared with each other; more texts and held-out loss are what `trace` is for
DEFAULTS = Study(mask_sinks=(), heldout="")


def mask(
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    model: str = "tiny",
    out: Path = Path("runs/mask"),
    k: int | None = None,
    epsilon: float | None = None,
    removal: Literal["mask", "zero_value", "evict"] = "mask",
    source: Literal["closed_loop", "clean_pass", "carried"] = "closed_loop",
    control: Literal["sinks", "random", "recent", "lowest"] = "sinks",
    limit: int | None = None,
    also: tuple[str, ...] = (),
    inputs: tyro.conf.OmitArgPrefixes[Inputs] = Inputs(),  # noqa: B008 (a frozen record)
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008
    settings: tyro.conf.OmitArgPrefixes[Study] = DEFAULTS,
) -> None:
    """Take the sinks away while a model writes, and say what that did.

    Writes two run folders, OUT/plain and OUT/masked, and prints how much attention was removed, how far the selections
    of successive steps overlap, and how much of the text stayed. In each layer and head the keys that received most at
    the step before are hidden (closed loop; the first step is whole). A key that is hidden receives nothing, so the
    closed loop hides others at the next step and overlaps little; --source clean_pass or carried holds on to the sinks.

    Try
        sinklab mask "The house stood at the end of a" --k 5
        sinklab mask --k 5 --control random --out runs/control
        sinklab mask --epsilon 3 --removal zero_value --out runs/zero
        sinklab mask --k 1 --source carried --limit 8 --also window_attention:radius=16 --out runs/more

    Args:
        prompt: beginnings to continue, one sample each; three stock ones when left out.
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        out: folder for the two run folders; it must be empty or absent, but for --resume.
        k: hide this many keys per layer and head; 5 when neither --k nor --epsilon is given.
        epsilon: hide the keys that receive more than 1 + epsilon (S - 1) / S times an even share, in place of --k.
        removal: hide them before the softmax, set their values to zero after it, or evict them from the memory.
        source: choose from the edited run itself, from a second, whole forward, or carry over what was once chosen.
        control: what to hide: sinks, or as many random, most recent or least attended columns that are none.
        limit: with --source carried: the most keys a head may have lost at a time.
        also: further interventions, as text such as window_attention:radius=16.
        inputs: where the prompts come from.
        reading: how the weights are read.
        settings: what to write and watch.
    """
    if k is not None and epsilon is not None:
        raise ValueError(f"give --k or --epsilon, not both: got {k} and {epsilon}")
    amount = f"epsilon={epsilon}" if epsilon is not None else f"k={5 if k is None else k}"
    spec = f"mask_sinks:{amount},removal={removal},source={source},control={control}"
    spec += "" if limit is None else f",limit={limit}"
    both = chosen(settings, prompt, inputs, edits=(spec, *also, *settings.edits))
    for line in compare_masked(both, model, out, reading, inputs.resume):
        print(line)
