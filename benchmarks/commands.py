"""CPU time of `sinklab trace` over that of `sinklab generate`, on the same prompts, without import
and load.

    python benchmarks/commands.py [--repeats 7] [--quick]

Both run in this process on the loaded model `tiny`, in turns, and process time counts. `generate`
writes all prompts in one batch; a trace writes one text after the other, watches every evaluation
and writes a run folder. Beside them: each prompt generated alone, the trace's own loop without a
watch, with `received` alone, and without a run folder.
"""

import argparse
import contextlib
import io
import tempfile
import time
from functools import partial
from statistics import median

import torch
from measure import write_result

import sinklab.lab.checkpoints.loading as loading
from sinklab.lab.cli.models import generate
from sinklab.lab.studies.processes import Meter, Progress
from sinklab.lab.studies.trace.recording import Recorder
from sinklab.lab.studies.trace.run import follow, prepare
from sinklab.lab.studies.trace.study import StudySettings, study

PROMPTS = ("It was a dark and stormy night, and", "The house stood at the end of a")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two turns, written down nowhere")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = loading.load("tiny")
    loading.load = lambda *_, **__: loaded

    def written(*batches: tuple[str, ...]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            for prompts in batches:
                generate(prompts, new_tokens=16)

    def traced(**settings: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            study(
                loaded, f"{folder}/run", StudySettings(prompts=PROMPTS, new_tokens=16, **settings)
            )

    def followed(watched: bool) -> None:
        plan = prepare(loaded, StudySettings(prompts=PROMPTS, new_tokens=16), Progress())
        for task in plan.tasks:
            follow(
                task, Meter(Progress(), 2, 16), Recorder(task, plan.selection) if watched else None
            )

    jobs = {
        "generate": partial(written, PROMPTS),
        "generate, one by one": partial(written, *((one,) for one in PROMPTS)),
        "the loop of a trace": partial(followed, False),
        "the loop, watched": partial(followed, True),
        "trace": traced,
        "trace, received alone": partial(traced, statistics=("received",)),
    }
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(1 + (2 if options.quick else options.repeats)):
        for name, job in jobs.items():
            started = time.process_time()
            job()
            taken[name] += [time.process_time() - started] if turn else []
    seconds = {name: median(some) for name, some in taken.items()}
    ratios = {name: one / seconds["generate"] for name, one in seconds.items()}
    for name, one in seconds.items():
        print(f"{name:24s} {one:.3f} s  {ratios[name]:.2f}")
    if not options.quick:
        write_result("commands", {"seconds": seconds, "over_generate": ratios})


if __name__ == "__main__":
    main()
