"""What `sinklab generate` does: prompts to ids, ids to text."""

# B batch rows, P prompt positions
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.models import Loaded
    from sinklab.sampling import DecodingSettings


def write(
    prompts: Sequence[str],
    model: str,
    new_tokens: int,
    chat: bool,
    stream: bool,
    dtype: str,
    device: str,
    decoding: DecodingSettings,
) -> list[str]:
    """The texts of one batch of prompts; empty when they were streamed to the terminal.

    Raises:
        ValueError: for no prompt, a model that does not denoise, and what its tokenizer or the decoder refuse.
    """
    from sinklab.models import load

    if not prompts:
        raise ValueError('generate needs a prompt, e.g. sinklab generate "Once upon a time"')
    if stream and len(prompts) > 1:
        raise ValueError(f"--stream shows one canvas, but there are {len(prompts)} prompts; leave out --stream")
    decoding.values()
    loaded = load(model, dtype=dtype, device=device)
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
        padded = [0 if chat else int((row == 0).sum()) for row in attention_BP]
        return [" ".join(map(str, row[start:].tolist())) for row, start in zip(shown, padded, strict=True)]
    return [str(loaded.tokenizer.decode(row, skip_special_tokens=True)) for row in shown]


def _streamer(loaded: Loaded, stream: bool) -> Any:
    if not stream:
        return None
    from transformers import TextDiffusionStreamer

    return TextDiffusionStreamer(loaded.needed_tokenizer())


def _prompt_ids(loaded: Loaded, prompts: Sequence[str], chat: bool) -> tuple[Tensor, Tensor]:
    """Left-padded ids (B, P) and their attention mask."""
    import torch

    if loaded.tokenizer is None:
        rows = [_as_ids(loaded, prompt, chat) for prompt in prompts]
        width = max(map(len, rows))
        pad = loaded.special.pad or 0
        ids = [[pad] * (width - len(row)) + row for row in rows]
        real = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return torch.tensor(ids, dtype=torch.long).view(len(rows), -1), torch.tensor(real).view(len(rows), -1).long()
    texts = [_in_chat(loaded, prompt) for prompt in prompts] if chat else list(prompts)
    batch = loaded.tokenizer(
        texts, return_tensors="pt", padding=len(texts) > 1, padding_side="left", add_special_tokens=False
    )
    # an empty prompt comes as float
    return batch["input_ids"].long(), batch["attention_mask"].long()


def _as_ids(loaded: Loaded, prompt: str, chat: bool) -> list[int]:
    if chat:
        loaded.needed_tokenizer()
    try:
        ids = [int(part) for part in prompt.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(
            f"{loaded.name} has no tokenizer files, so a prompt is token ids such as '5 17 3', but is {prompt!r}"
        ) from error
    rows = loaded.model.config.vocab_size
    if wrong := [number for number in ids if not 0 <= number < rows]:
        raise ValueError(f"token ids of {loaded.name} are 0 to {rows - 1}, but the prompt holds {wrong[0]}")
    return ids


def _in_chat(loaded: Loaded, prompt: str) -> str:
    tokenizer = loaded.needed_tokenizer()
    if tokenizer.chat_template is None:
        raise ValueError(f"{loaded.name} has no chat format that is known; leave out --chat")
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
