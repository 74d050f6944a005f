"""`sinklab export`, `push` and `gallery`: results for others. Nothing leaves without being listed
first.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import tyro

from sinklab.core.registry import commands
from sinklab.lab.cli.command import Reading, say
from sinklab.lab.cli.models import Word
from sinklab.lab.cli.reports import Folders

RUN = "run.json"
CONFIG = "config.json"
SEEN_BY = {True: "public", False: "private"}
AS_STORED = Reading(dtype="auto")


@commands.register("export")
def export(
    to: Path, model: str = "", reading: tyro.conf.OmitArgPrefixes[Reading] = AS_STORED
) -> None:
    """A model for plain transformers.

    It is written into a folder that these load without sinklab. The folder holds the weights, the
    tokenizer, and the modules of sinklab's core that compute the model and its `generate`:
    AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True). All kinds of sink, the
    gate, padding and caches give the same numbers. sinklab reads the folder too, and runs no code
    of it.

    Try
        sinklab export --model tiny-sink --to exported
        sinklab export --model runs/laptop-scratch-sink --to exported
        sinklab export --model /models/LLaDA-8B-Instruct --to exported --dtype bfloat16

    Args:
        to: folder to write; it must be empty or absent.
        model: "tiny" or "tiny-sink" (inside the package), a run of `sinklab train`, a folder, or a
            name on the Hub.
        reading: how the weights are read, and in which type they are written.
    """
    from sinklab.extras.sharing.exporting import export as write

    if not model:
        raise ValueError("export needs a model; give --model tiny, for example")
    folder = write(reading.load(_model_of(model)), to)
    say(f"exported: {folder}")
    say(
        f'to load it: AutoModelForMaskedLM.from_pretrained("{folder}", trust_remote_code=True), '
        "or sinklab.load"
    )
    say(f"next: sinklab push {folder} OWNER/NAME")


export.positional = ("model",)  # type: ignore[attr-defined]
export.listed = {  # type: ignore[attr-defined]
    "group": "share",
    "meant": "share convert save",
}
export.permissions = ("to",)  # type: ignore[attr-defined]


def _model_of(model: str) -> str:
    """The folder of the model that a training run wrote; else the given one."""
    trained = Path(model) / "model"
    if (Path(model) / RUN).is_file() and trained.is_dir():
        return str(trained)
    return model


@commands.register("gallery")
def gallery(runs: Folders, out: Path = Path("site"), title: str = "Attention sinks") -> None:
    """A site of runs.

    An index with a card for each, and the page of each. Any static host serves it. Paths in
    run.json are shortened to their last part. The pages ask nothing of any other host.

    Try
        sinklab gallery runs/plain runs/sink --out site
        sinklab gallery runs/* --title "Sinks in LLaDA" && python -m http.server -d site

    Args:
        runs: run folders of `sinklab trace` and of `sinklab train`.
        out: folder for the site; files that are in the way are replaced.
        title: of the index.
    """
    from sinklab.extras.sharing.gallery import write_gallery
    from sinklab.lab.records.reading import open_run

    say(f"site: {write_gallery([open_run(run) for run in runs], out, title=title)}")


gallery.listed = {  # type: ignore[attr-defined]
    "group": "share",
    "seldom": True,
}


@commands.register("push")
def push(
    what: tyro.conf.Positional[Path],
    repo: Word,
    public: bool = False,
    yes: bool = False,
    dry_run: bool = False,
    reading: tyro.conf.OmitArgPrefixes[Reading] = AS_STORED,
) -> None:
    """A model, a sink or a run to the Hub, after its files were listed.

    To the Hugging Face Hub: private, and only after you have seen its files. A copy is made and
    sent, and every file of it is listed first. Of a model it is the output of `sinklab export`. Of
    a sink file it is the file with a card. A run becomes a data set: its tables and arrays, its
    page, and a run.json without paths and the machine's name; claims, checkpoints, models and logs
    stay here.

    Try
        sinklab push exported OWNER/NAME --dry-run
        sinklab push runs/house OWNER/house-run
        sinklab push runs/retrofit/sink.safetensors OWNER/a-sink --public

    Args:
        what: folder of a model, a sink file, or a run folder. The model of a training run is
            RUN/model.
        repo: on the Hub, OWNER/NAME.
        public: anyone may read it; private when left out.
        yes: do not ask.
        dry_run: make the copy, list it and keep it to be looked at; nothing is sent, and no network
            is used.
        reading: of a model, how the weights are read, and in which type they are sent.
    """
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(
            f"a repository is OWNER/NAME, but this is {repo!r}; write your name on the Hub before "
            "it"
        )
    if not (yes or dry_run or sys.stdin.isatty()):
        raise ValueError(
            "nobody is there to be asked; give --yes to send it, or --dry-run to see what would "
            "be sent"
        )
    copy = Path(tempfile.mkdtemp(prefix="sinklab-push-"))
    try:
        repo_type, said = _staged(what, copy, reading)
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        say(f"a {SEEN_BY[public]} {repo_type} repository {repo} would get:")
        for path in files:
            say(f"{path.stat().st_size:>14,}  {path.relative_to(copy).as_posix()}")
        say(
            f"{sum(path.stat().st_size for path in files):>14,}  bytes in {len(files)} files; the "
            f"copy: {copy}"
        )
        for line in said:
            say(line)
        if dry_run:
            say("nothing was sent")
        elif yes or input("send it? [y/N] ").strip().lower() in ("y", "yes"):
            say(f"sent: {_sent(copy, repo, repo_type, public)}")
        else:
            say("nothing was sent")
    finally:
        if not dry_run:
            shutil.rmtree(copy, ignore_errors=True)


push.listed = {  # type: ignore[attr-defined]
    "group": "share",
    "meant": "upload publish hub",
}
push.permissions = ("repo", "public", "yes")  # type: ignore[attr-defined]


def _staged(what: Path, copy: Path, reading: Reading) -> tuple[str, list[str]]:
    """Fill the copy; the type of repository it is for, and remarks on it."""
    if (what / RUN).is_file():
        from sinklab.extras.sharing.gallery import write_data_set
        from sinklab.lab.records.reading import open_run

        return "dataset", write_data_set(open_run(what), copy)
    if (what / CONFIG).is_file():
        from sinklab.extras.sharing.exporting import MODELLING
        from sinklab.extras.sharing.exporting import export as write

        write(reading.load(str(what)), copy)
        if (what / f"{MODELLING}.py").is_file() and (what / "README.md").is_file():
            # its owner may have added to it
            shutil.copyfile(what / "README.md", copy / "README.md")
        return "model", ["the code in it is that of this sinklab, whatever the folder held"]
    if what.suffix == ".safetensors" and what.is_file():
        return "model", _of_sink(what, copy)
    raise ValueError(
        f"push takes a model's folder, a sink file or a run folder, but {what} is none of them"
    )


def _of_sink(file: Path, copy: Path) -> list[str]:
    from safetensors.torch import save_file

    from sinklab.extras.sharing.exporting import card
    from sinklab.extras.sharing.gallery import changes, without_places
    from sinklab.lab.checkpoints.sinkfile import read_tensors, sink_file_of

    sink_file_of(file)
    before, tensors = read_tensors(file, "sink")
    save_file(tensors, copy / file.name, metadata=without_places(before))
    facts = sink_file_of(copy / file.name)
    text = card("sink.jinja", facts=facts, file=file.name)
    (copy / "README.md").write_text(text + "\n", "utf-8")
    return changes(before, {**before, "name": facts.name})


def _sent(copy: Path, repo: str, repo_type: str, public: bool) -> str:
    """Send the copy; the address. Raises ValueError if the repository is there and not as private
    as was said.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    address = hub.create_repo(repo, repo_type=repo_type, private=not public, exist_ok=True)
    if hub.repo_info(repo, repo_type=repo_type).private == public:
        remedy = {True: "leave out --public", False: "give --public, or another name"}[public]
        raise ValueError(f"{repo} is {SEEN_BY[not public]} already, so nothing was sent; {remedy}")
    hub.upload_folder(
        repo_id=repo, repo_type=repo_type, folder_path=copy, commit_message="sinklab push"
    )
    return str(address)
