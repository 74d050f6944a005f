"""Programs that models write, run behind a boundary of the system: HumanEval's completions."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__, boundary="CodeLimits CodeResult run_program run_programs"
)

PROVIDES = {"sandboxes": "humaneval"}
