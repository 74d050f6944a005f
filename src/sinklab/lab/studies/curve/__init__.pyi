from .study import Ablate as Ablate
from .study import AblateSettings as AblateSettings
from .study import Curve as Curve
from .study import CurveSettings as CurveSettings
from .study import DistanceSettings as DistanceSettings
from .study import DistanceStudy as DistanceStudy
from .study import masking_curve as masking_curve
