from .boundary import CodeLimits as CodeLimits
from .boundary import CodeResult as CodeResult
from .boundary import run_program as run_program
from .boundary import run_programs as run_programs
