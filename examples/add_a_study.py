"""A study of one's own: a run folder, a seed, resuming and a command for a few lines; see
`sinklab.lab.studies.base`. ``sinklab check add_a_study.py`` runs it with its defaults, and again
after its files were lost.
"""

from dataclasses import dataclass

from sinklab.core.errors import Checked, limited
from sinklab.lab.cli import main
from sinklab.lab.registry import studies
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

    def results(self, runs, out, settings):
        return [f"{run.path.name}: {run.table('lengths')['tokens'].sum()} tokens" for run in runs]


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
