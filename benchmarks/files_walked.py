"""How much of the package one thing runs through: its files and functions, comprehensions,
lambdas and what a dataclass writes for itself not counted.

    python benchmarks/files_walked.py [trace] [train] [report] [tracing] [blocked_key]
        [--show files|functions]

Three commands: `trace` of one prompt, `train` of three steps on a toy corpus without the monitor's
looks, and `report` of a trace, made before the walk: its way is that of the runs, so that the files
count that have a function which was handed them, and how often the way, function by function in the
order of entry, comes back to a file that it had left. Two blocks of Python on a tiny model:
`tracing` is a decoding run inside
`trace(model)`, up to the array of a statistic; `blocked_key` is the way of one key from
`intervene(model, BlockKeys(TopKeys(1)))` to the attention kernel. Each runs in a process of its
own. What runs while modules are imported does not count.

The way of a blocked key is everything that is entered, helpers too, from the call of `intervene`
until the kernel is called without the key: entering the block, the forward that chooses the key,
and the next one until its last call of scaled_dot_product_attention. It leaves out what makes the
edit's value (the call of `BlockKeys`) and what comes after that kernel. Its model is transformers'
own, with one layer, so that no file of the package is there for the model's sake. The narrower
reading is printed beside it: the files with a function that was handed the attention call.
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
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

LIMITS = {"trace": 78, "train": 31, "report": 34, "tracing": 37, "blocked_key": 21}
"""Files that a walk may enter, as things are."""
ASKED = {"trace": 45, "tracing": 45, "blocked_key": 6}
"""Files that it should enter at most: what a reader can hold."""
HANDED = {"tracing": 5, "blocked_key": 8, "report": 9}
"""Files of a walk with a function that may be handed the attention call, or the runs of a report,
as things are."""
CARRIERS = {"Call", "Run", "Study"}
"""Types of which one is handed on."""
FUNCTIONS = {"trace": 592, "train": 225, "report": 324, "tracing": 232, "blocked_key": 177}
"""Functions that it may enter, as things are."""
KERNEL = "scaled_dot_product_attention"
SMALL = (
    "--vocab-size 270 --hidden-size 32 --layers 2 --heads 2 --mlp-size 48 --length 32 --batch 4 "
    "--no-bf16"
)
COMMANDS = {
    "trace": ["trace", "The house stood at the end of a", "--new-tokens", "8", "--out", "run"],
    "report": ["report", "run", "--out", "page"],
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


class Walk:
    """Functions of the package that are entered inside the block, in order."""

    def __init__(self) -> None:
        import sinklab

        self.home = str(Path(sinklab.__file__).parent)
        self.part = ""
        """Part of the walk that runs now."""
        self.entered: dict[CodeType, tuple[str, CodeType | None]] = {}
        """Function -> the part in which it was first entered, and its caller there in the
        package."""
        self.at_kernel = 0
        """Functions that were entered when the attention kernel was called last."""
        self.handed: set[CodeType] = set()
        """Functions that had one of `CARRIERS` among their arguments, or in a list there."""
        self._importing = 0

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "c_call" and getattr(argument, "__name__", "") == KERNEL:
            self.at_kernel = len(self.entered)
        elif event == "call" and not self._importing and self._counts(code):
            self.entered.setdefault(code, (self.part, self._caller(frame)))
            given = [*frame.f_locals.values()]
            given += [one[0] for one in given if isinstance(one, list) and one]
            if CARRIERS & {type(one).__name__ for one in given}:
                self.handed.add(code)

    def _counts(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self.home) and not code.co_name.startswith("<")

    def _caller(self, frame: FrameType) -> CodeType | None:
        above = frame.f_back
        while above is not None and not above.f_code.co_filename.startswith(self.home):
            above = above.f_back
        return above and above.f_code

    def functions(self, *, to_kernel: bool = False) -> list[list[Any]]:
        """File, function, part of the walk, the file of the first caller ("" for the script), and
        whether it was handed the attention call, in the order of entry.
        """
        found = list(self.entered.items())
        if to_kernel:
            found = found[: self.at_kernel]
        return [
            [
                self._file(code),
                code.co_qualname,
                part,
                self._file(caller) if caller else "",
                code in self.handed,
            ]
            for code, (part, caller) in found
        ]

    def _file(self, code: CodeType) -> str:
        return Path(code.co_filename).relative_to(self.home).as_posix()


def command(arguments: list[str]) -> list[list[Any]]:
    """What a command of the package enters."""
    from sinklab.lab.cli import main

    if arguments[0] == "report":
        assert main(COMMANDS["trace"]) == 0, "nothing was traced"
    with Walk() as walk:
        status = main(arguments)
    assert status == 0, f"{arguments[0]} ended with status {status}"
    return walk.functions()


def tiny(**changes: Any) -> Any:
    """Config of a decoder with one layer and two heads."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**sizes | changes)


def tracing() -> list[list[Any]]:
    """What a decoding run inside `trace(model)` enters."""
    import torch

    import sinklab

    torch.manual_seed(0)
    model = sinklab.DiffusionLM(sinklab.DiffusionLMConfig(tiny(), mask_token_id=2)).eval()
    prompt_BS = torch.arange(4, 12)[None]
    with Walk() as walk:
        with sinklab.trace(model) as recording:
            model.generate(prompt_BS, max_new_tokens=4)
        received = recording.array("received")
    assert received.size and (received >= 0).all(), "the recording is empty"
    return walk.functions()


def blocked_key() -> list[list[Any]]:
    """What a key enters that is blocked, until the kernel is called without it."""
    import torch
    from transformers import LlamaForCausalLM

    import sinklab

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny(is_causal=False)).eval()
    ids_BS = torch.arange(4, 12)[None]
    edit = sinklab.BlockKeys(sinklab.TopKeys(1))
    with torch.no_grad(), Walk() as walk:
        walk.part = "entering the block"
        with sinklab.intervene(model, edit) as log:
            walk.part = "the forward that chooses the key"
            model(ids_BS)
            walk.part = "the forward that blocks it, up to the kernel"
            model(ids_BS)
            sys.setprofile(None)
    assert log.summary()["keys"] == 1, "no key was blocked"
    assert walk.at_kernel, "the kernel was not seen"
    return walk.functions(to_kernel=True)


BLOCKS: dict[str, Callable[[], list[list[Any]]]] = {"tracing": tracing, "blocked_key": blocked_key}
WALKS = [*COMMANDS, *BLOCKS]


def walked(name: str) -> list[list[Any]]:
    """What one of `WALKS` enters, in this process and folder."""
    if name in BLOCKS:
        return BLOCKS[name]()
    return command(COMMANDS[name])


def apart(name: str) -> list[list[Any]]:
    """The same in a process and folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(TEXT * 60)
        source = str(Path(__file__).parents[1] / "src")
        printed = subprocess.run(
            [sys.executable, __file__, "--run", name],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": source},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    return json.loads(printed.splitlines()[-1])


def merged(functions: list[list[Any]], limit: int) -> list[str]:
    """The files that would have to be merged into others for a walk through `limit` files: those
    with the fewest functions in it, each with the file that enters it first.
    """
    files = collections.Counter(file for file, *_ in functions)
    entered_from: dict[str, str] = {}
    for file, _, _, caller, _ in functions:
        entered_from.setdefault(file, caller or "the script")
    few = [file for file, _ in files.most_common()][limit:]
    return [f"{file} ({files[file]} functions, from {entered_from[file]})" for file in few]


def report(name: str, functions: list[list[Any]], show: str) -> None:
    """Lines on a walk, and what is asked for beside it."""
    files = collections.Counter(file for file, *_ in functions)
    asked = f"; {ASKED[name]} files asked for" if name in ASKED else ""
    print(
        f"{name}: {len(files)} files (at most {LIMITS[name]}), "
        f"{len(functions)} functions (at most {FUNCTIONS[name]}){asked}"
    )
    rooms = collections.Counter[str]()
    for file, count in files.items():
        rooms[file.partition("/")[0]] += count
    print("  " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
    if name in HANDED:
        way = [file for file, *_, is_handed in functions if is_handed]
        what = "runs" if name == "report" else "attention call"
        print(
            f"  {len({*way})} of the files are handed the {what} (at most {HANDED[name]}); "
            f"{returns(way)} returns to one that was left"
        )
    if show == "files" and name in COMMANDS:
        print("\n".join(f"  {count:4} {file}" for file, count in files.most_common()))
    elif show == "files":
        in_order(functions)
        if name in ASKED and len(files) > ASKED[name]:
            print(f"  for {ASKED[name]} files these would have to go into others:")
            print("\n".join(f"    {one}" for one in merged(functions, ASKED[name])))
    if show == "functions":
        print("\n".join(f"  {file} {function}" for file, function, *_ in functions))


def returns(way: list[str]) -> int:
    """How often a way comes back to a file that it had left."""
    entered = [file for file, before in zip(way, ["", *way], strict=False) if file != before]
    return len(entered) - len({*entered})


def in_order(functions: list[list[Any]]) -> None:
    """Print each file at its first function, part by part of the walk."""
    counts = collections.Counter(file for file, *_ in functions)
    handed = {file for file, *_, is_handed in functions if is_handed}
    seen: set[str] = set()
    running = ""
    for file, function, part, *_ in functions:
        if file in seen:
            continue
        if part != running:
            running = part
            print(f"  {part}")
        seen.add(file)
        sees = ", handed the call" if file in handed else ""
        print(f"    {len(seen):2} {file}: {function}, first of {counts[file]}{sees}")


def main_of_script() -> None:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("walks", nargs="*", default=WALKS, help=f"of {', '.join(WALKS)}")
    parser.add_argument("--show", choices=("rooms", "files", "functions"), default="rooms")
    parser.add_argument("--run", choices=WALKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := {*given.walks} - {*WALKS}:
        parser.error(f"expected walks among {', '.join(WALKS)}, got {', '.join(sorted(unknown))}")
    if given.run:
        with contextlib.redirect_stdout(sys.stderr):
            found = walked(given.run)
        print(json.dumps(found))
    else:
        for name in given.walks:
            report(name, apart(name), given.show)


if __name__ == "__main__":
    main_of_script()
