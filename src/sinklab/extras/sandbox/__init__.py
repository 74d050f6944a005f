"""Programs that models write, run behind a boundary of the system: HumanEval's completions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
PROVIDES = {"sandboxes": "humaneval"}
