"""Is a diffusion model less dependent on its sink than a causal one? Asked again, on new seeds and
new texts: replication.md has the question, the rule and the order of the work.

    python studies/replication.py next         train and measure the next missing run, and commit
                                               what it gave; interrupted, it goes on from its last
                                               checkpoint when it is called again
    python studies/replication.py reproduce    measure seeds 0 to 2 again, out of their committed
                                               adapters
    python studies/replication.py power        what can be seen, from the spread of seeds 0 to 2
    python studies/replication.py report       the outcome, once the last run is measured

All of them run the code of one commit, in a worktree of it that this script makes, so that later
changes of the package change no number. Run folders and the worktree are kept under
runs/replication (or $SINKLAB_STUDY); the books are looked for in $SINKLAB_BOOKS, or
../shared/data/books_pd. One thread and the lowest priority: `kill -STOP` and `kill -CONT` of the
process whose number the run folder's file `pid` holds pause it.
"""

# S seeds, T texts, N rows of text
import argparse
import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

COMMIT = "6cebc001ef124ddd30ac36261b335279c2b4d618"
ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().with_suffix("")
RUNS = Path(os.environ.get("SINKLAB_STUDY", ROOT / "runs" / "replication")).resolve()
BOOKS = Path(os.environ.get("SINKLAB_BOOKS", ROOT.parent / "shared/data/books_pd")).resolve()
OLD = RUNS / COMMIT[:8]
"""The worktree whose code trains and measures."""

SIBLINGS = ("ii", "iii")
SEEDS = tuple(range(3, 11))
NAMES = tuple(f"{sibling}-{seed}" for seed in SEEDS for sibling in SIBLINGS)
"""Every run, in the registered order."""
FILES = tuple(f"train-0{number}.jsonl.gz" for number in range(2, 6))
"""Text that no sibling of 0.5M tokens was trained on."""
BOOKS_OF_A_FILE, LETTERS, ROWS_OF_A_BOOK, LENGTH = 5, 100_000, 4, 128
"""The first so many books of a file that have at least so many letters, and the first rows of each,
of so many tokens.
"""
STEPS = 500
LOST = 7.0
"""Held-out loss at one of the evaluations of a run, every 100 steps, above which it diverged."""
ALPHA, HALF = 0.05, 0.29
"""Registered: level of the two-sided test, and half of what seeds 0 to 2 gave."""


def in_old_code() -> None:
    """Go on in the worktree of `COMMIT`, with one thread; does nothing where that is so already."""
    if os.environ.get("SINKLAB_REPLICATION") == COMMIT:
        return
    if not BOOKS.is_dir():
        raise SystemExit(
            f"the books are needed, and {BOOKS} is no folder; name it in SINKLAB_BOOKS"
        )
    if not OLD.is_dir():
        OLD.parent.mkdir(parents=True, exist_ok=True)
        made = ["git", "-C", str(ROOT), "worktree", "add", "--force", "--detach", str(OLD), COMMIT]
        if subprocess.run(made).returncode:
            raise SystemExit(
                f"the code of {COMMIT} is needed, and this clone does not have it: "
                f"git fetch --depth 1 origin {COMMIT}"
            )
    said = {
        "SINKLAB_REPLICATION": COMMIT,
        "SINKLAB_STUDY": str(RUNS),
        "SINKLAB_BOOKS": str(BOOKS),
        "PYTHONPATH": str(OLD / "src"),
        "OMP_NUM_THREADS": "1",
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **said})


def old_study() -> Any:
    """The script of the siblings as it was at `COMMIT`, writing to the folder of this study."""
    sys.path.insert(0, str(OLD / "studies"))
    import smollm2_diffusion as study

    import sinklab

    if not Path(sinklab.__file__).is_relative_to(OLD):
        raise SystemExit(f"sinklab must be that of {OLD}, not of {sinklab.__file__}")
    return study


def books() -> list[dict[str, Any]]:
    """The books that are measured, in the order of the files."""
    chosen = []
    for name in FILES:
        with gzip.open(BOOKS / name, "rt", encoding="utf-8") as lines:
            every = [json.loads(line) for line in lines]
        long = [book for book in every if len(book["text"]) >= LETTERS]
        chosen += long[:BOOKS_OF_A_FILE]
    return chosen


def rows_of(study: Any, tokenizer: Any) -> Any:
    """The 80 texts, int64 (N, 128)."""
    file = RUNS / "books.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(book) + "\n" for book in books())
    return study.measures.book_rows(tokenizer, file, LENGTH, ROWS_OF_A_BOOK)


def told(values: Any) -> str:
    """SHA-256 of the bytes of a file or an array."""
    content = values.read_bytes() if isinstance(values, Path) else values.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def point_of(name: str) -> Path:
    """The file of what was measured of a run."""
    return RESULTS / "points" / f"{name}.json"


def run_next() -> None:
    """The first run that is not measured and that no other process works on."""
    for name in NAMES:
        if point_of(name).is_file():
            continue
        folder = RUNS / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "pid").open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            os.nice(19)
            one_run(name)
        return
    print("all runs are measured", flush=True)


def one_run(name: str) -> None:
    """Train a run, measure it, write what is kept of it, and commit that."""
    study = old_study()
    study.RUNS, study.RESULTS = RUNS / name, RUNS / name
    diverged = trained(study, name)
    adapters = study.adapters_of(name, STEPS)
    attention = "causal" if name.startswith("ii-") else "full"
    loaded = study.Point(f"{name}-{STEPS}", adapters, attention).load()
    rows_NS = rows_of(study, loaded.needed_tokenizer())
    kept = {
        "commit": COMMIT,
        "packages": {one: version(one) for one in ("torch", "transformers")},
        "diverged": diverged,
        "adapters_sha256": told(adapters),
        "texts_sha256": told(rows_NS),
        "costs": costs(study, loaded, rows_NS, attention),
    }
    keep(name, kept, sorted((study.RESULTS / "history").glob("*.csv")))


def trained(study: Any, name: str) -> list[str]:
    """Train a run, or go on with it; one that diverged starts again at half the peak. Returns what
    was said of those that did.
    """
    sibling, seed = name.split("-")
    stage, ended = study.Stage(sibling, int(seed)), RUNS / name / "diverged.json"
    diverged: list[str] = json.loads(ended.read_text("utf-8")) if ended.is_file() else []
    while not study.adapters_of(name, STEPS).is_file():
        settings = stage.settings()
        settings = replace(settings, lr=settings.lr / 2 ** len(diverged))
        begun = (stage.folder / "run.json").is_file()
        try:
            if begun:
                check_not_lost(study.open_run(stage.folder).table("history"))
            study.train(replace(settings, resume=begun), progress=watched)
        except ValueError as error:
            if "finite" not in str(error):
                raise
            diverged.append(f"peak {settings.lr}: {error}")
            say(diverged[-1])
            again = f"{name}-diverged-{len(diverged)}"
            stage.folder.rename(stage.folder.with_name(again))
            table = study.open_run(stage.folder.with_name(again)).table("history")
            (study.RESULTS / "history").mkdir(exist_ok=True)
            table.to_csv(study.RESULTS / "history" / f"{again}.csv", index=False)
            ended.write_text(json.dumps(diverged), "utf-8")
            continue
        study.take_adapters([stage])
    return diverged


def watched(text: str) -> None:
    """Print a line of a training. Raises ValueError where it tells of a held-out loss above
    `LOST`.
    """
    say(text)
    found = re.search(r"held out ([\d.]+)", text)
    if found:
        check_not_lost({"heldout_loss": np.array([float(found[1])])})


def check_not_lost(history: Any) -> None:
    """Raise ValueError for a history with a held-out loss above `LOST`."""
    highest = float(np.nanmax(history["heldout_loss"], initial=0))
    if highest > LOST:
        raise ValueError(
            f"the held-out loss must stay finite and at most {LOST}, but was {highest:.2f}"
        )


def say(text: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def costs(study: Any, loaded: Any, rows_NS: Any, attention: str) -> dict[str, Any]:
    """What blocking a text's strongest key costs, measured as it was for seeds 0 to 2."""
    model = loaded.model.eval()
    return study.costs.block_costs(model, rows_NS, attention, model.config.mask_token_id)


def keep(name: str, kept: dict[str, Any], histories: list[Path]) -> None:
    """Write the numbers of a run beside this script, and commit these files alone."""
    files = [point_of(name), *(RESULTS / "history" / file.name for file in histories)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    for history, file in zip(histories, files[1:], strict=True):
        file.write_bytes(history.read_bytes())
    files[0].write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    done = sum(point_of(one).is_file() for one in NAMES)
    message = f"Replication: {name} trained and measured, {done} of {len(NAMES)} runs"
    git = ["git", "-C", str(ROOT)]
    for _ in range(10):
        added = subprocess.run([*git, "add", *map(str, files)])
        made = subprocess.run([*git, "commit", "-q", "-m", message, "--", *map(str, files)])
        if added.returncode == made.returncode == 0:
            say(message)
            return
        time.sleep(10)  # another command of git is at work
    raise SystemExit(f"not committed, please do: {' '.join(map(str, files))}")


def reproduce() -> None:
    """Measure seeds 0 to 2 on their own 40 texts again, and print how far the numbers are apart."""
    study = old_study()
    file, found = RESULTS / "reproduced.json", {}
    for name in (f"{sibling}-{seed}" for seed in range(3) for sibling in SIBLINGS):
        attention = "causal" if name.startswith("ii-") else "full"
        point = study.Point(
            f"{name}-{STEPS}", study.RESULTS / "adapters" / f"{name}-{STEPS}.safetensors", attention
        )
        loaded = point.load()
        valid = BOOKS / "valid.jsonl.gz"
        rows_NS = study.measures.book_rows(loaded.needed_tokenizer(), valid, LENGTH, 8)
        before = json.loads(point.result.read_text("utf-8"))["costs"]
        now = costs(study, loaded, rows_NS, attention)
        rise_T, rise_before_T = rises(now), rises(before)
        found[name] = {
            "before": float(rise_before_T.mean()),
            "now": float(rise_T.mean()),
            "furthest text": float(np.abs(rise_T - rise_before_T).max()),
            "same keys": blocked(now) == blocked(before),
            "removed": [before["keys"]["1"]["removed"], now["keys"]["1"]["removed"]],
        }
        say(f"{name}: {found[name]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def blocked(measured: dict[str, Any]) -> Any:
    """The keys that were blocked."""
    return measured["keys"]["1"]["blocked"]


def rises(measured: dict[str, Any]) -> np.ndarray:
    """Rise of the loss when the strongest key is blocked late, less that of a random key (T,)."""
    loss = measured["keys"]["1"]["loss"]
    return np.array(loss["late"]) - np.array(loss["random late"])


def old_costs() -> dict[str, Any]:
    """Committed costs of seeds 0 to 2 by run."""
    points = OLD / "studies" / "smollm2_diffusion" / "points"
    names = [f"{sibling}-{seed}" for sibling in SIBLINGS for seed in range(3)]
    return {
        name: json.loads((points / f"{name}-{STEPS}.json").read_text("utf-8"))["costs"]
        for name in names
    }


def by_seed(found: dict[str, Any], sibling: str) -> np.ndarray:
    """Rises of a sibling, (S, T), in the order of the seeds."""
    seeds = sorted(int(name.split("-")[1]) for name in found if name.startswith(f"{sibling}-"))
    return np.array([rises(found[f"{sibling}-{seed}"]) for seed in seeds])


def word(estimate: Any) -> str:
    """The registered word for an estimate with `value`, `high` and `p`."""
    if estimate.p < ALPHA and estimate.value > 0:
        return "replicated"
    return "not replicated" if estimate.high < HALF else "inconclusive"


def power(draws: int = 4000) -> None:
    """Share of worlds in which a true difference is found, with the spread of seeds 0 to 2."""
    old_study()
    from smollm2_contrasts import crossed

    old = old_costs()
    difference_ST = by_seed(old, "ii") - by_seed(old, "iii")
    seeds, texts = difference_ST.shape
    by_text_T, by_seed_S = difference_ST.mean(0), difference_ST.mean(1)
    rest_ST = difference_ST - by_text_T - by_seed_S[:, None] + difference_ST.mean()
    rest = float((rest_ST**2).sum()) / ((seeds - 1) * (texts - 1))
    of_seeds = max(float(by_seed_S.var(ddof=1)) - rest / texts, 0)
    of_texts = max(float(by_text_T.var(ddof=1)) - rest / seeds, 0)
    print(f"variances: seeds {of_seeds:.4f}, texts {of_texts:.4f}, rest {rest:.4f}")
    generator = np.random.default_rng(0)
    for count_S, count_T in ((8, 80), (6, 40)):
        for truth in (0.0, 0.3, 0.4):
            found = []
            for _ in range(draws):
                values_ST = truth + math.sqrt(of_seeds) * generator.normal(size=(count_S, 1))
                values_ST = values_ST + math.sqrt(of_texts) * generator.normal(size=count_T)
                values_ST += math.sqrt(rest) * generator.normal(size=(count_S, count_T))
                found.append(word(crossed(values_ST)))
            shares = {one: found.count(one) / draws for one in sorted(set(found))}
            print(f"{count_S} seeds, {count_T} texts, {truth} nats: {shares}")


def report() -> None:
    """The registered outcome and what is described beside it. Refused before the last run is
    measured.
    """
    missing = [name for name in NAMES if not point_of(name).is_file()]
    if missing:
        done = len(NAMES) - len(missing)
        raise SystemExit(f"{done} of {len(NAMES)} runs: not finished, and not looked at before")
    old_study()
    from smollm2_contrasts import crossed

    points = {name: json.loads(point_of(name).read_text("utf-8")) for name in NAMES}
    new, old = {name: one["costs"] for name, one in points.items()}, old_costs()
    ii_ST, iii_ST = by_seed(new, "ii"), by_seed(new, "iii")
    found = crossed(ii_ST - iii_ST)
    print(f"primary: ii less iii {found}, p = {found.p:.4f}: {word(found)}")
    print(
        f"ii {crossed(ii_ST)}; iii {crossed(iii_ST)}; by seed {(ii_ST - iii_ST).mean(1).round(3)}"
    )
    mass = {
        sibling: np.array([[new[f"{sibling}-{seed}"]["keys"]["1"]["removed"]] for seed in SEEDS])
        for sibling in SIBLINGS
    }
    print(f"share of the key: {mass}")
    print(f"per removed mass: {crossed(ii_ST / mass['ii'] - iii_ST / mass['iii'])}")
    low, high = ratio_interval(ii_ST, iii_ST)
    print(f"ratio of rises, iii to ii: {iii_ST.mean() / ii_ST.mean():.3f} ({low:.3f} … {high:.3f})")
    before = crossed(by_seed(old, "ii") - by_seed(old, "iii"))
    print(f"old and new pooled by their variances: {pooled(before, found)}")
    print(f"diverged: { {name: one['diverged'] for name, one in points.items()} }")


def ratio_interval(ii_ST: np.ndarray, iii_ST: np.ndarray, draws: int = 10_000) -> np.ndarray:
    """95 % interval of the ratio of mean rises, seeds and texts both drawn again."""
    generator, (seeds, texts) = np.random.default_rng(0), ii_ST.shape
    found = []
    for _ in range(draws):
        chosen = np.ix_(
            generator.integers(seeds, size=seeds), generator.integers(texts, size=texts)
        )
        found.append(iii_ST[chosen].mean() / ii_ST[chosen].mean())
    return np.quantile(found, (0.025, 0.975))


def pooled(*estimates: Any) -> str:
    """Mean of estimates weighted by their precision, the half width of an interval being two of its
    errors.
    """
    error_E = np.array([(one.high - one.low) / 4 for one in estimates])
    weight_E = error_E**-2 / (error_E**-2).sum()
    value = float((weight_E * [one.value for one in estimates]).sum())
    reach = 1.96 * float((error_E**-2).sum()) ** -0.5
    return f"{value:.3f} ({value - reach:.3f} … {value + reach:.3f})"


COMMANDS = {"next": run_next, "reproduce": reproduce, "power": power, "report": report}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    command = COMMANDS[parser.parse_args().command]
    in_old_code()
    command()


if __name__ == "__main__":
    main()
