from .study import ContentsSettings as ContentsSettings
from .study import Probe as Probe
from .study import sink_contents as sink_contents
