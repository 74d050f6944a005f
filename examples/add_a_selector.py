"""A selector of your own: the keys that many heads of a layer call a sink.

One method is all there is to it, over one view of an attention call (`KeyView`); its fields are its
options. `--plugin add_a_selector.py` makes it a choice of every command that takes edits;
``sinklab check add_a_selector.py`` blocks the keys that it selects.
"""

from dataclasses import dataclass

from torch import Tensor

from sinklab import Excess
from sinklab.core.probing import KeyView, Selector
from sinklab.core.registry import registered, rules, selectors
from sinklab.core.sinks import Rule
from sinklab.lab.cli import main


@selectors.register("shared_sinks")
@dataclass(frozen=True)
class SharedSinks(Selector):
    """The keys that a rule calls sinks in at least this share of the heads."""

    share: float = 0.5
    rule: Rule = registered(rules, Excess(epsilon=3.0))  # noqa: RUF009

    def select(self, view: KeyView) -> Tensor:
        shares_B1S = view.sinks(self.rule).float().mean(1, keepdim=True)
        return view.free_BHS & (shares_B1S >= self.share)


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__, "shared_sinks:share=0.25"]))
