"""`sinklab caches`: the table, the verdicts, the run folder and the figure."""

import pytest

from refusals import refused
from sinklab.lab.cli.command import conduct
from sinklab.lab.records import open_run
from sinklab.lab.studies.caches import Caches, CacheSettings
from tiny_diffusion import TEXT, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "m", sink=1, context=60)


def caches(model, out, settings):
    print("\n".join(conduct(Caches(), (model,), out, settings)))


def settings(tmp_path, **changes):
    (tmp_path / "text.txt").write_text(TEXT * 12, "utf-8")
    small = {
        "cache_keep": (0.25,),
        "rows": 2,
        "batch": 2,
        "prompt_tokens": 16,
        "new_tokens": 6,
        "block_length": 6,
        "texts": 1,
    }
    return CacheSettings(
        **{**small, "repeats": 1, "heldout": str(tmp_path / "text.txt"), "sparse": True, **changes}
    )


def test_the_table_is_printed_and_kept(folder, tmp_path, capsys):
    caches(str(folder), tmp_path / "run", settings=settings(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert (
        " ".join(lines[0].split())
        == "loss, nats divergence, nats same first texts agree time (uncached 1) kB attended"
    )
    assert lines[1].split()[0] == "none" and lines[1].split()[2:5] == [
        "0.00000",
        "100.0%",
        "100.0%",
    ]
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
    assert open_run(tmp_path / "run").info.kind == "caches"
    assert (tmp_path / "run" / "caches.png").is_file()
    refused(
        "is taken; choose another",
        caches,
        str(folder),
        tmp_path / "run",
        settings=settings(tmp_path),
    )


def test_without_time_and_texts(folder, tmp_path, capsys):
    caches(
        str(folder), tmp_path / "run", settings=settings(tmp_path, repeats=0, texts=0, sparse=False)
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "agree"
    assert lines[1].split()[-1] == "–"
