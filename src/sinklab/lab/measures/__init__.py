"""Measurements of what sinks do (2025 and 2026), one file each: a statistic, a rule, a selector or
an edit; the controls of a study, and short names of its edits.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
