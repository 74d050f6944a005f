from .source import Source as Source
from .study import Backcopy as Backcopy
from .study import BackcopySettings as BackcopySettings
