"""Whether margins and a probe's noise foretell how many texts rounding changes: fitted on half of
the models, judged on the other half.

    python benchmarks/referee.py [--keep FILE] [--write]

Each model decodes the same texts twice, the second time with one thing different: the attention
backend, the fast decoder, the batch and its padding, threads, the type of the numbers. A text
counts as changed where a choice (which position, which token) differs anywhere. Of the first half
of the models it is read how large rounding errors of margins are, as multiples of what a jitter
moves them by (`sinklab.extras.referee.margins`); of the other half, other texts, how many texts
change is foretold from their margins and that multiple. Beside it stands what is foretold when a
kind of difference changes a constant share of texts. ``--write`` puts the multiples into src/, the
table into docs/ and the result into benchmarks/results.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy
import torch
from measure import RESULTS, environment
from transformers import LlamaConfig, Qwen3Config

from sinklab.core.models.config import DiffusionLMConfig
from sinklab.core.models.diffusion_lm import DiffusionLM
from sinklab.core.sampling.canvas import Canvas
from sinklab.core.sampling.settings import DecodingSettings
from sinklab.extras.referee.margins import PROBES, first_difference, measure_margins
from sinklab.extras.referee.rounding import WITHIN, Noise, change_chances, counted, pooled_noise
from sinklab.lab.checkpoints.loading import Loaded, load

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOISE = ROOT / "docs" / "reproducibility.md", ROOT / "src/sinklab/extras/referee/noise.toml"
MARK, END = "<!-- referee -->\n", "<!-- end -->"
NEW_TOKENS, BATCH, PADDING = 16, 16, 8
TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
HOW = (
    DecodingSettings(seed=0),
    DecodingSettings(rule="topk_margin", seed=0),
    DecodingSettings(steps=NEW_TOKENS // 2, seed=0),
    DecodingSettings(rule="entropy", block_length=12, seed=0),
    DecodingSettings(schedule="threshold", threshold=0.5, seed=0),
)
"""Decoders, dealt to the models in turn."""


def random_model(number: int) -> Loaded:
    """A model of a random shape with random weights, some with a sink or a gate, the same for the
    same number.
    """
    draw = np.random.default_rng([7, number])
    heads, kind = int(draw.choice([2, 4])), draw.choice(["none", "none", "token", "kv"])
    width = heads * 16
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": heads,
    }
    shape |= {
        "num_key_value_heads": int(draw.choice([1, heads])),
        "num_hidden_layers": int(draw.choice([2, 3])),
    }
    shape |= {"vocab_size": int(draw.choice([60, 200, 600])), "max_position_embeddings": 128}
    config = (Qwen3Config if number % 2 else LlamaConfig)(
        initializer_range=float(draw.uniform(0.08, 0.3)), **shape
    )
    extra = {} if kind == "none" else {"sink_kind": str(kind), "sink_count": 1}
    extra |= {"gate": "elementwise"} if draw.random() < 0.2 else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        model = DiffusionLM(DiffusionLMConfig(config, mask_token_id=2, **extra)).eval()
    return replace(load("tiny"), model=model, tokenizer=None, name=f"random-{number}")


def models() -> dict[str, Callable[[], Loaded]]:
    """All of them; every other one is for the fit."""
    first: dict[str, Callable[[], Loaded]] = {
        "tiny": lambda: load("tiny"),
        "tiny-sink": lambda: load("tiny-sink"),
    }
    return {
        f"random-{number}": (lambda number=number: random_model(number)) for number in range(10)
    } | first


def canvas_for(loaded: Loaded, texts: int, seed: int) -> Canvas:
    """Prompts of 4 to 12 tokens: of the excerpt in the package, or random ids where there is no
    tokenizer.
    """
    draw, config = np.random.default_rng(seed), loaded.model.config
    lengths = draw.integers(4, 13, texts)
    if loaded.tokenizer is None:
        prompts = [
            draw.integers(3, config.backbone.vocab_size, length).tolist() for length in lengths
        ]
    else:
        path = ROOT / "src/sinklab/lab/checkpoints/packaged/heldout.jsonl"
        whole = " ".join(
            json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()[:40]
        )
        ids: Any = loaded.tokenizer(whole, add_special_tokens=False)["input_ids"]
        starts = draw.integers(0, len(ids) - 20, texts)
        prompts = [
            ids[start : start + length] for start, length in zip(starts, lengths, strict=True)
        ]
    return Canvas.from_prompts(
        prompts, new_tokens=NEW_TOKENS, mask_id=config.mask_token_id, pad_id=0
    )


def rows_of(canvas: Canvas, rows: slice, padding: int = 0) -> Canvas:
    """Some rows, with columns of padding in front."""
    front = torch.zeros(len(canvas.ids_BS[rows]), padding, dtype=torch.long)
    whole = (canvas.ids_BS, canvas.attention_BS, canvas.open_BS)
    return Canvas(
        *(torch.cat([front.to(one.dtype), one[rows]], 1) for one in whole), canvas.mask_id
    )


def decoded(
    loaded: Loaded,
    canvas: Canvas,
    how: DecodingSettings,
    *,
    size: int = BATCH,
    padding: int = 0,
    **more: Any,
) -> pd.DataFrame:
    """The margins of all texts, written in batches of so many rows; columns are those of the
    canvas.
    """
    tables = []
    for start in range(0, len(canvas.ids_BS), size):
        part = rows_of(canvas, slice(start, start + size), padding)
        table = measure_margins(loaded, part, how, **{"probes": 0, "plain": True} | more)[1]
        places = table["kind"] != "token"
        table["column"] -= padding
        table.loc[places, "other"] -= padding
        tables.append(table.assign(row=table["row"] + start))
    return pd.concat(tables, ignore_index=True)


@contextmanager
def eager(loaded: Loaded) -> Iterator[None]:
    """The other attention backend for the length of the block."""
    loaded.model.set_attn_implementation("eager")
    yield
    loaded.model.set_attn_implementation("sdpa")


@contextmanager
def two_threads() -> Iterator[None]:
    """Two threads for the length of the block."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pairs(
    whole: Loaded, canvas: Canvas, how: DecodingSettings
) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """(kind, margins of the reference with their noise, margins with one thing different)."""
    of_type = {
        name: replace(whole, model=copy.deepcopy(whole.model).to(dtype))
        for name, dtype in TYPES.items()
    }
    for name in ("float32", "bfloat16"):
        one = of_type[name]
        reference = decoded(one, canvas, how, probes=PROBES)
        yield f"{name}.nothing", reference, decoded(one, canvas, how)
        with eager(one):
            yield f"{name}.backend", reference, decoded(one, canvas, how)
        if one.model.denoiser().is_fast:
            yield f"{name}.fast", reference, decoded(one, canvas, how, plain=False)
        yield f"{name}.batch", reference, decoded(one, canvas, how, size=5, padding=PADDING)
        if name == "float32":
            with two_threads():
                yield f"{name}.threads", reference, decoded(one, canvas, how)
        for other in {"float32": ("float64", "bfloat16", "float16"), "bfloat16": ("float16",)}.get(
            name, ()
        ):
            yield f"{name}.{other}", reference, decoded(of_type[other], canvas, how)
        yield from planted(one, name, reference, canvas, how)


def planted(
    one: Loaded, name: str, reference: pd.DataFrame, canvas: Canvas, how: DecodingSettings
) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Differences that are no rounding: what attention adds in the first layer is larger."""
    with _layer(one, 1.02):
        yield f"{name}.planted: a layer 2 % larger", reference, decoded(one, canvas, how)
    with _layer(one, 1.1):
        yield f"{name}.planted: a layer 10 % larger", reference, decoded(one, canvas, how)


@contextmanager
def _layer(loaded: Loaded, factor: float) -> Iterator[None]:
    hook = loaded.model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda module, given, out: out * factor
    )
    yield
    hook.remove()


def multiple(reference: pd.DataFrame, other: pd.DataFrame) -> float:
    """Rounding errors of margins as a multiple of the jitter's, over what was chosen before the
    first difference.
    """
    until = reference["row"].map(first_difference(reference, other)).fillna(np.inf)
    keys = ["row", "step", "kind", "column"]
    both = reference[reference["step"] < until].merge(
        other[[*keys, "margin"]], on=keys, suffixes=("", "_other")
    )
    found = []
    for _, lines in both.groupby("kind"):
        error = (lines["margin_other"] - lines["margin"]).abs().sum()
        found.append((error / lines["noise"].sum() if lines["noise"].sum() else np.nan, len(lines)))
    ratios, counts = np.array(found or [(np.nan, 1)]).T
    known = np.isfinite(ratios)
    # of normal errors: mean absolute value over standard deviation
    return (
        float(np.average(ratios[known], weights=counts[known]) / np.sqrt(2 / np.pi))
        if known.any()
        else np.nan
    )


def measured(texts: int, only: int | None) -> pd.DataFrame:
    """A line for each model and kind: the multiple, how many texts changed, and the margins."""
    lines = []
    for number, (name, make) in enumerate([*models().items()][:only]):
        began, loaded = time.process_time(), make()
        canvas, how = canvas_for(loaded, texts, 100 + number), HOW[number // 2 % len(HOW)]
        about = {
            "model": name,
            "half": "judged" if number % 2 else "fit",
            "texts": texts,
            "rule": how.rule,
        }
        for kind, reference, other in pairs(loaded, canvas, how):
            changed = int(first_difference(reference, other).notna().sum())
            line = {
                "kind": kind,
                "changed": changed,
                "multiple": multiple(reference, other),
                "margins": reference,
            }
            lines.append(about | line)
        print(f"{name}: {time.process_time() - began:.0f} s of processor time", flush=True)
    return pd.DataFrame(lines)


def is_rounding(kind: str) -> bool:
    """Whether a kind of difference is one of rounding, not nothing and not planted."""
    return not kind.endswith(".nothing") and "planted" not in kind


def fitted(found: pd.DataFrame) -> dict[str, Noise]:
    """The noise of each kind from the half that is for it; none where nothing moved, or in one
    model alone (threads).

    The spreads of few models learn from one another, as the noise of margins does.
    """
    fit = found[(found["half"] == "fit") & found["kind"].map(is_rounding) & (found["multiple"] > 0)]
    fit = fit[fit.groupby("kind")["model"].transform("count") > 1]
    logs = np.log(fit["multiple"]).groupby(fit["kind"])
    models = int(logs.count().min())
    spreads, freedom = pooled_noise(logs.std().to_numpy(), models - 1)
    further = spreads * math.sqrt(1 + 1 / models)
    return {
        kind: Noise(kind, round(float(log), 3), round(float(spread), 3), round(freedom))
        for (kind, log), spread in zip(logs.mean().items(), further, strict=True)
    }


def constant(found: pd.DataFrame, kind: str, texts: int) -> tuple[int, int]:
    """The interval by a constant share of texts, with the spread between models that the fitting
    half has.
    """
    fit = found[(found["half"] == "fit") & (found["kind"] == kind)]
    share = fit["changed"] / fit["texts"]
    mean = (fit["changed"].sum() + 0.5) / (fit["texts"].sum() + 1)
    excess = max(float(share.var()) - mean * (1 - mean) / texts, 1e-4) / (mean * (1 - mean))
    weight = 1 / min(excess, 0.9) - 1
    law = scipy.stats.betabinom(texts, mean * weight, (1 - mean) * weight)
    return int(law.ppf(0.025)), int(law.ppf(0.975))


def judged(found: pd.DataFrame, noise: dict[str, Noise]) -> pd.DataFrame:
    """A line for each pair of the other half: what was foretold, by margins and by a constant
    share, and what came.
    """
    lines = []
    for one in found[found["half"] == "judged"].to_dict("records"):
        kind, texts = one["kind"], one["texts"]
        line = {
            name: one[name] for name in ("model", "rule", "kind", "texts", "changed", "multiple")
        }
        if is_rounding(kind):
            nothing = 0.0, 0, 0
            told = (
                counted(change_chances(one["margins"], noise[kind], PROBES))
                if kind in noise
                else nothing
            )
            line |= dict(zip(("mean", "low", "high"), told, strict=True))
            line |= dict(
                zip(("constant_low", "constant_high"), constant(found, kind, texts), strict=True)
            )
        elif "planted" in kind:
            # where rows are computed one by one, a batch moves nothing
            names = [f"{kind.split('.')[0]}.{what}" for what in WITHIN]
            within = [noise[name] for name in names if name in noise]
            line["high"] = max(
                counted(change_chances(one["margins"], each, PROBES))[2] for each in within
            )
            line["multiple_high"] = max(
                float(np.quantile(each.multiples(), 0.975)) for each in within
            )
        lines.append(line)
    return pd.DataFrame(lines)


def summary(lines: pd.DataFrame, noise: dict[str, Noise]) -> list[dict[str, Any]]:
    """A line for each kind, and for all together."""
    told = lines[lines["kind"].map(is_rounding)]
    open_ = told[told["mean"] >= 0.5]
    # what is far below any margin needs one line
    fine = [kind for kind in told["kind"].unique() if kind not in noise or noise[kind].log < -5]
    together = "float32." + ", ".join(kind.split(".")[1] for kind in fine)
    groups = [
        *told.groupby(told["kind"].where(~told["kind"].isin(fine), together), sort=False),
        ("all", told),
    ]
    groups.append(("of these, half a text or more is foretold", open_))
    table = []
    for kind, part in groups:
        inside = part["changed"].between(part["low"], part["high"])
        by_share = part["changed"].between(part["constant_low"], part["constant_high"])
        row = {
            "kind": kind,
            "pairs": len(part),
            "foretold": part["mean"].mean(),
            "changed": part["changed"].mean(),
        }
        row |= {"covered": inside.mean(), "width": (part["high"] - part["low"]).mean()}
        row |= {"constant_covered": by_share.mean()}
        row["constant_width"] = (part["constant_high"] - part["constant_low"]).mean()
        row["multiple"] = math.exp(noise[kind].log) if kind in noise else math.nan
        table.append(
            {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in row.items()
            }
        )
    return table


def printed(table: list[dict[str, Any]]) -> str:
    """The table as it stands in docs/."""
    names = (
        "what differs",
        "pairs",
        "noise",
        "texts changed, mean",
        "foretold",
        "covered",
        "width",
    )
    rows = [
        "| " + " | ".join([*names, "constant share: covered", "width"]) + " |",
        "|" + "---|" * 9,
    ]
    for one in table:
        noise = "–" if math.isnan(one["multiple"]) else f"{one['multiple']:.2g}"
        cells = [
            one["kind"].replace(".", ", ", 1),
            one["pairs"],
            noise,
            f"{one['changed']:.2f}",
            f"{one['foretold']:.2f}",
        ]
        cells += [f"{one['covered']:.1%}", f"{one['width']:.1f}", f"{one['constant_covered']:.1%}"]
        rows.append("| " + " | ".join(map(str, [*cells, f"{one['constant_width']:.1f}"])) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--only", type=int, help="the first so many models")
    parser.add_argument(
        "--keep",
        type=Path,
        help="file that measurements are kept in, and taken from where it is there",
    )
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    if given.keep and given.keep.is_file():
        found = pd.read_pickle(given.keep)
    else:
        found = measured(given.texts, given.only)
        found.attrs["processor_s"] = round(time.process_time() - began)
        if given.keep:
            found.to_pickle(given.keep)
    noise = fitted(found)
    lines = judged(found, noise)
    table = summary(lines, noise)
    null, planted_ = (
        lines[lines["kind"].str.endswith(".nothing")],
        lines[lines["kind"].str.contains("planted")],
    )
    facts = {
        "null_pairs": len(null),
        "null_changed": int(null["changed"].sum()),
        "planted_pairs": len(planted_),
    }
    # by how many texts change, and by how large the errors of margins are: beyond the upper ends
    # for rounding
    for kind, part in planted_.groupby("kind"):
        by_texts, by_margins = (
            part["changed"] > part["high"],
            part["multiple"] > part["multiple_high"],
        )
        facts[kind] = {
            "pairs": len(part),
            "found_by_texts": int(by_texts.sum()),
            "by_margins": int(by_margins.sum()),
        }
    print(printed(table), json.dumps(facts))
    if given.write:
        result = {
            "environment": environment(),
            "processor_s": found.attrs["processor_s"],
            "summary": table,
            **facts,
        }
        result |= {
            "noise": {kind: [one.log, one.spread, one.freedom] for kind, one in noise.items()}
        }
        fit = found[(found["half"] == "fit") & found["kind"].map(is_rounding)]
        result["fit"] = fit[["model", "kind", "texts", "changed", "multiple"]].to_dict("records")
        result["judged"] = json.loads(lines.to_json(orient="records"))
        today = datetime.datetime.now(datetime.UTC).date()
        (RESULTS / f"referee_cpu_{today}.json").write_text(
            json.dumps(result, indent=1) + "\n", "utf-8"
        )
        written = [
            f'"{kind}" = {{ log = {one.log}, spread = {one.spread}, freedom = {one.freedom} }}\n'
            for kind, one in sorted(noise.items())
        ]
        NOISE.write_text(
            "# Written by benchmarks/referee.py: see rounding.Noise.\n\n" + "".join(written),
            "utf-8",
        )
        before, _, rest = PAGE.read_text("utf-8").partition(MARK)
        PAGE.write_text(before + MARK + printed(table) + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main()
