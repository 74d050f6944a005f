"""A synthetic study: the numbers of every figure are chosen here, so a report must print them."""

import dataclasses
import shutil

import numpy as np
import pytest
from browsing import browser as browser
from browsing import one as one
from browsing import page as page
from browsing import two as two
from noted import halved

from curves import costed
from pictures import no_pictures as no_pictures
from pictures import page_with
from sinklab.lab.records import Arrays, Contents, RunWriter, open_run

SAMPLES, STEPS, LAYERS, HEADS, TEXT, PROMPT, BLOCK = 2, 12, 2, 3, 24, 6, 6
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
MASKED, COMMITTED, PROMPTED = range(3)
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


def steps_of(sample):
    """Every other sample is two steps shorter."""
    return STEPS - 2 * (sample % 2)


def attention(sample, added, share, text_share, norm):
    """Every head gives ``share`` to the added sinks, ``text_share`` to one moving text position,
    the rest evenly.
    """
    keys, steps = added + TEXT, steps_of(sample)
    received = np.empty((steps, LAYERS, HEADS, keys))
    weight = np.full(keys, (1 - share * bool(added) - text_share) / (TEXT - 1))
    for step in range(steps):
        row = weight.copy()
        row[added + PROMPT + step] = text_share
        row[:added] = share / max(added, 1)
        received[step] = row * TEXT
    value_norm = np.full((steps, LAYERS, keys), 2.0)
    value_norm[..., :added] = norm
    there = np.ones((steps, 3, LAYERS, HEADS))
    # Nothing is committed before the first step.
    there[0, COMMITTED] = np.nan
    return {
        "received": received,
        "visible": np.full((steps, keys), float(TEXT)),
        "positions": np.full(steps, float(TEXT)),
        "step_number": np.arange(steps, dtype=np.int32),
        "value_norm": value_norm,
        "key_norm": value_norm * 4,
        "row_entropy": there * 2.5,
        "row_logsumexp": there * 6.0,
    }


def one_query_a_step(sample, share):
    """An autoregressive run: keys grow, one query runs, it gives ``share`` to the first position,
    the rest evenly.
    """
    steps, keys = steps_of(sample), PROMPT + steps_of(sample)
    received, visible = np.full((steps, LAYERS, HEADS, keys), np.nan), np.zeros((steps, keys))
    for step in range(steps):
        here = PROMPT + step
        received[step, ..., :here] = (1 - share) / (here - 1)
        received[step, ..., 0] = share
        visible[step, :here] = 1
    value_norm = np.where(visible[:, None] > 0, 2.0, np.nan) * np.ones((1, LAYERS, 1))
    value_norm[..., 0] = 0.25
    return {
        "received": received,
        "visible": visible,
        "positions": PROMPT + np.arange(steps, dtype=float),
        "step_number": np.arange(steps, dtype=np.int32),
        "value_norm": value_norm,
    }


def tokens(sample, family="diffusion", words=WORDS):
    rows = []
    for step in range(steps_of(sample)):
        for position in range(TEXT if family == "diffusion" else PROMPT + step):
            masked = family == "diffusion" and position >= PROMPT + step
            state = "prompt" if position < PROMPT else "masked" if masked else "committed"
            text = "<m>" if masked else words[position % len(words)]
            rows.append(
                (sample, step, position, position, text, state, "mask" if masked else "", False)
            )
    columns = ("sample", "step", "position", "token_id", "text", "state", "special", "template")
    return dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))


def steps_table(sample):
    count = steps_of(sample)
    return {
        "sample": [sample] * count,
        "step": list(range(count)),
        "block": [step // BLOCK for step in range(count)],
        "masked": [TEXT - PROMPT - step for step in range(count)],
        "committed": [1] * count,
        "queries": [TEXT] * count,
    }


def generations(sample):
    prompt, completion = "It was", " a dark, stormy night."
    if sample:
        prompt, completion = "A <script>alert(1)</script>", " & more\n语"
    row = {"sample": sample, "prompt": prompt, "completion": completion, "rule": "low_confidence"}
    return {name: [value] for name, value in row.items()}


@pytest.fixture(scope="session")
def known(tmp_path_factory):
    """A folder, and the runs in it by what was asked for: the next that ask get a copy."""
    return tmp_path_factory.mktemp("known"), {}


@pytest.fixture
def make_study(tmp_path, known):
    return maker(tmp_path, known)


@pytest.fixture(scope="module")
def make_shared(tmp_path_factory, known):
    """As make_study, for runs that the tests of a module only read."""
    return maker(tmp_path_factory.mktemp("shared"), known)


def maker(root, known):
    write, (place, copies) = writer(root), known

    def make(name="tiny", *, folder=None, **how):
        if how.keys() & {"change", "maps", "whole"}:
            return write(name, folder=folder, **how)
        path, asked = root / (folder or name), repr(sorted(how.items()))
        if asked not in copies:
            copies[asked] = place / str(len(copies))
            shutil.copytree(write(name, folder=folder, **how).path, copies[asked])
            return open_run(path)
        shutil.copytree(copies[asked], path)
        info = open_run(path).info
        dataclasses.replace(info, model=info.model | {"name": name}).save(path)
        return open_run(path)

    return make


def writer(root):
    def write(
        name,
        *,
        added=0,
        share=0.5,
        samples=SAMPLES,
        text_share=0.3,
        norm=0.25,
        leave_out=(),
        folder=None,
        ran=1.0,
        family="diffusion",
        words=WORDS,
        maps=None,
        whole=None,
        change=lambda sample, arrays: None,
        **changes,
    ):
        """A run folder.

        added, share, norm: added sinks, the attention they take together, the length of their
        values; text_share: what the moving text position takes (of an autoregressive run: the first
        one). ran: at odd steps only this fraction of the queries ran, as under a cache. leave_out:
        tables and arrays that are not written. words: texts of the tokens, in turn. maps: "step3-…"
        -> (query, key), of sample 0. whole: more tables. change: may alter the arrays of a sample
        in place. Other keywords go into the model of run.json.
        """
        model = {
            "name": name,
            "family": family,
            "layers": LAYERS,
            "heads": HEADS,
            "sink_count": added,
        }
        model |= {"recorded_layers": list(range(LAYERS)), "recorded_heads": list(range(HEADS))}
        settings = {"steps": STEPS, "prompts": ["It was <i>a</i> dark"], "rule": "low_confidence"}
        path = root / (folder or name)
        how = {"kind": "study", "settings": settings, "seed": 3, "samples": samples}
        with RunWriter(path, model=model | changes, **how) as run:
            for sample in range(samples):
                if family == "diffusion":
                    arrays = attention(sample, added, share, text_share, norm)
                else:
                    arrays = one_query_a_step(sample, text_share)
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
                tables = {
                    "tokens": tokens(sample, family, words),
                    "generations": generations(sample),
                }
                if family == "diffusion":
                    tables["steps"] = steps_table(sample)
                tables = {name: one for name, one in tables.items() if name not in leave_out}
                run.write(sample, {sample: Contents(tables, files)})
            for table, columns in (whole or {}).items():
                run.table(table, columns)
        return open_run(path)

    return write


@pytest.fixture(scope="session")
def drawn_report(tmp_path_factory, known):
    """report.html of a run without and one with an added sink, with some of its figures."""
    make = maker(tmp_path_factory.mktemp("runs"), known)
    runs = [*costed(make("plain")), *costed(make("sink", added=1, text_share=0.1))]
    shown = ("heldout_loss", "sink_paths", "statistics")
    return page_with(*shown, of=runs, out=tmp_path_factory.mktemp("report"), tables=True)
