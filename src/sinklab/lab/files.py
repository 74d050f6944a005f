"""Files that came from elsewhere, read within limits; files that are written; plug-ins; and
SIGTERM as an ordinary end.
"""

import dataclasses
import importlib.util
import json
import signal
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

DEEPEST = 100
"""Levels of a JSON text that are read."""
LARGEST = 1 << 28
"""Bytes of a JSON file that are read."""
PLUGIN = "sinklab_plugin_"
"""Beginning of the name of the module of a plug-in's file."""


def from_json(text: str | bytes, kind: type = object) -> Any:
    """The value of a JSON text. Raises ValueError unless it is of this type and at most `DEEPEST`
    levels deep.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, kind):
        raise ValueError(f"it must hold a {kind.__name__}, but holds a {type(value).__name__}")
    level = [value]
    for _ in range(DEEPEST + 1):
        if not level:
            return value
        held = [one for one in level if isinstance(one, list)]
        held += [[*one.values()] for one in level if isinstance(one, dict)]
        level = [inner for outer in held for inner in outer]
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def toml_of(package: str, name: str) -> dict[str, Any]:
    """Contents of a TOML file of a package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file or folder: OSError with its name for a disk that refuses, such
    as a full one.

    The system's own error may name no file, and safetensors has an error of its own.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if type(error).__name__ == "SafetensorError":
            raise OSError(f"{path} cannot be written: {error}") from error
        raise


def ordinary_files(folder: Path) -> Path:
    """A folder of which every file is an `ordinary` one. Raises ValueError naming the first that is
    not.
    """
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            ordinary(path)
    return folder


def read_json(path: Path, kind: type = object) -> Any:
    """Read an ordinary file of at most `LARGEST` bytes by `from_json`; OSError if it cannot be
    read.
    """
    if path.exists() and not (path.is_file() and path.stat().st_size <= LARGEST):
        raise ValueError(f"it must be an ordinary file of at most {LARGEST >> 20} MB")
    return from_json(path.read_text("utf-8"), kind)


class Terminated(SystemExit):
    """SIGTERM ended the work, of a scheduler or of ``timeout``; with 143, the status of the program
    that it ends.
    """


@contextmanager
def on_signals(react: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """These signals call ``react(number, frame)`` during the block; not so outside the main thread,
    which alone is told.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, react) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


@contextmanager
def refused(fault: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, by default any that damage may lead to, into a ValueError that
    states the fault.
    """
    try:
        yield
    except BaseException as error:
        # a library in Rust that panics does not raise an Exception
        if not isinstance(error, kinds or Exception) and type(error).__name__ != "PanicException":
            raise
        why = str(error)
        if not isinstance(error, ValueError):
            why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{fault}: {' '.join(why.split())}") from error


def ordinary(path: str | Path) -> Path:
    """The path of a file, or of nothing; ValueError for a pipe or a device, to read which could
    wait for ever.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} must be an ordinary file, but is a pipe, a device or a folder; give a file"
        )
    return path


def free_fields(settings: Any) -> frozenset[str]:
    """Names of the settings, of a record or its class, that may differ between a run and its
    continuation.
    """
    return frozenset(
        field.name for field in dataclasses.fields(settings) if field.metadata.get("free")
    )


def load_plugin(file: str | Path) -> None:
    """Run a Python file that registers something, unless it was run or imported before. Raises
    ValueError for one that is not there or fails.
    """
    path = Path(file).resolve()
    name = f"{PLUGIN}{path.stem}"
    modules = list(sys.modules.values())
    if any(getattr(module, "__file__", None) == str(path) for module in modules):
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(
            f"a plug-in is a Python file, but {file} is none; give the path of a .py file"
        )
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                where = f" (line {frame.lineno})"
        raise ValueError(f"the plug-in {file} cannot be loaded: {error!r}{where}") from error


def plugins() -> list[Path]:
    """Files that `load_plugin` ran in this process, if they are still there."""
    loaded = [module for name, module in sys.modules.items() if name.startswith(PLUGIN)]
    files = [Path(str(module.__file__)) for module in loaded]
    return [file for file in files if file.is_file()]
