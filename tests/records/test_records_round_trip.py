import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from refusals import refused
from sinklab.lab.records import SCHEMA, RunWriter, open_run, weights_hash


def writer(path, **changes):
    arguments = {
        "kind": "study",
        "model": {"name": "tiny", "layers": 2},
        "settings": {"steps": 4},
        "seed": 7,
    }
    return RunWriter(path, **(arguments | changes))


def test_what_is_written_is_read(tmp_path):
    received = np.linspace(0, 3, 24).reshape(2, 3, 4)
    with writer(tmp_path / "deep" / "run") as run:
        run.table(
            "tokens", {"position": [0, 1], "text": ["a", "\n<b>"], "flag": np.array([True, False])}
        )
        run.table("steps", pd.DataFrame({"step": [0, 1, 2]}))
        run.arrays(
            "attention",
            {"received": received, "visible": np.array([[3, 3], [3, 2]])},
            dims={"received": ("step", "layer", "key"), "visible": ("step", "sample")},
        )
    got = open_run(tmp_path / "deep" / "run")
    assert got.info.status == "complete" and got.info.error is None and got.info.schema == SCHEMA
    assert (
        got.info.model == {"name": "tiny", "layers": 2}
        and got.info.settings == {"steps": 4}
        and got.info.seed == 7
    )
    assert set(got.info.versions) == {"python", "torch", "transformers", "sinklab"}
    assert got.tables == ("tokens", "steps") and got.array_files == ("attention",)
    assert got.table("tokens")["text"].tolist() == ["a", "\n<b>"]
    arrays = got.arrays("attention")
    assert arrays["received"].dtype == np.float16
    np.testing.assert_allclose(arrays["received"], received, rtol=5e-4)
    # Integers are counts and stay exact.
    assert arrays["visible"].dtype.kind == "i" and arrays["visible"].tolist() == [[3, 3], [3, 2]]
    assert got.dims("attention")["received"] == ("step", "layer", "key")
    # Pandas alone reads a table.
    assert pd.read_parquet(tmp_path / "deep" / "run" / "steps.parquet")["step"].tolist() == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("written", "today"),
    [
        (
            {"removed": [2], "mass": [0.5], "realised": [0.25], "keys": [[3, 4]]},
            {"keys": [2], "held": [0.5], "removed": [0.25], "key_list": [[3, 4]]},
        ),
        ({"columns": [2], "held": [0.5]}, {"keys": [2], "held": [0.5]}),
        ({"columns": [2], "removed": [0.5]}, {"columns": [2], "removed": [0.5]}),
        ({"keys": [2], "removed": [0.25]}, {"keys": [2], "removed": [0.25]}),
    ],
)
def test_doses_of_older_folders_have_todays_names(tmp_path, written, today):
    with writer(tmp_path) as run:
        run.table("removals", written, part=0)
    found = open_run(tmp_path).table("removals")
    assert {name: [np.asarray(one).tolist() for one in found[name]] for name in found} == today


def test_info_is_frozen(tmp_path):
    with writer(tmp_path):
        pass
    with pytest.raises(dataclasses.FrozenInstanceError):
        open_run(tmp_path).info.seed = 8


def test_tensors_bfloat16_and_nan(tmp_path):
    value = torch.tensor(
        [[1.5, float("nan"), float("inf")]], dtype=torch.bfloat16, requires_grad=True
    )
    with writer(tmp_path) as run:
        run.arrays(
            "a",
            {"x": value, "t": np.arange(6.0).reshape(2, 3).T},
            dims={"x": ("row", "n"), "t": ("n", "k")},
        )
        run.table("t", {"loss": torch.tensor([0.5, 0.25])})
    got = open_run(tmp_path).arrays("a")
    assert got["x"][0, 0] == 1.5 and np.isnan(got["x"][0, 1]) and np.isinf(got["x"][0, 2])
    assert got["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert open_run(tmp_path).table("t")["loss"].tolist() == [0.5, 0.25]


def test_float16_overflow_is_never_silent(tmp_path):
    with writer(tmp_path) as run:
        with pytest.warns(UserWarning, match="instead of float16.*'norm'"):
            run.arrays("auto", {"norm": np.array([1.0, 70000.0])}, dims={"norm": ("key",)})
        refused(
            r"'norm' is 70000.*float16",
            run.arrays,
            "asked",
            {"norm": np.array([70000.0])},
            dims={"norm": ("key",)},
            dtype="float16",
        )
        refused(
            "float32 cannot hold",
            run.arrays,
            "asked",
            {"norm": np.array([1e39])},
            dims={"norm": ("key",)},
            dtype="float32",
        )
        run.arrays("wide", {"norm": np.array([1e39])}, dims={"norm": ("key",)}, dtype="float64")
    got = open_run(tmp_path)
    assert (
        got.arrays("auto")["norm"].tolist() == [1.0, 70000.0]
        and got.arrays("auto")["norm"].dtype == np.float32
    )
    assert got.array_files == ("auto", "wide")


def test_settings_become_plain_json(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Rule:
        epsilon: float

    settings = {
        "rule": Rule(3.0),
        "where": Path("a/b"),
        "dtype": torch.float32,
        "n": np.int64(3),
        "rules": {"b", "a"},
        "blocks": (1, 2),
    }
    with writer(tmp_path, settings=settings):
        pass
    assert json.loads((tmp_path / "run.json").read_text())["settings"] == {
        "rule": {"epsilon": 3.0},
        "where": "a/b",
        "dtype": "torch.float32",
        "n": 3,
        "rules": ["a", "b"],
        "blocks": [1, 2],
    }


@pytest.mark.parametrize("bad", [{"x": float("nan")}, {"x": object()}])
def test_settings_that_json_cannot_hold_are_refused(tmp_path, bad):
    refused(r"settings .*of JSON values", writer, tmp_path, settings=bad)


def test_bad_arguments_are_named(tmp_path):
    refused("run is made of lower-case", writer, tmp_path, kind="../x")
    run = writer(tmp_path)
    refused(r"block: table\('t'\) was called", run.table, "t", {"a": [1]})
    with run:
        refused(r"name of a table.*'a/b'", run.table, "a/b", {"a": [1]})
        refused("table 't' do not form a table", run.table, "t", {"a": [1], "b": [1, 2]})
        refused("Every array needs the names", run.arrays, "x", {"a": np.zeros(2)})
        refused(
            r"per axis: 'a' has shape \(2,\)",
            run.arrays,
            "x",
            {"a": np.zeros(2)},
            dims={"a": ("step", "key")},
        )
        refused(
            "'key' is 2 in 'a' and 3 in 'b'",
            run.arrays,
            "x",
            {"a": np.zeros(2), "b": np.zeros(3)},
            dims={"a": ("key",), "b": ("key",)},
        )
        refused("'a' has dtype <U1", run.arrays, "x", {"a": np.array(["q"])}, dims={"a": ("key",)})
        refused(
            "float32, float64, but is 'f4'",
            run.arrays,
            "x",
            {"a": np.zeros(2)},
            dims={"a": ("key",)},
            dtype="f4",
        )
    refused("called outside", run.arrays, "x", {"a": np.zeros(2)}, dims={"a": ("key",)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


def test_arrays_have_named_axes(tmp_path):
    with writer(tmp_path) as run:
        run.arrays("a", {"x": np.ones((2, 3))}, dims={"x": ("step", "key")})
    data = open_run(tmp_path).to_xarray("a")
    assert data["x"].dims == ("step", "key") and float(data["x"].sum()) == 6


def test_weights_hash_sees_names_dtypes_shapes_and_bytes():
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1, dtype=torch.bfloat16)}
    digest = weights_hash(base)
    assert len(digest) == 64 and digest == weights_hash(dict(reversed(list(base.items()))))
    assert digest == weights_hash(
        {name: value.clone().requires_grad_() for name, value in base.items()}
    )
    changed = [
        base | {"a": base["a"].reshape(3, 2)},
        base | {"a": base["a"] + 1},
        base | {"a": base["a"].view(torch.int32)},
        {"c": base["a"], "b": base["b"]},
    ]
    assert len({digest, *map(weights_hash, changed)}) == 5
    assert weights_hash({"a": base["a"].T}) == weights_hash({"a": base["a"].T.contiguous()})
    refused("'n' is a int", weights_hash, {"n": 3})
