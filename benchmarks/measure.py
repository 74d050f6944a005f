"""What every benchmark shares: where it ran, interleaved timing, peak memory, and the dated result
file.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"


def environment(device: str = "cpu") -> dict[str, Any]:
    """Machine, versions, threads and commit: what a number means nothing without."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "device": device,
        # two machines of one name may differ by a factor of three in products
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers", "sinklab")},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=FOLDER, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../src")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def interleaved(
    runs: dict[str, Callable[[], object]], repeats: int, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """Seconds per run, taken in turns so that a slow moment of the machine falls on all of them;
    one warm-up each.

    Wall time, and processor time of this process, which other jobs on the same cores disturb less.
    """
    for run in runs.values():
        run()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            synchronize(device)
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            synchronize(device)
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    result = {}
    for name, pairs in taken.items():
        wall_s, cpu_s = zip(*pairs, strict=True)
        result[name] = {
            "min_wall_s": min(wall_s),
            "median_wall_s": statistics.median(wall_s),
            "min_cpu_s": min(cpu_s),
            "wall_s": [round(second, 6) for second in wall_s],
            "cpu_s": [round(second, 6) for second in cpu_s],
            "repeats": repeats,
        }
    return result


def ratios(timing: dict[str, dict[str, Any]], base: str) -> dict[str, dict[str, float]]:
    """Wall time over that of the base, turn by turn: median, least and greatest."""
    result = {}
    for name, taken in timing.items():
        each = [
            own / plain for own, plain in zip(taken["wall_s"], timing[base]["wall_s"], strict=True)
        ]
        middle = {"median": statistics.median(each), "min": min(each), "max": max(each)}
        result[name] = {key: round(value, 3) for key, value in middle.items()}
    del result[base]
    return result


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str = "cpu") -> None:
    """Start a new peak-memory measurement in this process."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def memory_mb(device: str = "cpu") -> dict[str, float]:
    """Memory now and at its peak since `reset_peak`, in MB: allocated on the GPU, or resident in
    this process.
    """
    if device == "cuda":
        return {
            "now": torch.cuda.memory_allocated() / 1e6,
            "peak": torch.cuda.max_memory_allocated() / 1e6,
        }
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        # Only the peak of the whole process is known outside Linux (in bytes on macOS).
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            1e6 if platform.system() == "Darwin" else 1e3
        )
        return {"now": peak, "peak": peak}
    kilobytes = {
        key: int(value.split()[0])
        for key, value in (line.split(":", 1) for line in lines)
        if "kB" in value
    }
    return {"now": kilobytes["VmRSS"] * 1024 / 1e6, "peak": kilobytes["VmHWM"] * 1024 / 1e6}


def write_result(name: str, result: dict[str, Any], device: str = "cpu") -> Path:
    """Write results/<name>_<device>_<date>.json with the environment beside the numbers."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{device}_{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps({"environment": environment(device), **result}, indent=2) + "\n")
    return path
