"""Whatever a file, a prompt or a template says: a value or one clear error, soon; never a traceback
or a hang.

The cases follow from a seed, SINKLAB_FUZZ_SEED, which a failure names; another one tries other
cases.
"""

import contextlib
import copy
import faulthandler
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

import sinklab
from commands import error_of
from refusals import refused
from sinklab.core.subject.settings import DecodingSettings
from sinklab.lab.checkpoints.info import describe
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.cli.main import main
from sinklab.lab.cli.progress import show
from sinklab.lab.data.corpora import read_corpus
from sinklab.lab.files import DEEPEST, from_json, read_json
from sinklab.lab.records import Arrays, Contents, RunWriter, open_run
from sinklab.lab.scoring.prompts import encode, read_prompts
from tiny_diffusion import save_tiny

SEED = int(os.environ.get("SINKLAB_FUZZ_SEED", "2026"))
LONGEST = 15
"""Seconds for one case; chat templates may take 10 of them."""
ODD = [
    None,
    True,
    -1,
    0,
    1,
    10**9,
    10**30,
    -(2**63),
    0.5,
    1e308,
    float("nan"),
    "",
    "x" * 5000,
    "\x1b]0;x\x07",
]
ODD += [
    "\x00",
    "\ud800",
    "../../x",
    "/etc/passwd",
    "9" * 5000,
    [],
    {},
    [0, 0],
    [True],
    [None],
    {"": {}},
    [[[]]] * 3,
]
BLOBS = [
    b"",
    b"\x00" * 8,
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"[" * 10**5,
    b'{"a":' * 10**5,
    b'"',
    b"9" * 5000,
    b"\x1b[2J",
]
BLOBS += [
    b"NaN",
    b"{}",
    b"[]",
    b"null",
    b"1e999",
    b'"\\ud800"',
    b"\n" * 100,
    b"PK\x03\x04",
    b"\x80\x04",
    b"%PDF",
]


class TooLong(BaseException):
    """A case did not end."""


@contextlib.contextmanager
def watched(case):
    """The block may raise ValueError or OSError, and must end."""

    def ring(*signal):
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    # for what waits in C, where no signal is answered
    faulthandler.dump_traceback_later(4 * LONGEST, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, OSError) as error:
        assert str(error).strip(), f"{case}: an error without a word"
    except TooLong:
        raise AssertionError(f"{case}: not over after {LONGEST} s") from None
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def bent(value, rng):
    """A JSON value with one of its places, at any depth, made another."""
    odd = rng.choice([*ODD, nested(rng.choice([50, 150, 900]))])
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return odd
    value = copy.copy(value)
    place = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    what = rng.random()
    if what < 0.1 and isinstance(value, dict):
        del value[place]
    elif what < 0.2 and isinstance(value, dict):
        value[rng.choice(["", "extra", "\x1b", "__class__"])] = odd
    else:
        value[place] = bent(value[place], rng) if isinstance(value[place], dict | list) else odd
    return value


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def damaged(content, rng):
    """Bytes with some of them lost, changed, said twice or put in between."""
    start = rng.randrange(len(content) + 1)
    stop = min(len(content), start + rng.choice([1, 8, 200]))
    blob = rng.choice([*BLOBS, rng.randbytes(8)])
    return rng.choice(
        [
            content[:start],
            content[:start] + content[stop:],
            content[:start] + blob + content[stop:],
            content[:stop] + content[start:],
            content[:start] + bytes(255 - byte for byte in content[start:stop]) + content[stop:],
            blob,
        ]
    )


def spoilt(file, content, rng):
    """Bytes of a file whose JSON, or whose bytes, are no longer what they were."""
    if file.suffix == ".json" and rng.random() < 0.6:
        with contextlib.suppress(ValueError):
            return json.dumps(bent(json.loads(content), rng)).encode("utf-8", "surrogatepass")
    return damaged(content, rng)


def cases(folder, work, count, read, only="*"):
    """Spoil one file of a folder, put it back and spoil another, and read the folder each time."""
    rng = random.Random(f"{SEED} {folder.name} {only}")
    copied = shutil.copytree(folder, Path(tempfile.mkdtemp(dir=work)) / folder.name)
    files = {file: file.read_bytes() for file in sorted(copied.glob(only)) if file.is_file()}
    print(f"SINKLAB_FUZZ_SEED={SEED}: {count} cases of {folder.name}")
    for number in range(count):
        file, content = rng.choice([*files.items()])
        file.write_bytes(spoilt(file, content, rng))
        with watched(f"SINKLAB_FUZZ_SEED={SEED}, case {number} of {folder.name}, {file.name}"):
            read(copied)
        file.write_bytes(content)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    with RunWriter(
        folder,
        kind="study",
        model={"name": "tiny", "layers": [0, 1]},
        settings={"a": {"b": [1]}},
        seed=0,
        samples=2,
    ) as out:
        for part in range(2):
            text = {"sample": [part] * 2, "step": [0, 1], "text": ["a", "b"]}
            one = Arrays({"received": np.ones((4, 8))}, {"received": ("step", "key")})
            out.write(part, {part: Contents({"tokens": text}, {"attention": one})})
        out.table("generations", {"prompt": ["x"], "completion": ["y"]})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "checkpoint")


@pytest.mark.slow
def test_run_folders(run, tmp_path):
    def read(folder):
        opened = open_run(folder)
        for name in opened.tables:
            opened.table(name)
            for sample in opened.samples[:1]:
                opened.table(name, sample)
        for name, sample in itertools.product(opened.array_files, opened.samples):
            opened.arrays(name, sample)
            opened.dims(name, sample)

    cases(run, tmp_path, 60, read)
    cases(run, tmp_path, 40, read, only="run.json")


def test_configs(checkpoint, tmp_path):
    cases(checkpoint, tmp_path, 40, lambda folder: describe(str(folder)), only="config.json")


@pytest.mark.slow
def test_checkpoints(checkpoint, tmp_path):
    cases(checkpoint, tmp_path, 40, load, only="*.json")
    cases(checkpoint, tmp_path, 20, load, only="*.safetensors")


def test_prompts_corpora_and_answers(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    rows = [
        {"prompt": "What?", "text": "It was a dark and stormy night.", "extra": [1, {"a": None}]}
    ] * 3
    (texts / "rows.json").write_text(json.dumps(rows))
    (texts / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (texts / "rows.csv").write_text("prompt,text\nWhat?,Some\n" * 3)
    (texts / "rows.txt").write_text("One\nTwo\n")
    (texts / "requests-0.jsonl").write_text(
        '{"run": "x", "key": "k", "answer": {"text": "t"}}\n' * 3
    )

    def read(folder):
        for file in sorted(folder.iterdir()):
            with contextlib.suppress(ValueError):
                read_prompts(file)
            if file.suffix in (".txt", ".jsonl"):
                with contextlib.suppress(ValueError):
                    [*read_corpus(file)]

    cases(texts, tmp_path, 40, read)


@pytest.fixture(scope="module")
def lm():
    return sinklab.load("tiny")


def test_prompts_that_are_no_text(lm):
    for text in ("\ud800", "a\udcff", "\udc80" * 3):
        refused(r"UTF-8: .*surrogates", encode, lm, text)
    for text in ("", "\x00", "\x1b]0;x\x07", "\u202e", "﷽" * 2000, "👩‍👩‍👧" * 50):
        with watched(repr(text[:9])):
            encode(lm, text)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if", "TemplateSyntaxError"),
    ],
)
def test_a_chat_format_that_cannot_be_used_is_refused(template, message, lm):
    lm.needed_tokenizer().chat_template = template
    refused(f"chat format .*--chat.*{message}", encode, lm, "Hello", chat=True)


def test_json_is_read_within_limits(tmp_path):
    assert from_json(json.dumps(nested(DEEPEST - 1))) == nested(DEEPEST - 1)
    for depth, message in (
        (DEEPEST + 1, "nested more than 100 levels"),
        (10**5, "nested too deeply"),
    ):
        refused(message, from_json, "[" * depth + "]" * depth)
    refused("hold a dict, but holds a list", from_json, "[]", dict)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        refused("file of at most 256 MB", read_json, path)
    with open(tmp_path / "large", "wb") as large:
        large.truncate((1 << 28) + 1)
    refused("ordinary file", read_json, tmp_path / "large")


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_weights_that_are_no_numbers(checkpoint, tmp_path, value):
    from safetensors.torch import load_file

    copied = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    weights = load_file(copied / "model.safetensors")
    name = sorted(weights)[-1]
    weights[name].view(-1)[-1] = value
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    refused(r"infinity in torch.float32", load, copied)


@pytest.mark.parametrize("seed", [-1, 1 << 63, "a", 0.5])
def test_seeds_out_of_range(seed):
    from sinklab.lab.studies.trace.study import StudySettings
    from sinklab.lab.training.settings import TrainSettings

    for settings in (StudySettings, TrainSettings, DecodingSettings):
        refused(rf"seed must be .* but is {seed!r}", settings, seed=seed)


def test_raw_bytes_in_an_argument_end_with_one_line(capsys):
    (told,) = error_of(f"generate {os.fsdecode(bytes([255, 254]))}", capsys).splitlines()
    assert told.startswith("sinklab: ") and "a prompt is text in UTF-8" in told


def test_the_last_resort(monkeypatch, capsys):
    """What a command says of an error deep inside."""

    def fails(*given, **named):
        raise RecursionError("too\ndeep")

    monkeypatch.setattr("sinklab.lab.checkpoints.info.describe", fails)
    said = error_of("info tiny", capsys)
    assert said == "sinklab: RecursionError, which --debug traces: too deep\n"
    with pytest.raises(RecursionError):
        main(["info", "tiny", "--debug"])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_signs_that_a_stream_cannot_show_are_spelt(encoding, checkpoint, tmp_path, monkeypatch):
    """A text and a table, after minutes of work."""
    told = io.BytesIO()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(told, encoding=encoding, write_through=True)
    )
    folder = shutil.copytree(checkpoint, tmp_path / "läuft…")
    assert main(["info", str(folder)]) == 0
    show([["–", "√2"]], ["measure", "…"])
    shown = told.getvalue().decode(encoding)
    assert "uft\\u2026" in shown and "\\u221a2" in shown


def test_a_terminal_gets_no_control_characters(capsys):
    from sinklab.lab.cli.progress import say, working

    evil = "a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\r\tb\n"
    spelt = "a\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\x7f\\x0d\tb\n\n"
    say(evil)
    assert capsys.readouterr().out == spelt
    with working() as progress:
        progress.stage(evil)
    assert "\x1b" not in capsys.readouterr().err
    assert main(["info", evil]) == 2
    assert "\x1b" not in capsys.readouterr().err


PIPES = {
    "settings.toml": ["trace", "a", "--config", "{pipe}", "--out", "{work}/out"],
    "reference/expected.safetensors": ["validate", "{work}/reference"],
    "reference/cases.json": ["validate", "{work}/reference"],
    "model/tokenizer_config.json": ["generate", "a", "--model", "{work}/model"],
    "model/model.safetensors": ["generate", "a", "--model", "{work}/model"],
    "sink.safetensors": ["generate", "a", "--model", "{model}", "--sink", "{pipe}"],
    "my.py": ["list", "--plugin", "{pipe}"],
    "run/generations.parquet": ["report", "{work}/run"],
}


@pytest.mark.ring("extras")
@pytest.mark.parametrize("name", PIPES)
def test_no_command_waits_for_a_pipe(name, checkpoint, run, tmp_path, capsys):
    """In place of any file that a command reads."""
    shutil.copytree(checkpoint, tmp_path / "model")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "cases.json").write_text(json.dumps({"logits": [{"name": "x"}]}))
    pipe = tmp_path / name
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    words = [word.format(pipe=pipe, work=tmp_path, model=checkpoint) for word in PIPES[name]]
    with watched(name):
        assert main(words) == 2
    assert pipe.name in capsys.readouterr().err
