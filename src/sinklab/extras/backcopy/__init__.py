"""Bigram-Backcopy: causal and diffusion twins of a task on which a causal model grows a sink in
seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
PROVIDES = {"studies": "study"}
