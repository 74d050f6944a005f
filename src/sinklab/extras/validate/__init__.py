"""Another program's logits, losses and canvases, held against those of a checkpoint here: the first
thing to do with weights that nobody has run in this package before.
"""

PROVIDES = {"commands": "command"}
