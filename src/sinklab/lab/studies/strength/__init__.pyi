from .study import Strength as Strength
from .study import StrengthSettings as StrengthSettings
