"""The files of small runs: which there are, and what stands in each.

A trace of two texts and its page, a trace of an autoregressive model, a curve of the cost of
blocking keys, and three trainings: of a model with a sink, of a sink alone, of adapters. JSON is
held whole; of tables and arrays the types, the order, how they are stored, and the values; of the
page its list of files and its tables.

Left out: dates, durations, versions; checksums and weights of what was trained, which hang on
the last bits (their names, types and shapes are held); tokenizer files, checkpoints and the page
itself, which are listed alone, since transformers and the page's script have the say in them; of
config.json what transformers adds of its own. Parquet files are not compared as bytes: pyarrow
writes its version into each. On one machine two runs write the same bytes, but for what is said
here, the date on the page, and the notes of sink.safetensors, which come in any order.

Traced models and those of the curve are float64, so that what is rounded to float16 does not hang
on a processor. Trainings are float32.
"""

import csv
import json
import re
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import torch
from recipes import TEXT, TOY, VARIANTS, recipe, rounded, train, write_texts
from safetensors import safe_open

import sinklab
from frozen import Cells
from pictures import undrawn
from sinklab.lab.studies.curve.study import CurveSettings, masking_curve

TOLERANCE = 1e-6
PLACES = {"layers": (0, -1), "heads": (0, 3)}
TIMED = ("created", "transformers_version", "tokens_per_second", "seconds")
"""Fields and columns that hang on the day and the machine."""
LISTED = ("checkpoints", "report.html", "tokenizer", "weights.sha256")
"""Files of which these are part of the path are listed alone."""
SHA256 = "[0-9a-f]{64}"
FORM = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "is_causal",
)
"""Fields of a model's backbone that are held."""


def of_json(path: Path) -> Any:
    """What a JSON file says, without what hangs on the day and the machine."""
    said = json.loads(path.read_text())
    for name in ("versions", "files", "others"):
        if name in said:
            # other tests leave plug-ins in their process
            said[name] = [one for one in said[name] if not one.endswith(".py")]
    if "backbone" in said:
        said["backbone"] = {name: said["backbone"][name] for name in FORM}
    if said.get("kind") == "training":
        said["model"].get("init_from", {}).pop("sha256", None)
    return {name: value for name, value in said.items() if name not in TIMED}


def of_table(path: Path) -> dict[str, Any]:
    """Types, storage and values of a Parquet file."""
    table = pq.read_table(path)
    about = pq.read_metadata(path)
    chunks = [about.row_group(0).column(place) for place in range(about.num_columns)]
    values = table.to_pydict()
    return {
        # text is one or the other by the version of pandas
        "columns": [[one.name, str(one.type).replace("large_", "")] for one in table.schema],
        "groups": about.num_row_groups,
        "compression": sorted({one.compression for one in chunks}),
        "encodings": sorted({name for one in chunks for name in one.encodings}),
        "values": {name: rounded(one) for name, one in values.items() if name not in TIMED},
    }


def of_arrays(path: Path, is_shown: bool = True) -> dict[str, Any]:
    """Notes, types, shapes and values of a safetensors file."""
    with safe_open(path, "pt") as file:
        notes = {name: re.sub(SHA256, "", text) for name, text in file.metadata().items()}
        found: dict[str, Any] = {"notes": notes}
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            tensor = file.get_tensor(name)
            found[name] = {"type": str(tensor.dtype), "shape": [*tensor.shape]}
            found[name]["bytes"] = tensor.nbytes
            if is_shown:
                found[name]["values"] = rounded(tensor.flatten().tolist())
    return found


def of_csv(path: Path) -> list[list[Any]]:
    """The lines of a CSV file, numbers as numbers."""
    with open(path, newline="") as file:
        return [[*map(as_number, line)] for line in csv.reader(file)]


def as_number(text: str) -> Any:
    try:
        return rounded(float(text))
    except ValueError:
        return text


READ = {".json": of_json, ".parquet": of_table, ".safetensors": of_arrays, ".csv": of_csv}


def files_of(folder: str, group: str) -> Cells:
    """The list of the files of a folder, and what stands in each."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in paths]
    where = f"{group}/{Path(folder).name}"
    yield f"{where}/files", names
    for path, name in zip(paths, names, strict=True):
        if any(part in name for part in LISTED):
            continue
        if group == "training" and path.suffix == ".safetensors":
            yield f"{where}/{name}", of_arrays(path, is_shown=False)
        else:
            yield f"{where}/{name}", READ[path.suffix](path)


def write_trace() -> None:
    """Two texts with all that is recorded, and a second writing with sinks blocked; their page."""
    lm = sinklab.load("tiny-sink", dtype=torch.float64)
    more = {"statistics": ("all",), "maps": ("1:5:0",)}
    run = lm.watch(["The house stood", "She"], 3, **PLACES, **more).save("run")
    # without its pictures, which are none of its files
    with patch("sinklab.lab.reports.build.svg_of", undrawn):
        sinklab.report(run, "page")


def write_causal() -> None:
    """A text of an autoregressive model."""
    lm = sinklab.load("tiny-causal", dtype=torch.float64)
    lm.watch("She was", 3, **PLACES).save("run")


def write_curve() -> None:
    """A curve of one blocked key, with controls and untrained twins."""
    lm = sinklab.load("tiny", dtype=torch.float64)
    masking_curve(lm, "run", CurveSettings(ks=(0, 1), rows=2, length=24, twin=True))


def write_training() -> None:
    """Trainings of a few steps."""
    write_texts()
    often = {"steps": 6, "save_every": 3, "monitor_every": 2}
    train(recipe("laptop-scratch", "sink", **TOY | TEXT | often | {"out": "run"}))
    start = TEXT | {"steps": 2, "init_from": "run/model", "tokenizer": None} | VARIANTS["sink"]
    alone = {"train_only": "sink", "out": "sink alone"}
    train(recipe("laptop-scratch", **TOY | start | alone))
    adapted = {"train_only": "lora", "lora_rank": 2, "out": "adapters"}
    train(recipe("laptop-scratch", **TOY | start | adapted))


def cells(group: str) -> Cells:
    """The cells of a group, written in a folder of its own."""
    write = {
        "trace": write_trace,
        "causal": write_causal,
        "curve": write_curve,
        "training": write_training,
    }
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write[group]()
        for path in sorted(Path().iterdir()):
            if path.is_dir():
                yield from files_of(str(path), group)
