from .blocks import Alpha as Alpha
from .blocks import Dynamic as Dynamic
from .blocks import Editing as Editing
from .blocks import Elastic as Elastic
from .blocks import ElasticStep as ElasticStep
