"""A study of one's own: a run folder, a seed, resuming and a command for a few lines; see
`sinklab.lab.studies.base`.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass

import sinklab
from sinklab.core.errors import Checked, limited
from sinklab.core.registry import studies
from sinklab.lab.studies.base import Study


@studies.register("lengths")
class Lengths(Study):
    """Count the tokens of some texts.

    Try
        sinklab lengths --plugin add_a_study.py --texts "It was a dark night" "The sea"
    """

    @dataclass(frozen=True)
    class Settings(Checked):
        texts: tuple[str, ...] = limited(("The sea",), needed=True)
        """Texts to count."""

    def run(self, work):
        ids = [work.loaded.needed_tokenizer()(text)["input_ids"] for text in work.settings.texts]
        work.run.table("lengths", {"text": [*work.settings.texts], "tokens": [*map(len, ids)]})

    def sentences(self, runs):
        return [f"{run.path.name}: {run.table('lengths')['tokens'].sum()} tokens" for run in runs]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out:
        run = sinklab.open_run(
            Lengths()(sinklab.load("tiny"), f"{out}/a", Lengths.Settings(texts=("The sea",)))
        )
        assert (run.info.kind, run.info.settings) == ("lengths", {"texts": ["The sea"]})
        command = f"-m sinklab lengths --plugin {__file__} --texts Sea --out {out}/b".split()
        assert (
            b"b: "
            in subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE).stdout
        )
