"""What `sinklab generate` does: prompts to ids, ids to text."""

# B batch rows, P prompt positions
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.checkpoints.loading import Loaded
    from sinklab.sampling.settings import DecodingSettings


@dataclass(frozen=True)
class Reading:
    """How the weights are read."""

    dtype: str = "float32"
    """Type of the weights, e.g. bfloat16; "auto" is what the checkpoint says."""
    device: str | None = None
    """Where the model runs, e.g. cuda; the CPU when left out."""
    device_map: str | None = None
    """"auto" spreads the layers over the devices at hand, in place of a device."""
    revision: str | None = None
    """Commit, branch or tag on the Hub."""
    allow_pickle: bool = False
    """Also read .bin and .pth files, without running what they hold."""
    sink: str | None = None
    """File of a sink that was trained for this model (`sinklab train retrofit`), to be attached."""


def write(
    prompts: Sequence[str],
    model: str,
    new_tokens: int,
    chat: bool,
    stream: bool,
    reading: Reading,
    decoding: DecodingSettings,
) -> list[str]:
    """The texts of one batch of prompts; empty when they were streamed to the terminal.

    Raises:
        ValueError: for no prompt, a model that does not denoise, and what its tokenizer or the decoder refuse.
    """
    from sinklab.checkpoints.loading import load

    if not prompts:
        raise ValueError('generate needs a prompt, e.g. sinklab generate "Once upon a time"')
    if stream and len(prompts) > 1:
        raise ValueError(f"--stream shows one canvas, but there are {len(prompts)} prompts; leave out --stream")
    decoding.values()
    loaded = load(model, **asdict(reading))
    if loaded.family != "diffusion":
        raise ValueError(
            f"generate writes by denoising, but {model} is {loaded.family}; load a diffusion model such as 'tiny'"
        )
    ids_BP, attention_BP = _prompt_ids(loaded, prompts, chat)
    written = loaded.model.generate(  # type: ignore[operator]
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
