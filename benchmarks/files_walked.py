"""How much of the package one command runs through: its files and functions, comprehensions and
lambdas not counted.

    python benchmarks/files_walked.py [trace] [train] [--show files|functions]

Two commands, each in a process of its own: a trace of one prompt, and a training of three steps on
a toy corpus without the monitor's looks. What runs while modules are imported does not count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

TARGETS = {"files": 72, "functions": 602}
SMALL = (
    "--vocab-size 270 --hidden-size 32 --layers 2 --heads 2 --mlp-size 48 --length 32 --batch 4 "
    "--no-bf16"
)
COMMANDS = {
    "trace": ["trace", "The house stood at the end of a", "--new-tokens", "8", "--out", "run"],
    "train": [
        "train",
        "--corpus",
        "text.txt",
        "--steps",
        "3",
        "--monitor-every",
        "0",
        "--out",
        "run",
        *SMALL.split(),
    ],
}
TEXT = "The old man sat by the sea, and the boats came in with the evening wind. "


def walked(arguments: list[str]) -> set[tuple[str, str]]:
    """(file, qualified name) of every function of the package that the command runs."""
    import sinklab
    from sinklab.lab.cli import main

    home = str(Path(sinklab.__file__).parent)
    seen: set[CodeType] = set()
    importing = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal importing
        if frame.f_code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing:
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        status = main(arguments)
    finally:
        sys.setprofile(None)
    assert status == 0, f"{arguments[0]} ended with status {status}"
    ours = [code for code in seen if code.co_filename.startswith(home)]
    return {
        (str(Path(code.co_filename).relative_to(home)), code.co_qualname)
        for code in ours
        if not code.co_name.startswith("<")
    }


def report(names: list[str], show: str) -> None:
    """A line for each command, and what is asked for beside it."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "text.txt").write_text(TEXT * 60)
            source = str(Path(__file__).parents[1] / "src")
            told = subprocess.run(
                [sys.executable, __file__, "--run", name],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": source},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        functions = [tuple(one) for one in json.loads(told.splitlines()[-1])]
        files = collections.Counter(file for file, _ in functions)
        print(
            f"{name}: {len(files)} files (at most {TARGETS['files']}), {len(functions)} functions "
            f"(at most {TARGETS['functions']})"
        )
        rooms = collections.Counter[str]()
        for file, count in files.items():
            rooms[file.partition("/")[0]] += count
        print("  " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
        if show == "files":
            print("\n".join(f"  {count:4} {file}" for file, count in files.most_common()))
        if show == "functions":
            print("\n".join(f"  {file} {function}" for file, function in sorted(functions)))


def main_of_script() -> None:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "commands", nargs="*", default=[*COMMANDS], help=f"of {', '.join(COMMANDS)}"
    )
    parser.add_argument("--show", choices=("rooms", "files", "functions"), default="rooms")
    parser.add_argument("--run", choices=[*COMMANDS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        with contextlib.redirect_stdout(sys.stderr):
            found = walked(COMMANDS[given.run])
        print(json.dumps(sorted(found)))
    else:
        report(given.commands, given.show)


if __name__ == "__main__":
    main_of_script()
