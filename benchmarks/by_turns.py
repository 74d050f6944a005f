"""What commands and passes cost now, over what they cost at commit 6cebc001: both by turns, in one
run on one machine.

    python benchmarks/by_turns.py [--rounds 4] [--only trace curve …] [--busy 2] [--old FOLDER]

Each case runs in a process of its own, with the old code and with that of this tree, in the order
old, new, new, old, …, so that a slow minute of the machine falls on both. In the process a case is
set up, run once and then until `ENOUGH` seconds are spent; the least counts, which other work on
the machine disturbs least. `import`, `help` and `tour` are whole processes, repeated alike. The
ratio is that of the medians over rounds, an even number so that neither code is always later, and
beside it the least and the greatest ratio of a round. `--busy 2` does it beside two loops that keep
two cores busy. Both kinds of result are kept in one file of the day, and with `--only` the other
cases of this commit in it.

The old code is a worktree that is made for the run, unless --old names one. A case has to run in
both trees: where a name differs, `is_old()` chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "6cebc001ef124ddd30ac36261b335279c2b4d618"
ENOUGH = 1.0
"""Seconds of repeats in a turn: a pass of 30 ms is taken thirty times, one of a minute once."""
WHOLE = {
    "import": ("-c", "import sinklab"),
    "help": ("-m", "sinklab", "--help"),
    "tour": ("-m", "sinklab", "tour", "--out", "tour"),
}
"""Cases that are whole processes."""
PROMPT = "The house stood at the end of a long road, and nobody had lived there since"
PAGE = Namespace(samples=30, steps=64, layers=32, heads=32, positions=128)
"""Shape of the run whose page is written: layers and heads of LLaDA-8B, 0.5 GB."""


def is_old() -> bool:
    """Whether the code at hand is that of `COMMIT`."""
    return os.environ["SINKLAB_BY_TURNS"] == "old"


def told(*words: Any) -> None:
    """A command of sinklab, whose words are dropped."""
    from sinklab.lab.cli import main

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        status = main([str(word) for word in words])
    if status:
        raise SystemExit(said.getvalue())


def tracing(length: int, width: int) -> dict[str, Callable[[], Any]]:
    """A forward of two layers of four heads, traced and as it is."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import sinklab

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    sizes |= {"hidden_size": 4 * width, "intermediate_size": 8 * width}
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length)).eval()
    ids_BS = torch.randint(512, (1, length))

    def untraced() -> None:
        with torch.inference_mode():
            model(ids_BS, use_cache=False)

    def traced() -> None:
        with sinklab.trace(model):
            untraced()

    return {"": traced, "untraced": untraced}


def watch() -> dict[str, Callable[[], Any]]:
    """Text of a real diffusion model, written under observation."""
    import sinklab

    lm = sinklab.load("smollm2-diffusion")
    return {"": lambda: lm.watch(PROMPT, 8)}


def generate() -> dict[str, Callable[[], Any]]:
    """The same text, unwatched."""
    import sinklab

    lm = sinklab.load("smollm2-diffusion")
    return {"": lambda: lm.generate(PROMPT, 4)}


def curve() -> dict[str, Callable[[], Any]]:
    """What blocking one key costs the real pair, on two rows."""
    few = ("--rows", 1, "--length", 32, "--ks", 0, 1, "--no-twin", "--figures")

    def both() -> None:
        for name in ("smollm2-diffusion", "smollm2"):
            shutil.rmtree(f"curve of {name}", ignore_errors=True)
            told("curve", "--model", name, *few, "--out", f"curve of {name}")

    return {"": both}


def decoding() -> dict[str, Callable[[], Any]]:
    """A packaged model writes 64 tokens in two blocks, without a cache and with one."""
    import sinklab

    lm = sinklab.load("tiny")
    how = {"block_length": 32}
    return {
        "": lambda: lm.generate(PROMPT, 64, **how),
        "cache": lambda: lm.generate(PROMPT, 64, cache="dual", **how),
    }


def training() -> dict[str, Callable[[], Any]]:
    """Twelve steps of a small training, with what stands around them."""
    from sinklab.lab.training import recipe, train

    Path("text.txt").write_text(f"{PROMPT} the war.\n" * 400, "utf-8")
    small = {"corpus": "text.txt", "steps": 12, "batch": 8, "length": 64, "tokenizer": "300"}
    small |= {"hidden_size": 128, "layers": 4, "heads": 4, "mlp_size": 256, "heldout_rows": 4}
    small |= {
        "compile": False,
        "out": "run",
        "bf16": False,
        "monitor_every": 0,
    }

    def afresh() -> None:
        shutil.rmtree("run", ignore_errors=True)
        train(recipe("laptop-scratch", "sink", **small))

    return {"": afresh}


def page() -> dict[str, Callable[[], Any]]:
    """The page of a run of 30 large samples, whose arrays each tree writes in its own form."""
    import sinklab

    sys.path.insert(0, str(Path(os.environ["PYTHONPATH"]).parent / "benchmarks"))
    import runs

    if not Path("large/run.json").is_file():
        runs.write(Path("large"), PAGE, runs.attention(PAGE))
    return {"": lambda: sinklab.report(sinklab.open_run("large"), "page")}


CASES: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
    **{
        f"trace-{length}-{width}": lambda length=length, width=width: tracing(length, width)
        for length in (512, 4096)
        for width in (64, 128)
    },
    "decoding": decoding,
    "training": training,
    "watch": watch,
    "generate": generate,
    "curve": curve,
    "page": page,
}
"""Name of a case to what makes its parts, a call for each."""
NAMES = ("import", "help", *CASES, "tour")


def used() -> float:
    """Processor seconds of this process and of those it has waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, kinds))


def least(run: Callable[[], Any]) -> list[float]:
    """Least wall and processor seconds of repeats."""
    pairs: list[tuple[float, float]] = []
    while sum(wall for wall, _ in pairs) < ENOUGH:
        wall, busy = time.perf_counter(), used()
        run()
        pairs.append((time.perf_counter() - wall, used() - busy))
    return [min(one) for one in zip(*pairs, strict=True)]


def measured(name: str) -> dict[str, list[float]]:
    """Least wall and processor seconds of each part of a case, in this process."""
    found = {}
    for part, run in CASES[name]().items():
        run()
        found[" ".join(filter(None, (name, part)))] = least(run)
    return found


def one_turn(name: str, tree: Path, is_before: bool, folder: Path) -> dict[str, list[float]]:
    """A case in a process of its own, with the code of a tree."""
    own = {"PYTHONPATH": str(tree / "src"), "SINKLAB_BY_TURNS": "old" if is_before else "new"}
    # else every process would compile all that it imports
    own["PYTHONDONTWRITEBYTECODE"] = ""
    place = folder / own["SINKLAB_BY_TURNS"]
    place.mkdir(exist_ok=True)
    words = WHOLE.get(name) or (str(Path(__file__).resolve()), "--case", name)

    def process() -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=place,
            env=os.environ | own,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{name} failed in {tree}:\n{done.stderr[-3000:]}")
        return done.stdout

    return {name: least(process)} if name in WHOLE else json.loads(process().splitlines()[-1])


def compared(old_R: Sequence[float], new_R: Sequence[float]) -> tuple[float, list[float]]:
    """New over old: the ratio of medians, and the range of those of rounds."""
    each = [new / old for old, new in zip(old_R, new_R, strict=True)]
    ratio = statistics.median(new_R) / statistics.median(old_R)
    return round(ratio, 3), [round(min(each), 3), round(max(each), 3)]


def by_turns(name: str, trees: tuple[Path, Path], rounds: int) -> dict[str, dict[str, Any]]:
    """Old and new seconds of each part of a case, and their ratio with its range over rounds."""
    taken: dict[str, dict[bool, list[list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for is_before in ((True, False), (False, True))[number % 2]:
                tree = trees[not is_before]
                for part, pair in one_turn(name, tree, is_before, Path(folder)).items():
                    both = taken.setdefault(part, {True: [], False: []})
                    both[is_before].append(pair)
    found = {}
    for part, both in taken.items():
        (old_R, old_busy_R), (new_R, new_busy_R) = (
            [*zip(*both[is_before], strict=True)] for is_before in (True, False)
        )
        ratio, span = compared(old_R, new_R)
        busy_ratio, busy_span = compared(old_busy_R, new_busy_R)
        found[part] = {
            "ratio": ratio,
            "range": span,
            "processor_ratio": busy_ratio,
            "processor_range": busy_span,
            "old_s": [round(one, 4) for one in old_R],
            "new_s": [round(one, 4) for one in new_R],
            "old_processor_s": round(statistics.median(old_busy_R), 4),
            "new_processor_s": round(statistics.median(new_busy_R), 4),
        }
        print(f"{part}: {ratio} {span}, of processors {busy_ratio} {busy_span}", flush=True)
    return found


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but keep a core busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def old_tree(given: Path | None) -> Iterator[Path]:
    """The old code: the folder that was given, or a worktree for as long as it takes."""
    if given is not None:
        yield given.resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        subprocess.run([*git, "add", "-q", "--detach", str(tree), COMMIT], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4, help="of the tour one")
    parser.add_argument("--only", nargs="*", default=NAMES, help="beginnings of names of cases")
    parser.add_argument("--busy", type=int, default=0, help="loops that keep cores busy meanwhile")
    parser.add_argument("--old", type=Path, help="a tree of the old code")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measured(given.case)))
        return
    from measure import RESULTS, environment, write_result

    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"the machine is not idle: {load} processes in the last minute", flush=True)
    kind = f"beside {given.busy} busy loops" if given.busy else "idle"
    found: dict[str, Any] = {"load_before": load, "cases": {}}
    kept = RESULTS / f"by_turns_cpu_{datetime.date.today().isoformat()}.json"
    last = json.loads(kept.read_text("utf-8")) if kept.is_file() else {"environment": {}}
    if given.only != NAMES and last["environment"].get("commit") == environment()["commit"]:
        found["cases"] |= last.get(kind, {}).get("cases", {})
    with old_tree(given.old) as old, busy_loops(given.busy):
        for name in NAMES:
            if name.startswith(tuple(given.only)):
                rounds = 1 if name == "tour" else given.rounds
                found["cases"] |= by_turns(name, (old, ROOT), rounds)
    result = {one: last[one] for one in last if one.startswith(("idle", "beside"))}
    print(f"written to {write_result('by_turns', {'old': COMMIT, **result, kind: found})}")


if __name__ == "__main__":
    # neither loops nor the worktree stay behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
