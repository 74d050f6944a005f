"""Families, decoders and recipes beyond those of the two papers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
PROVIDES = {
    "families": "adapted experts gemma masked",
    "schedules": "decoding",
}
