"""Models that 2 or 4 processes hold together, and two models of two, beside the undivided ones: how
far apart they are.

    python benchmarks/tensor_parallel.py [--quick]

What the test of two processes holds (tests/divided_twin.py: statistics, edits, logits, texts,
numbers read), for every kind of sink, a gate, experts, blocks, and a causal model that transformers
divides itself; on gloo. By model: the largest difference in float64 and what it is in, that of
logits in float32 with the share of equal tokens, whether all texts are equal in float64, and the
share of the model's numbers that a process read. `--quick`: two processes, nothing written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import write_result

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from test_tensor_parallel import noted


def told(found: dict[str, Any]) -> dict[str, Any]:
    """Of one model in one process."""
    apart = found.get("float64", found)
    most = max(apart, key=lambda name: apart[name])
    about = {"float64": apart[most], "which is in": most, "compared": len(apart)}
    if "float64" in found:
        about |= {name: found[name] for name in ("float32", "equal tokens in float32")}
        about |= {
            "texts": len(found["texts"]),
            "texts that differ": sum(not same for same in found["texts"].values()),
        }
        about |= {"read": round(found["read"] / found["whole"], 4)}
    return about


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two processes, nothing written: does it run?"
    )
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for processes, count in ((2, 2),) if given.quick else ((2, 2), (4, 4), (4, 2)):
        with tempfile.TemporaryDirectory() as folder:
            ranks = noted(sys.executable, Path(folder), processes, count)
        name = f"{processes} processes, {count} a model"
        results[name] = {
            model: [told(rank[model]) for rank in ranks if rank[model]] for model in ranks[0]
        }
        print(
            name, max(one["float64"] for some in results[name].values() for one in some), flush=True
        )
    if not given.quick:
        print(write_result("tensor_parallel", {"backend": "gloo", "results": results}))


if __name__ == "__main__":
    main()
