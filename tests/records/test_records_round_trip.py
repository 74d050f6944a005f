import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from refusals import refused
from sinklab.lab.records import SCHEMA, RunWriter, open_run, weights_hash

MODEL = {"name": "tiny", "layers": 2}


def writer(path, **changes):
    about = {"kind": "study", "model": MODEL, "settings": {"steps": 4}, "seed": 7}
    return RunWriter(path, **about | changes)


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
    info = got.info
    assert (info.status, info.error, info.schema) == ("complete", None, SCHEMA)
    assert (info.model, info.settings, info.seed) == (MODEL, {"steps": 4}, 7)
    assert set(info.versions) == {"python", "torch", "transformers", "sinklab", "threads"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.seed = 8
    assert got.tables == ("steps", "tokens") and got.array_files == ("attention",)
    assert got.table("tokens")["text"].tolist() == ["a", "\n<b>"]
    arrays = got.arrays("attention")
    assert arrays["received"].dtype == np.float16
    np.testing.assert_allclose(arrays["received"], received, rtol=5e-4)
    # Integers are counts and stay exact.
    assert arrays["visible"].dtype.kind == "i" and arrays["visible"].tolist() == [[3, 3], [3, 2]]
    assert got.dims("attention")["received"] == ("step", "layer", "key")
    named = got.to_xarray("attention")["received"]
    assert named.dims == ("step", "layer", "key") and np.array_equal(named, arrays["received"])
    # Pandas alone reads a table.
    assert [*pd.read_parquet(got.path / "steps.parquet")["step"]] == [0, 1, 2]


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
    large, huge, dims = (
        {"norm": np.array([1.0, 7e4])},
        {"norm": np.array([1e39])},
        {"norm": ("key",)},
    )
    with writer(tmp_path) as run:
        with pytest.warns(UserWarning, match="instead of float16.*'norm'"):
            run.arrays("auto", large, dims)
        refused("'norm' is 70000.*float16", run.arrays, "asked", large, dims, dtype="float16")
        refused("float32 cannot hold", run.arrays, "asked", huge, dims, dtype="float32")
        run.arrays("wide", huge, dims, dtype="float64")
    got = open_run(tmp_path)
    norm = got.arrays("auto")["norm"]
    assert (norm.dtype, norm.tolist()) == (np.float32, [1.0, 70000.0])
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
        one, key = {"a": np.zeros(2)}, ("key",)
        two = one | {"b": np.zeros(3)}
        refused("Every array needs the names", run.arrays, "x", one, {})
        refused(r"per axis: 'a' has shape \(2,\)", run.arrays, "x", one, {"a": ("step", "key")})
        refused("'key' is 2 in 'a' and 3 in 'b'", run.arrays, "x", two, {"a": key, "b": key})
        refused("'a' has dtype <U1", run.arrays, "x", {"a": np.array(["q"])}, {"a": key})
        refused("float32, float64, but is 'f4'", run.arrays, "x", one, {"a": key}, dtype="f4")
    refused("called outside", run.arrays, "x", one, {"a": key})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


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
