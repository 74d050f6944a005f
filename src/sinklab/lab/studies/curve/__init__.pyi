from .study import Curve as Curve
from .study import CurveSettings as CurveSettings
from .study import masking_curve as masking_curve
