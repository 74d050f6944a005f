"""CPU time of `sinklab trace` over that of `sinklab generate`, on the same prompts, without import
and load.

    python benchmarks/commands.py [--repeats 7] [--quick]
    python benchmarks/commands.py --model smollm2-diffusion [--beside trace]

Both run in this process on the loaded model, in turns. `generate` writes all prompts in one batch;
a trace watches every evaluation and writes a run folder, texts in a batch where it may. With `tiny`
process time counts on one thread; beside them each prompt generated alone, the trace's own loop
without a watch, with `received` alone, and without a run folder. With a larger model wall time
counts on two threads, four prompts of 32 tokens; beside them a trace of the model's own forward.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from measure import write_result

import sinklab
import sinklab.lab.checkpoints.loading as loading
from sinklab.lab.cli.models import Generate
from sinklab.lab.studies.progress import nothing
from sinklab.lab.studies.trace.run import follow, prepare
from sinklab.lab.studies.trace.study import StudySettings, study

PROMPTS = (
    "It was a dark and stormy night, and",
    "The house stood at the end of a",
    '"My dear sir," said the old man,',
    "In the spring of that year the river",
)


def in_turns(
    jobs: dict[str, Callable[[], None]],
    repeats: int,
    clock: Callable[[], float],
    kept: Path | None,
) -> dict[str, list[float]]:
    """Seconds of every job in each turn; those kept in a file come first, and it gets the new
    ones.
    """
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    if kept is not None and kept.exists():
        taken = json.loads(kept.read_text())
    for turn in range(1 + repeats):
        seconds = {}
        for name, job in jobs.items():
            started = clock()
            job()
            seconds[name] = clock() - started
        # the first turn warms up
        for name in jobs if turn else ():
            taken[name].append(seconds[name])
        if kept is not None:
            kept.write_text(json.dumps(taken))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two turns, written down nowhere")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--beside", nargs="*", help="jobs to time beside generate; all if left out")
    parser.add_argument("--turns", type=Path, help="file of turns: begun there, or added to")
    options = parser.parse_args()
    is_tiny = options.model == "tiny"
    torch.set_num_threads(1 if is_tiny else 2)
    clock = time.process_time if is_tiny else time.perf_counter
    texts, new_tokens = (PROMPTS[:2], 16) if is_tiny else (PROMPTS, 32)
    loaded = sinklab.load(options.model)
    loading.load = lambda *_, **__: loaded

    def written(*batches: tuple[str, ...]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            for prompts in batches:
                Generate(prompts, new_tokens=new_tokens).run()

    def traced(**settings: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            wanted = StudySettings(prompts=texts, new_tokens=new_tokens, **settings)
            study(loaded, f"{folder}/run", wanted)

    def followed() -> None:
        plan = prepare(loaded, StudySettings(prompts=texts, new_tokens=new_tokens))
        for task in plan.tasks:
            follow([task], plan.selection, nothing)

    jobs = {
        "generate": partial(written, texts),
        "generate, one by one": partial(written, *((one,) for one in texts)),
        "trace": traced,
        "trace, exact": partial(traced, exact=True),
    }
    if is_tiny:
        jobs |= {
            "the loop, watched": followed,
            "trace, received alone": partial(traced, statistics=("received",)),
        }
    if options.beside is not None:
        jobs = {name: jobs[name] for name in ("generate", *options.beside)}
    repeats = 2 if options.quick else options.repeats
    taken = in_turns(jobs, repeats, clock, options.turns)
    seconds = {name: median(some) for name, some in taken.items()}
    ratios = {name: one / seconds["generate"] for name, one in seconds.items()}
    for name, one in seconds.items():
        span = f"{min(taken[name]):.3f} to {max(taken[name]):.3f}"
        print(f"{name:24s} {one:.3f} s ({span})  {ratios[name]:.2f}")
    if not options.quick:
        what = "commands" if is_tiny else "commands_" + options.model.replace("-", "_")
        write_result(what, {"seconds": seconds, "over_generate": ratios, "turns": taken})


if __name__ == "__main__":
    main()
