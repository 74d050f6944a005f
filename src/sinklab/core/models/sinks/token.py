"""The sink token of «One Token Is Enough»."""

from sinklab.core.models.sinks.base import Sink
from sinklab.core.registry import sinks


@sinks.register("token")
class TokenSink(Sink):
    """A learned embedding, run through the layers, that sees itself alone (Eq. 5–6)."""

    label = ""
