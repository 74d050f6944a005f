"""Simulated study run folders of any size: a canvas that fills up, heads with resting, drifting and
jumping sinks.
"""

# T steps, L layers, H heads, K keys (added sinks first), P positions
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from noted import halved

from sinklab.core.sinks import find_sinks
from sinklab.lab.records import Arrays, Contents, Run, RunWriter, open_run

WORDS = [
    "The",
    " river",
    " was",
    " quiet",
    ",",
    " and",
    " the",
    " old",
    " bridge",
    ".",
    "\n",
    " stood",
    " in",
    " fog",
]
MASK_ID = 99
REMOVALS = {
    "sample": [0, 0, 0],
    "forward": [4, 4, 5],
    "edit": ["block_keys", "block_keys#2", "block_keys"],
    "layer": [1, 1, 1],
    "head": [2, 2, 2],
    "key_list": [[5, 7], [7], [7]],
}
"""a table of what edits took away: from one head, twice the same key"""


@dataclass(frozen=True)
class Simulation:
    """Sizes of a simulated run."""

    samples: int = 1
    steps: int = 12
    layers: int = 3
    heads: int = 4
    text: int = 24
    prompt: int = 6
    added: int = 0
    family: str = "diffusion"
    key_norms: bool = False
    seed: int = 0


def simulate(path: Path, size: Simulation, name: str = "simulated", **tables: Any) -> Run:
    """Write a run folder of kind "study" and open it; ``tables`` are further whole tables by
    name.
    """
    model = {
        "name": name,
        "family": size.family,
        "layers": size.layers,
        "heads": size.heads,
        "sink_count": size.added,
        "recorded_layers": list(range(size.layers)),
        "recorded_heads": list(range(size.heads)),
    }
    rng = np.random.default_rng(size.seed)
    with RunWriter(
        path,
        kind="study",
        model=model,
        settings={"steps": size.steps},
        seed=size.seed,
        samples=size.samples,
    ) as run:
        for sample in range(size.samples):
            committed_TP = canvas(size, rng)
            arrays, dims = attention(size, committed_TP, rng)
            ids_TP = np.where(committed_TP == 0, MASK_ID, np.arange(size.text) % len(WORDS))
            steps = np.arange(size.steps)
            block = (steps * 4) // size.steps if size.family == "diffusion" else 0 * steps
            words = [WORDS[index % len(WORDS)] for index in range(size.text)]
            row = {
                "prompt": ["".join(words[: size.prompt])],
                "completion": ["".join(words[size.prompt :])],
            }
            found = {
                "tokens": tokens(size, sample, committed_TP, ids_TP),
                "steps": {"sample": [sample] * size.steps, "step": steps, "block": block},
                "generations": {"sample": [sample], "rule": ["low_confidence"]} | row,
            }
            attended = {"attention": Arrays(halved(arrays), dims)}
            run.write(sample, {sample: Contents(found, attended)})
        for table, columns in tables.items():
            run.table(table, columns)
    return open_run(path)


def canvas(size: Simulation, rng: np.random.Generator) -> np.ndarray:
    """(step, position): 0 masked, 1 committed, 2 prompt, -1 not there yet."""
    state_TP = np.full((size.steps, size.text), 2)
    free = size.text - size.prompt
    if size.family == "autoregressive":
        there_T = size.prompt + np.arange(size.steps) * free // size.steps
        state_TP[:, size.prompt :] = 1
        state_TP[np.arange(size.text) >= there_T[:, None]] = -1
        return state_TP
    # Four blocks from left to right, any order within.
    order = np.argsort((np.arange(free) * 4) // max(free, 1) + rng.random(free))
    when_P = np.empty(free)
    when_P[order] = np.arange(free) * size.steps / max(free, 1)
    state_TP[:, size.prompt :] = when_P < np.arange(size.steps)[:, None]
    return state_TP


def main_paths(size: Simulation, rng: np.random.Generator) -> np.ndarray:
    """(step, layer, head) canvas position of the simulated sink: head 0 rests, 1 drifts, the others
    jump.
    """
    path_TLH = np.zeros((size.steps, size.layers, size.heads), dtype=int)
    for head in range(size.heads):
        if head % 4 == 1:
            path_TLH[:, :, head] = (
                np.arange(size.steps) * (size.text - 1) // max(size.steps - 1, 1)
            )[:, None]
        elif head % 4 > 1:
            jumps = rng.integers(0, size.text, ((size.steps + 7) // 8, size.layers))
            path_TLH[:, :, head] = np.repeat(jumps, 8, axis=0)[: size.steps]
    return path_TLH


def attention(
    size: Simulation, state_TP: np.ndarray, rng: np.random.Generator
) -> tuple[dict, dict, dict]:
    """Arrays, axes and types of one part of the file attention."""
    exists_TK = np.concatenate([np.ones((size.steps, size.added), bool), state_TP >= 0], axis=1)
    there_T = (state_TP >= 0).sum(1)
    shape = (size.steps, size.layers, size.heads, size.added + size.text)
    logits = rng.standard_normal(shape, dtype=np.float32)
    logits *= 0.3
    path_TLH = np.minimum(main_paths(size, rng), there_T[:, None, None] - 1) + size.added
    at = (*np.indices(path_TLH.shape), path_TLH)
    logits[at] += np.log(0.2 * there_T[:, None, None] + 1)
    logits[..., : size.added] += np.log(size.text)
    np.exp(logits, out=logits)
    logits *= exists_TK[:, None, None]
    causal = size.family == "autoregressive"
    # One query runs in an autoregressive decoder, all of them in a denoiser.
    ran_T = np.ones(size.steps) if causal else there_T
    logits *= ran_T[:, None, None, None].astype(np.float32) / logits.sum(-1, keepdims=True)
    received = np.where(exists_TK[:, None, None], logits, np.nan) if causal else logits
    norm = 2 + rng.standard_normal((1, size.layers, shape[-1]), dtype=np.float32) * 0.4
    norm = np.abs(
        norm + rng.standard_normal((size.steps, *norm.shape[1:]), dtype=np.float32) * 0.02
    )
    norm[..., : size.added] = 0.25
    arrays = {
        "received": received,
        "visible": np.where(exists_TK, ran_T[:, None], np.nan),
        "positions": there_T.astype(np.float32),
        "step_number": np.arange(size.steps, dtype=np.int32),
        "value_norm": np.where(exists_TK[:, None], norm, np.nan),
    }
    if size.key_norms:
        arrays["key_norm"] = arrays["value_norm"] * 3
    dims = {
        "received": ("step", "layer", "head", "key"),
        "visible": ("step", "key"),
        "positions": ("step",),
        "step_number": ("step",),
        "value_norm": ("step", "layer", "key"),
        "key_norm": ("step", "layer", "key"),
    }
    return arrays, {key: dims[key] for key in arrays}


def tokens(
    size: Simulation, sample: int, state_TP: np.ndarray, ids_TP: np.ndarray
) -> dict[str, Any]:
    """The table tokens of one sample."""
    step, position = np.nonzero(state_TP >= 0)
    state, ids = state_TP[step, position], ids_TP[step, position]
    texts = np.array([*WORDS, "<mask>"], dtype=object)
    return {
        "sample": np.full(len(step), sample),
        "step": step,
        "position": position,
        "token_id": ids,
        "text": texts[np.where(ids == MASK_ID, len(WORDS), ids)],
        "state": np.array(["masked", "committed", "prompt"], dtype=object)[state],
        "special": np.where(ids == MASK_ID, "mask", "").astype(object),
        "template": np.zeros(len(step), dtype=bool),
    }


def received_of(sample: Any) -> np.ndarray:
    """(step, layer, head, key) received attention, scaled as if all positions had run."""
    return np.concatenate([one.received for one in sample.scored()], axis=1)


def events_of(sample: Any) -> np.ndarray:
    """(step, layer, key) number of heads that have a sink at the key."""
    return np.concatenate([one.flags(sample.rule).sum(2) for one in sample.scored()], axis=1)


def whole_of(sample: Any) -> tuple[np.ndarray, np.ndarray]:
    """(step, layer, head, key) mean weights of a sample, and which keys are sinks: the slow way,
    from whole arrays.
    """
    received, visible = received_of(sample), sample.visible_TK[:, None, None]
    exists = sample.exists_TK[:, None, None]
    return received / np.where(exists, visible, np.nan), find_sinks(received, sample.rule, visible)
