"""HumanEval for lm-eval: each completion becomes a program with its tests, which runs inside
bubblewrap. Where that cannot be had programs are kept, and never run outside of it.

A program sees Python and its libraries, read-only, and no network, no other process, no file of the
user and no place to write to. The tests run in the same process, so a program that means to cheat
could; models do not, and one that ends early has not passed.
"""

import inspect
import math
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sinklab.lab.registry import sandboxes

SECONDS = 10
"""Time of a program by the clock."""
BEGUN = 60
"""Time of the trial, which a busy machine may begin late."""


def _inside(source: str, word: str) -> None:
    """Runs in the box: the program, under limits; says the word if it ran to its end."""
    import os
    import resource

    said = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    try:
        exec(compile(source, "program", "exec"), {"__name__": "program"})
    except BaseException as error:
        word = f"{type(error).__name__}: {error}"
    os.write(said, word[:500].encode(errors="replace"))


def _escape(secret: str, port: int) -> None:
    """Runs in the box: raises AssertionError with the first way out of it."""
    import os
    import socket

    ways = {
        "reads a file of the user": lambda: os.open(secret, os.O_RDONLY),
        "makes a folder": lambda: os.mkdir("/written"),
        "writes beside Python": lambda: os.open(f"{os.__file__}.written", os.O_CREAT),
        "reaches the network": lambda: socket.create_connection(("127.0.0.1", port), 1),
    }
    for name, way in ways.items():
        try:
            way()
        except OSError:
            continue
        raise AssertionError(name)


def run_program(source: str, seconds: float = SECONDS) -> str:
    """Run a program in the box: "passed", or why not."""
    word = secrets.token_hex()
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--cap-drop", "ALL", "--dev", "/dev", "--proc", "/proc"]
    for path in ("/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix):
        command += ["--ro-bind-try", path, path]
    command += ["--remount-ro", "/", "--chdir", "/", sys.executable, "-I", "-"]
    script = f"{inspect.getsource(_inside)}\n_inside({source!r}, {word!r})"
    try:
        ran = subprocess.run(command, input=script.encode(), capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"failed: {seconds} s were not enough"
    told = ran.stdout.decode(errors="replace")
    if told == word:
        return "passed"
    return f"failed: {told or ran.stderr[-200:].decode(errors='replace') or 'it ended early'}"


@cache
def why_not() -> str:
    """Why programs are not run on this machine; empty where a trial finds no way out of the box."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (the program bwrap) is not installed"
    with tempfile.NamedTemporaryFile() as secret, socket.create_server(("127.0.0.1", 0)) as port:
        given = (secret.name, port.getsockname()[1])
        trial = run_program(f"{inspect.getsource(_escape)}\n_escape(*{given})", BEGUN)
    if trial == "passed":
        return ""
    return f"bubblewrap does not hold here: {trial}"


def run_programs(programs: Sequence[str]) -> list[str]:
    """What became of each, several at a time."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return list(pool.map(run_program, programs))


def program_of(doc: Mapping[str, Any], completion: str) -> str:
    """The program that a completion makes of its question, with the tests behind it.

    A completion continues the prompt, up to a code fence. A chat model writes the function anew in
    a fence: that takes the place of the prompt's own, behind its imports and helpers.
    """
    head = f"def {doc['entry_point']}("
    fenced = re.findall(r"^```\w*\n(.*?)(?:^```|\Z)", completion, re.DOTALL | re.MULTILINE)
    whole = [code for code in fenced if head in code]
    if whole:
        program = doc["prompt"].partition(head)[0] + whole[0]
    elif fenced and not completion.lstrip("\n").startswith((" ", "\t")):
        program = doc["prompt"] + fenced[0]
    else:
        program = doc["prompt"] + completion.partition("```")[0]
    return f"{program}\n\n{doc['test']}\n\ncheck({doc['entry_point']})\n"


def run_completions(
    resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """A filter of lm-eval: of each question what became of its program, or the program itself."""
    programs = [program_of(doc, texts[0]) for texts, doc in zip(resps, docs, strict=True)]
    if not why_not():
        programs = run_programs(programs)
    return [[one] for one in programs]


def passed(references: Sequence[str], predictions: Sequence[Sequence[str]]) -> dict[str, float]:
    """The metric: 1 for a program that passed, 0 for another, NaN for one that was kept."""
    fate = predictions[0][0]
    if fate == "passed":
        return {"pass@1": 1.0}
    return {"pass@1": 0.0 if fate.startswith("failed: ") else math.nan}


@sandboxes.register("humaneval")
@dataclass(frozen=True)
class HumanEvalSandbox:
    """HumanEval's functions for lm-eval, and the box that its programs run in."""

    why_not = staticmethod(why_not)
    run = staticmethod(run_programs)

    def task_file(self) -> Path:
        """Task file that names the functions, to be included in place of lm-eval's own."""
        return Path(__file__).with_name("humaneval.yaml")
