from .study import Battery as Battery
from .study import BatterySettings as BatterySettings
from .study import score_battery as score_battery
