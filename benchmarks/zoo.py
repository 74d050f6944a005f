"""Which architectures of transformers are recorded and edited right: every one of the zoo, in every
way it can be run.

python benchmarks/zoo.py --write      # results/zoo_cpu_DATE.json, and the table in
                                      docs/architectures.md
python benchmarks/zoo.py llama bert   # these alone, printed
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measure import write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "zoo")]

from architectures import ZOO, Architecture  # noqa: E402 - the path comes first
from checked import WAYS, held  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- table: benchmarks/zoo.py --write -->", "<!-- end of table -->"


def outcomes(architecture: Architecture) -> dict[str, str]:
    """What came of each way to run it; "wrong: …" where numbers differ."""
    found = {}
    for way in WAYS:
        try:
            found[way] = held(architecture, way)
        except Exception as error:
            found[way] = f"wrong: {type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def in_words(found: dict[str, str]) -> str:
    """One cell of the table."""
    parts = []
    kinds = Counter(one.split(":")[0] for one in found.values())
    if kinds["right"]:
        parts.append("right")
    reasons = {one.removeprefix("refused: ") for one in found.values() if one.startswith("refused")}
    for reason in sorted({_short(one) for one in reasons}):
        parts.append(f"refused: {reason}")
    parts += [f"**{way}: {one}**" for way, one in found.items() if one.startswith("wrong")]
    no_checkpoints = "support activation checkpointing"
    unable = {
        way: one for way, one in found.items() if one.startswith("does not run") and way != "steps"
    }
    parts += [
        "it has no checkpointing" if no_checkpoints in one else f"{way} {one}"
        for way, one in unable.items()
    ]
    return "; ".join(parts)


def _short(message: str) -> str:
    if "softcap" in message:
        return "a cap on scores (softcap), which no mask says"
    if "s_aux" in message:
        return "learned sink logits (s_aux), which no mask says"
    if "attention of its own" in message:
        return "no SDPA in transformers"
    if "use_cache=False" in message:
        return "generating with a cache that drops keys"
    return message


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each kind, form of attention and result, with its architectures."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        shared = (row["kind"], row["form"], in_words(row["found"]))
        names.setdefault(shared, []).append(row["name"])
    lines = ["| kind | attention | result | architectures |", "|---|---|---|---|"]
    for shared, found in names.items():
        lines.append(f"| {' | '.join(shared)} | {', '.join(found)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all where none is named")
    parser.add_argument(
        "--write", action="store_true", help="the result file and the table of the docs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    rows = []
    for one in ZOO:
        if options.names and one.name not in options.names:
            continue
        rows.append({"name": one.name, "kind": one.kind, "form": one.form, "found": outcomes(one)})
        print(f"{one.name:18} {one.form:24} {in_words(rows[-1]['found'])}", flush=True)
    counts = Counter(one.split(":")[0] for row in rows for one in row["found"].values())
    print(dict(counts))
    if options.write:
        write_result("zoo", {"counts": dict(counts), "rows": rows})
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        behind = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{behind}", "utf-8")
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
