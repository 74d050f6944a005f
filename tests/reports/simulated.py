"""Simulated run folders of kind "study": a test chooses their numbers, so what is shown must give
them back.
"""

import numpy as np

from sinklab.lab.records import Arrays, Contents, RunWriter, open_run
from sinklab.lab.studies.trace.recording import WHOLE

PROMPT, BLOCK = 6, 6
WORDS = [
    "It",
    " was",
    " a",
    " dark",
    ",",
    "\n",
    " night",
    ".",
    " old",
    " <b>man</b>",
    " $x$",
    " the",
]
TEXTS = [
    ("It was", " a dark, stormy night."),
    ("A <script>alert(1)</script>", " & more\n语"),
]
"""prompt and completion of the first sample, and of all others"""
BY_STATE = ("step", "state", "layer", "head")
DIMS = {
    "received": ("step", "layer", "head", "key"),
    "visible": ("step", "key"),
    "positions": ("step",),
    "step_number": ("step",),
    "value_norm": ("step", "layer", "key"),
    "key_norm": ("step", "layer", "key"),
    "row_entropy": BY_STATE,
    "row_logsumexp": BY_STATE,
}

REMOVALS = {
    "sample": [0, 0, 0],
    "forward": [4, 4, 5],
    "edit": ["block_keys", "block_keys#2", "block_keys"],
    "layer": [1, 1, 1],
    "head": [2, 2, 2],
    "key_list": [[5, 7], [7], [7]],
}
"""a table of what edits took away: from one head, twice the same key"""


def halved(arrays):
    """Arrays as a trace stores them: floats as float16, but for counts."""
    return {
        name: one if one.dtype.kind != "f" or name in WHOLE else one.astype(np.float16)
        for name, one in arrays.items()
    }


def attention(shape, added, share, text_share, norm):
    """Every head gives ``share`` to the added sinks, ``text_share`` to one moving text position,
    the rest evenly.
    """
    steps, layers, heads, text = shape
    keys = added + text
    received = np.empty((steps, layers, heads, keys))
    weight = np.full(keys, (1 - share * bool(added) - text_share) / (text - 1))
    for step in range(steps):
        row = weight.copy()
        row[added + PROMPT + step] = text_share
        row[:added] = share / max(added, 1)
        received[step] = row * text
    value_norm = np.full((steps, layers, keys), 2.0)
    value_norm[..., :added] = norm
    there = np.ones((steps, 3, layers, heads))
    # of masked, committed and prompt, nothing is committed before the first step
    there[0, 1] = np.nan
    return {
        "received": received,
        "visible": np.full((steps, keys), float(text)),
        "positions": np.full(steps, float(text)),
        "step_number": np.arange(steps, dtype=np.int32),
        "value_norm": value_norm,
        "key_norm": value_norm * 4,
        "row_entropy": there * 2.5,
        "row_logsumexp": there * 6.0,
    }


def one_query_a_step(steps, layers, heads, share):
    """An autoregressive run: keys grow, one query runs, it gives ``share`` to the first position,
    the rest evenly.
    """
    keys = PROMPT + steps
    received = np.full((steps, layers, heads, keys), np.nan)
    visible = np.zeros((steps, keys))
    for step in range(steps):
        here = PROMPT + step
        received[step, ..., :here] = (1 - share) / (here - 1)
        received[step, ..., 0] = share
        visible[step, :here] = 1
    value_norm = np.where(visible[:, None] > 0, 2.0, np.nan) * np.ones((1, layers, 1))
    value_norm[..., 0] = 0.25
    return {
        "received": received,
        "visible": visible,
        "positions": PROMPT + np.arange(steps, dtype=float),
        "step_number": np.arange(steps, dtype=np.int32),
        "value_norm": value_norm,
    }


def tokens(steps, text, sample, family, words):
    rows = []
    for step in range(steps):
        for position in range(text if family == "diffusion" else PROMPT + step):
            masked = family == "diffusion" and position >= PROMPT + step
            state = "prompt" if position < PROMPT else "masked" if masked else "committed"
            token = "<m>" if masked else words[position % len(words)]
            rows.append(
                (sample, step, position, position, token, state, "mask" if masked else "", False)
            )
    columns = ("sample", "step", "position", "token_id", "text", "state", "special", "template")
    return dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))


def simulate(
    path,
    name="tiny",
    *,
    steps=12,
    layers=2,
    heads=3,
    text=24,
    added=0,
    share=0.5,
    samples=2,
    text_share=0.3,
    norm=0.25,
    leave_out=(),
    ran=1.0,
    family="diffusion",
    words=WORDS,
    maps=None,
    whole=None,
    change=lambda sample, arrays: None,
    **changes,
):
    """A run folder.

    Every other sample is two steps shorter. added, share, norm: added sinks, the attention they
    take together, the length of their values; text_share: what the moving text position takes (of
    an autoregressive run: the first one). ran: at odd steps only this fraction of the queries ran,
    as under a cache. leave_out: tables and arrays that are not written. words: texts of the tokens,
    in turn. maps: "step3-…" -> (query, key), of sample 0. whole: more tables. change: may alter the
    arrays of a sample in place. Other keywords go into the model of run.json.
    """
    model = {
        "name": name,
        "family": family,
        "layers": layers,
        "heads": heads,
        "sink_count": added,
    }
    model |= {"recorded_layers": list(range(layers)), "recorded_heads": list(range(heads))}
    settings = {"steps": steps, "prompts": ["It was <i>a</i> dark"], "rule": "low_confidence"}
    how = {"kind": "study", "settings": settings, "seed": 3, "samples": samples}
    with RunWriter(path, model=model | changes, **how) as run:
        for sample in range(samples):
            shown = steps - 2 * (sample % 2)
            if family == "diffusion":
                arrays = attention((shown, layers, heads, text), added, share, text_share, norm)
            else:
                arrays = one_query_a_step(shown, layers, heads, text_share)
            for array in (arrays["received"], arrays["visible"]):
                array[1::2] *= ran
            change(sample, arrays)
            kept = {key: array for key, array in arrays.items() if key not in leave_out}
            files = {}
            if "attention" not in leave_out:
                files["attention"] = Arrays(halved(kept), {key: DIMS[key] for key in kept})
            if maps and sample == 0:
                axes = {key: (f"query_{key}", f"key_{key}") for key in maps}
                files["maps"] = Arrays(halved(maps), axes)
            prompt, completion = TEXTS[sample > 0]
            texts = {"prompt": [prompt], "completion": [completion]}
            tables = {
                "tokens": tokens(shown, text, sample, family, words),
                "generations": {"sample": [sample], "rule": ["low_confidence"]} | texts,
            }
            if family == "diffusion":
                blocks = [step // BLOCK for step in range(shown)]
                numbers = {"sample": [sample] * shown, "step": list(range(shown))}
                tables["steps"] = numbers | {"block": blocks}
            tables = {name: one for name, one in tables.items() if name not in leave_out}
            run.write(sample, {sample: Contents(tables, files)})
        for table, columns in (whole or {}).items():
            run.table(table, columns)
    return open_run(path)


def uneven(sample, arrays):
    """Numbers that differ everywhere, and sinks of every other head that jump."""
    rng, received = np.random.default_rng(sample), arrays["received"]
    received *= np.exp(0.3 * rng.standard_normal(received.shape))
    jumping = received[:, :, 1::2]
    places = rng.integers(0, PROMPT, (*jumping.shape[:-1], 1))
    np.put_along_axis(jumping, places, 1.2 * np.nanmax(jumping, -1, keepdims=True), -1)
    arrays["value_norm"] *= np.exp(0.1 * rng.standard_normal(arrays["value_norm"].shape))


def received_of(sample):
    """(step, layer, head, key) received attention, scaled as if all positions had run."""
    return np.concatenate([one.received for one in sample.scored()], axis=1)
