from .live_text import LiveText as LiveText
from .server import serve as serve
