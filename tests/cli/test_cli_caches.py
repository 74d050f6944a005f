"""`sinklab caches`: the table, the verdicts, the run folder and the figure."""

from pathlib import Path

import pytest

from refusals import refused
from sinklab.lab.cli.command import conduct
from sinklab.lab.records import open_run
from sinklab.lab.studies.caches import Caches, CacheSettings
from tiny_diffusion import TEXT, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "m", sink=1, context=60)


def caches(model, out, **changes):
    """Lines that the command prints."""
    Path("text.txt").write_text(TEXT * 12, "utf-8")
    text = {"heldout": "text.txt", "rows": 2, "prompt_tokens": 16, "new_tokens": 6, "texts": 1}
    how = {"cache_keep": (0.25,), "scores": ("nearest",), "block_length": 6, "repeats": 1}
    settings = CacheSettings(**text | how | {"refreshed": (), "sparse": True} | changes)
    return conduct(Caches(), (str(model),), out, settings)


@pytest.mark.slow
def test_the_table_is_printed_and_kept(folder):
    lines = caches(folder, Path("run"))
    assert (
        " ".join(lines[0].split())
        == "loss, nats divergence, nats same first texts agree time (uncached 1) kB attended"
    )
    name, _, *found = lines[1].split()[:5]
    assert (name, found) == ("none", ["0.00000", "100.0%", "100.0%"])
    assert any(line.startswith("nearest 0.25 + 4 sinks ") for line in lines)
    # sparse attention is not timed, and is in the table all the same
    assert next(line for line in lines if line.startswith("window 0.25 ")).split()[-3:] == ["–"] * 3
    verdict = next(
        line for line in lines if line.startswith("nearest, 0.25 kept: with protected sinks ")
    )
    assert (
        verdict.endswith("2 rows, too few for an interval)")
        and "no verdict on the distance to uncached" in verdict
    )
    assert open_run("run").info.kind == "caches"
    assert Path("run/caches.png").is_file()
    refused("is taken; choose another", caches, folder, Path("run"))


def test_without_time_and_texts(folder):
    lines = caches(folder, Path("run"), repeats=0, texts=0, sparse=False)
    assert lines[0].split()[-1] == "agree"
    assert lines[1].split()[-1] == "–"
