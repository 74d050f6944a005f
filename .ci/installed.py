"""Run by the Python of an environment that README's command made: sinklab without extras."""

import importlib.metadata
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

# Several processes on few cores: threads of a small product would wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"

PACKAGES_AFTER = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def packages_after(package: str) -> set[str]:
    command = [sys.executable, "-I", "-c", f"import {package}; {PACKAGES_AFTER}"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


extra = packages_after("sinklab") - packages_after("torch")
assert extra == {"sinklab", "lazy_loader"}, f"`import sinklab` costs more: {sorted(extra)}"

import sinklab  # noqa: E402
from sinklab.lab.checkpoints import load  # noqa: E402

root = Path(sinklab.__file__).parent
assert root.is_relative_to(sys.prefix), f"sinklab came from {root}, which is not installed"
assert importlib.metadata.version("sinklab") == sinklab.__version__
assert (root / "py.typed").is_file()

required = importlib.metadata.requires("sinklab") or []
extras = {re.split(r"[ ;<>=!~\[]", line)[0] for line in required if "extra ==" in line}
installed = {distribution.name for distribution in importlib.metadata.distributions()}
assert not extras & installed, (
    f"a plain install brings packages of the extras: {sorted(extras & installed)}"
)

for name in sinklab.__all__:
    getattr(sinklab, name)

home = root / "lab" / "checkpoints" / "packaged"
packaged = sorted(file.parent for file in home.rglob("model.safetensors"))
assert packaged, f"no packaged model in {home}"
for folder in packaged:
    loaded = load(folder.name)
    ids = loaded.tokenizer("It was a dark night.", return_tensors="pt")["input_ids"]
    logits = loaded.model(ids).logits
    assert logits.shape[:2] == ids.shape and bool(logits.isfinite().all()), folder.name
    print(
        f"{folder.name}: {sum(p.numel() for p in loaded.model.parameters()):,} parameters, logits "
        f"{tuple(logits.shape)}"
    )
subprocess.run(
    [str(Path(sys.executable).parent / "sinklab"), "--help"], check=True, stdout=subprocess.DEVNULL
)


def status(example: Path) -> object:
    """The exit status of an example, which ends with `sinklab check` of itself."""
    try:
        runpy.run_path(str(example), run_name="__main__")
    except SystemExit as ended:
        return ended.code
    return "no check"


# Each in a fork of this process, which has imported torch and transformers.
examples = sorted(Path(__file__).resolve().parents[1].glob("examples/add_a_*.py"))
with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
    ended = dict(zip(examples, pool.map(status, examples, chunksize=1), strict=True))
assert not any(ended.values()), f"examples failed: {ended}"
print(
    f"sinklab {sinklab.__version__}: installs without extras, imports torch alone, loads "
    f"{len(packaged)} models, checks {len(examples)} plug-ins"
)
