"""Runs the notebooks beside it, each from its beginning in an empty folder.

python docs/notebooks/execute.py           keeps the outputs in the files
python docs/notebooks/execute.py --check   writes nothing; an error in a cell is an error here

A check takes small packaged models in place of real ones. A page within an output, which no
repository has to keep, gives way to the text that stands for it.
"""

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
LARGEST = 60_000
"""characters of HTML that an output keeps"""
STAND_INS = """
def stand_ins():
    import sinklab
    load, small = sinklab.load, {"smollm2": "tiny-causal", "smollm2-diffusion": "tiny"}
    sinklab.load = lambda name, **how: load(small.get(name, name), **how)

stand_ins()
"""
"""first cell of a check"""


def executed(path: Path, first: str = "") -> nbformat.NotebookNode:
    """The notebook with new outputs, run behind a first cell. Raises
    nbclient.exceptions.CellExecutionError where a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
    del notebook.cells[0]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.outputs = [kept(one) for one in cell.outputs if not passing(one)]
    return notebook


def passing(output: nbformat.NotebookNode) -> bool:
    """Whether an output is of interest only while its cell runs: progress, and what goes to
    stderr.
    """
    return output.get("name") == "stderr" or "<progress" in output.get("data", {}).get(
        "text/html", ""
    )


def kept(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An output without what is too large for a repository."""
    if len(output.get("data", {}).get("text/html", "")) > LARGEST:
        del output.data["text/html"]
    output.pop("metadata", None)
    return nbformat.from_dict(output | ({"metadata": {}} if "data" in output else {}))


def main() -> None:
    """Execute them all, or those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of notebooks, without .ipynb; all when left out")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    for path in sorted(HERE.glob("*.ipynb")):
        if not given.names or path.stem in given.names:
            notebook = executed(path, STAND_INS if given.check else "")
            print(
                f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells "
                "ran",
                flush=True,
            )
            if not given.check:
                path.write_text(nbformat.writes(notebook) + "\n", "utf-8")


if __name__ == "__main__":
    main()
