"""What the frozen numbers are made of: how a value is written, read again and compared.

A section is a module of this folder: `cells()` yields a name and a value for each cell, and
`TOLERANCE` says how far a number may be from the frozen one, and `LOOSER` how far in some cells;
where `SECTIONS` has groups, `cells(group)` yields those of one. Values are numbers, texts, arrays,
tensors, lists and dicts. A section's data is one file, a line a cell, so that a change of the code
shows in the history as the lines of the cells that it changed.
"""

import json
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).parent / "data"
Cells = Iterator[tuple[str, Any]]
"""names and values"""

SECTIONS: dict[str, tuple[str, ...]] = {
    "removals": ("gqa", "sink", "gate", "logit", "extras"),
    "statistics_and_rules": ("gqa", "sink", "gate", "logit", "others"),
    "packaged": ("loss", "compare", "curve", "answers", "tables", "shared"),
    "recipes": ("settings", "laptop", "paper", "other", "stopped"),
    "files": ("trace", "causal", "curve", "training"),
    "tour": ("",),
}
"""Section -> groups of its cells, which test workers share; a name of a cell begins with its group.
A section without groups has one without a name.
"""


def cells_of(name: str, group: str) -> dict[str, Any]:
    """The cells of a group of a section as the code of the day has them."""
    cells = import_module(name).cells
    return {cell: plain(value) for cell, value in (cells(group) if group else cells())}


def plain(value: Any) -> Any:
    """A value as JSON has it: floats exact, NaN and infinities as strings, keys as text."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a frozen value is of numbers, text, lists and dicts, not {type(value)}")


def read(name: str) -> dict[str, Any]:
    """The frozen cells of a section."""
    file = DATA / f"{name}.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return dict(json.loads(line) for line in lines)


def write(name: str, cells: dict[str, Any]) -> None:
    """Write the cells of a section in the order of their names."""
    DATA.mkdir(exist_ok=True)
    lines = [
        json.dumps([cell, cells[cell]], ensure_ascii=False, separators=(",", ":"))
        for cell in sorted(cells)
    ]
    (DATA / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def differences(old: Any, new: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Where a value differs from the frozen one: numbers by more than the tolerance, relative to
    those above 1, all else at all.
    """
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for key in old:
            yield from differences(old[key], new[key], tolerance, f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, tolerance, f"{where}[{place}]")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > tolerance * max(1.0, abs(old)):
            yield f"{where}: {old!r} is now {new!r}"
    elif type(old) is not type(new) or old != new:
        yield f"{where}: {str(old)[:200]} is now {str(new)[:200]}"


def changes(name: str, new: dict[str, Any], beginning: str = "") -> Iterator[str]:
    """Where the cells of a section whose names begin so differ from the frozen ones."""
    section, old = import_module(name), read(name)
    for cell in sorted({one for one in old if one.startswith(beginning)} | new.keys()):
        if cell not in old or cell not in new:
            yield f"{cell}: {'is no longer made' if cell in old else 'is not frozen'}"
        else:
            tolerance = vars(section).get("LOOSER", {}).get(cell, section.TOLERANCE)
            yield from differences(old[cell], new[cell], tolerance, cell)
