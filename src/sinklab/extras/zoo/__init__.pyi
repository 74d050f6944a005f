from .decoding import Alpha as Alpha
from .decoding import Dynamic as Dynamic
from .decoding import Editing as Editing
from .renoising import ANNOUNCED as ANNOUNCED
from .renoising import CanvasDenoiser as CanvasDenoiser
from .renoising import RenoisedStep as RenoisedStep
from .renoising import Renoising as Renoising
from .renoising import renoise as renoise
