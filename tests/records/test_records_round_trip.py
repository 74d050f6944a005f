import numpy as np
import pandas as pd
import torch

from refusals import refused
from sinklab.lab.records import SCHEMA, Arrays, Contents, RunWriter, open_run, weights_hash

MODEL = {"name": "tiny", "layers": 2}


def writer(path, **changes):
    about = {"kind": "study", "model": MODEL, "settings": {"steps": 4}, "seed": 7}
    return RunWriter(path, **about | changes)


def test_what_is_written_is_read(tmp_path):
    received = np.linspace(0, 3, 24).reshape(2, 3, 4)
    with writer(tmp_path / "deep" / "run", samples=1) as run:
        run.table("tokens", pd.DataFrame({"position": [0, 1], "text": ["a", "\n<b>"]}))
        arrays = {"received": received, "visible": np.array([[3, 3], [3, 2]])}
        dims = {"received": ("step", "layer", "key"), "visible": ("step", "sample")}
        run.write(0, {0: Contents({}, {"attention": Arrays(arrays, dims)})})
    got = open_run(tmp_path / "deep" / "run")
    info = got.info
    assert (info.status, info.error, info.schema) == ("complete", None, SCHEMA)
    assert (info.model, info.settings, info.seed) == (MODEL, {"steps": 4}, 7)
    assert {*info.versions} >= {"python", "torch", "transformers", "sinklab", "threads"}
    assert got.table("tokens")["text"].tolist() == ["a", "\n<b>"]
    arrays = got.arrays("attention", 0)
    assert arrays["visible"].dtype.kind == "i" and arrays["visible"].tolist() == [[3, 3], [3, 2]]
    named = got.to_xarray("attention", 0)["received"]
    assert named.dims == ("step", "layer", "key") and np.array_equal(named, received)
    assert named.dtype == np.float64


def test_tensors_bfloat16_and_nan(tmp_path):
    value = torch.tensor(
        [[1.5, float("nan"), float("inf")]], dtype=torch.bfloat16, requires_grad=True
    )
    values = {"x": value, "t": np.arange(6.0).reshape(2, 3).T}
    with writer(tmp_path, samples=1) as run:
        given = Arrays(values, {"x": ("row", "n"), "t": ("n", "k")})
        run.write(0, {0: Contents({}, {"a": given})})
    got = open_run(tmp_path).arrays("a", 0)
    assert got["x"][0, 0] == 1.5 and np.isnan(got["x"][0, 1]) and np.isinf(got["x"][0, 2])
    assert got["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_settings_that_json_cannot_hold_are_refused(tmp_path):
    for bad in (float("nan"), object()):
        refused(r"settings .*of JSON values", writer, tmp_path, settings={"x": bad})


def test_what_cannot_be_written_is_named(tmp_path):
    with writer(tmp_path) as run:
        refused("table 't' do not form a table", run.table, "t", {"a": [1], "b": [1, 2]})
        for dims in ({}, {"a": ("step", "key")}):
            one = Contents({}, {"x": Arrays({"a": np.zeros(2)}, dims)})
            refused(r"'a' has shape \(2,\)", run.write, 0, {0: one})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


def test_weights_hash_sees_names_and_shapes_and_no_order():
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1, dtype=torch.bfloat16)}
    digest = weights_hash(base)
    assert len(digest) == 64 and digest == weights_hash(dict(reversed(list(base.items()))))
    assert digest == weights_hash(
        {name: value.clone().requires_grad_() for name, value in base.items()}
    )
    changed = [base | {"a": base["a"].reshape(3, 2)}, {"c": base["a"], "b": base["b"]}]
    assert digest not in map(weights_hash, changed)
    assert weights_hash({"a": base["a"].T}) == weights_hash({"a": base["a"].T.contiguous()})
