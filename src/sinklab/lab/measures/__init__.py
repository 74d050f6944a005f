"""Measurements of what sinks do (2025 and 2026): statistics, a rule, selectors, removals and edits;
the controls of a study, and the edits of the papers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
