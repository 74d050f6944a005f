"""Registries: everything that can be extended, by name, and its values as text.

Python, the command line and run folders reach a registered function or class by one name. Its
further arguments or fields are its options, its docstring is its help::

    from sinklab.core.registry import selectors

    @selectors.register("weak_values")
    def weak_values(call, k=1): ...

From then on `weak_values` is a frozen dataclass: ``BlockKeys(weak_values(k=3))``. Write a class,
with ``@dataclass(frozen=True)``, to keep something.

The ``PROVIDES`` of a ring or an extra names its modules that register. Plug-ins are modules that
installed packages name under the entry point group ``sinklab.plugins``, or files.
"""

import dataclasses
import inspect
import pkgutil
import re
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from sinklab.core.errors import Checked, known_fields, one_of

Class = TypeVar("Class", bound=Callable[..., Any])
PLUGINS = "sinklab.plugins"
REGISTRIES: dict[str, "Registry"] = {}
"""By name, once their ring is imported."""


@cache
def provided(group: str) -> tuple[str, ...]:
    """Full names of the modules of rings and extras that register in this registry."""
    home = __name__.partition(".")[0]
    rings = pkgutil.iter_modules(import_module(home).__path__, f"{home}.")
    packages = [ring.name for ring in rings if ring.ispkg]
    outermost = f"{home}.extras"
    if outermost in packages:
        extras = pkgutil.iter_modules(import_module(outermost).__path__, f"{outermost}.")
        packages += [extra.name for extra in extras]
    found: list[str] = []
    for package in packages:
        modules = vars(import_module(package)).get("PROVIDES", {}).get(group, "")
        found += [f"{package}.{module}" for module in modules.split()]
    return tuple(found)


class DefinedTwice(ValueError):
    """A name that two classes claim."""


@cache
def _load_plugins() -> None:
    """Import installed plug-ins; a broken one is a warning."""
    for entry in entry_points(group=PLUGINS):
        try:
            entry.load()
        except DefinedTwice:
            raise
        except Exception as error:  # a plug-in may fail in any way
            warnings.warn(
                f"the plug-in {entry.name!r} ({entry.value}) is left out: {error!r}", stacklevel=2
            )


# an error is not cached: what failed fails again
@cache
def _load(group: str) -> None:
    _load_plugins()
    for module in provided(group):
        import_module(module)


class Registry(Mapping[str, Any]):
    """Classes by name. Raises ValueError for an unknown one, naming the near ones."""

    def __init__(self, what: str, group: str, made_as: str = "") -> None:
        self.what = what
        """Kind of its members, for errors."""
        self._group = group
        REGISTRIES[group] = self
        self._classes: dict[str, Any] = {}
        self._made_as = made_as
        """Path of the method that a function becomes; empty if it stays a function."""

    def register(self, name: str, **marks: Any) -> Callable[[Class], Class]:
        """Decorate a class, or a function that becomes one with `marks` as attributes. Raises
        ValueError for a name that is taken.
        """

        def put(kind: Any) -> Any:
            if inspect.isfunction(kind) and self._made_as:
                kind = self._kind_of(kind, marks)
            elif marks:
                raise ValueError(
                    f"{', '.join(marks)}: only a function that becomes a {self.what} is marked so; "
                    "write attributes of the class"
                )
            there = self._classes.get(name, kind)
            # a module that is run a second time defines its classes anew
            if (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
                raise DefinedTwice(
                    f"the {self.what} {name!r} is defined twice, in {there.__module__} and in "
                    f"{kind.__module__}; rename one of them"
                )
            self._classes[name] = kind
            return kind

        return put

    def _kind_of(self, function: Callable[..., Any], marks: dict[str, Any]) -> type:
        """A subclass whose method is this function; arguments after the method's are fields. Raises
        ValueError for arguments and marks that cannot be.
        """
        base_name, _, method = self._made_as.rpartition(".")
        base = pkgutil.resolve_name(base_name)
        own = [one for one in dir(base) if not one.startswith("_")]
        known_fields(f"a {self.what}", marks, own)
        taken = list(inspect.signature(pkgutil.resolve_name(self._made_as)).parameters)[1:]
        signature = inspect.signature(function)
        options = list(signature.parameters.values())[len(taken) :]
        if len(signature.parameters) < len(taken) or any(
            one.kind is not one.POSITIONAL_OR_KEYWORD or one.name in own for one in options
        ):
            raise ValueError(
                f"a {self.what} takes {', '.join(taken)} and then its options, without a star or "
                f"slash and not named {', '.join(own)}, but is {function.__name__}{signature}"
            )

        def run(value: Any, *call: Any, **named: Any) -> Any:
            given = {one.name: vars(value)[one.name] for one in options}
            return function(*call, **named, **given)

        kind = dataclasses.make_dataclass(
            function.__name__,
            map(_field_of, options),
            bases=(base, Checked),
            namespace={method: run, "__doc__": function.__doc__, **marks},
            frozen=True,
        )
        # by which pickle finds it
        kind.__module__, kind.__qualname__ = function.__module__, function.__qualname__
        return kind

    def _all(self) -> dict[str, Any]:
        _load(self._group)
        return self._classes

    def __getitem__(self, name: str) -> Any:
        classes = self._all()
        if name not in classes:
            remedy = "if a plug-in defines it, install that or name its file: --plugin"
            one_of(self.what, name, sorted(classes), remedy)
        return classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def name_of(self, value: object) -> str:
        """The name of a value's class. Raises ValueError if it is not registered."""
        for name, kind in self._all().items():
            if kind is type(value):
                return name
        raise ValueError(
            f"{value!r} is no registered {self.what}; known are {', '.join(self)}; register its "
            "class, and pass an object of it"
        )

    def parse(self, given: Any, base: Any = None) -> Any:
        """A value from its text ``name:field=value,field=value``; an object as it is, which with
        `base` must be of that class, else registered. Raises ValueError for anything else.

        Several values are joined by "+" (layers=0+2) or are a range without its end
        (positions=8..16); "none", "true" and "false" are None, True and False; a registered value
        with a comma stands in brackets.
        """
        if not isinstance(given, str):
            if base is None:
                self.name_of(given)
            elif isinstance(given, type) or not isinstance(given, base):
                raise ValueError(
                    f"a {self.what} is the text of one ({', '.join(self)}) or an object of class "
                    f"{base.__name__}, got {given!r}"
                )
            return given
        name, _, rest = given.strip().partition(":")
        kind = self[name]
        options = {field.name: field for field in _options(kind)}
        fields: dict[str, Any] = {}
        for part in _split(rest):
            key, equals, text = (piece.strip() for piece in part.partition("="))
            if not (key and equals and text) or key in fields:
                raise ValueError(
                    f"a {self.what} is written name:field=value,field=value, got {given!r}: "
                    f"{part.strip()!r} is no single field=value"
                )
            known_fields(f"the {self.what} {name!r}", [key], options)
            fields[key] = _from_text(options[key], text, typing.get_type_hints(kind)[key])
        for key, field in options.items():
            if key not in fields and field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"the {self.what} {name!r} needs {key}; write {name}:{key}=…")
        return kind(**fields)

    def as_text(self, value: Any) -> str:
        """The text of a registered value, without fields at their defaults."""
        name = self.name_of(value)
        given = [(field, getattr(value, field.name)) for field in _options(type(value))]
        texts = [
            f"{field.name}={_to_text(field, one)}" for field, one in given if one != field.default
        ]
        return ":".join(filter(None, (name, ",".join(texts))))


def registered(registry: Registry, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field for a registered value or its text."""
    return dataclasses.field(default=default, metadata={"registry": registry})


def _options(kind: type) -> list[dataclasses.Field]:
    """Fields in the order of parameters. Raises ValueError for a class that is no dataclass."""
    if not dataclasses.is_dataclass(kind):
        raise ValueError(
            f"{kind.__name__} has no fields to be written as text: write @dataclass(frozen=True) "
            "above it, below the registry's line"
        )
    fields = [field for field in dataclasses.fields(kind) if field.init]
    by_keyword = [field for field in fields if field.kw_only]
    return [field for field in fields if not field.kw_only] + by_keyword


def _field_of(option: inspect.Parameter) -> tuple[str, Any, Any]:
    """Name, type and default of an argument's field; without annotation the default's type."""
    field = option.default
    if field is option.empty:
        field = dataclasses.field()
    elif not isinstance(field, dataclasses.Field):
        field = dataclasses.field(default=field)
    hint = option.annotation
    if hint is option.empty:
        hint = type(field.default)
        if field.default in (None, dataclasses.MISSING):
            hint = int | float | str | None
    return option.name, hint, field


def _split(text: str) -> list[str]:
    """Parts of a text between the commas outside brackets."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _to_text(field: dataclasses.Field, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if "registry" in field.metadata:
        text = field.metadata["registry"].as_text(value)
        if "," in text:
            return f"({text})"
        return text
    if isinstance(value, tuple | list):
        return "+".join(_to_text(field, item) for item in value)
    return str(value)


def _from_text(field: dataclasses.Field, text: str, hint: Any) -> Any:
    kinds: tuple[Any, ...] = (hint,)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = typing.get_args(hint)
    origins = {typing.get_origin(one) or one for one in kinds}
    if text.lower() == "none" and types.NoneType in origins:
        return None
    if "registry" in field.metadata:
        if text.startswith("("):
            text = text.removeprefix("(").removesuffix(")")
        return field.metadata["registry"].parse(text)
    if tuple in origins:
        return tuple(item for piece in text.split("+") for item in _items(piece))
    if bool in origins and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in origins:
            with suppress(ValueError):
                return number(text)
    if str in origins:
        return text
    kind = inspect.formatannotation(hint)
    raise ValueError(f"{field.name} takes {kind}, got {text!r}; write {field.name}=…")


def _items(piece: str) -> list[Any]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
    if span is not None:
        return list(range(int(span[1]), int(span[2])))
    if piece.lower() == "none":
        return [None]
    with suppress(ValueError):
        return [int(piece)]
    return [piece]


rules = Registry("sink rule", "rules", "sinklab.core.sinks:Rule.__call__")
"""Rules for sinks: `sinklab.core.sinks.Rule`."""
statistics = Registry(
    "statistic", "statistics", "sinklab.core.instrument.statistics:Statistic.measure"
)
"""Statistics that a trace records: `sinklab.core.instrument.Statistic`."""
interventions = Registry(
    "intervention",
    "interventions",
    "sinklab.core.instrument.edits.edit:Edit.before",
)
"""Edits of calls and hidden states: `sinklab.core.instrument.Intervention`."""
selectors = Registry(
    "selector", "selectors", "sinklab.core.instrument.edits.selectors:Selector.select"
)
"""Choices of keys to block: `sinklab.core.instrument.Selector`."""
removals = Registry("removal", "removals", "sinklab.core.instrument.edits.removals:Removal.apply")
"""Ways to take a key away: `sinklab.core.instrument.Removal`."""
sinks = Registry("sink kind", "sinks")
"""Kinds of added sinks: `sinklab.core.subject.Sink`."""
unmasking_rules = Registry(
    "unmasking rule", "unmasking_rules", "sinklab.core.subject.rules:UnmaskingRule.__call__"
)
"""Orders of committing proposals: `sinklab.core.subject.UnmaskingRule`."""
schedules = Registry("schedule", "schedules")
"""Numbers of proposals to commit: `sinklab.core.subject.Schedule`."""
caches = Registry("cache", "caches")
"""Keys and values to keep while decoding: `sinklab.core.subject.Cache`."""
denoisers = Registry("denoiser", "denoisers")
"""Denoisers of a model that remember keys and values; without one everything is computed afresh."""
attention_functions = Registry("attention function", "attention_functions")
"""Attention functions of transformers, beside SDPA, that taps read."""
fast_decoders = Registry("fast decoder", "fast_decoders")
"""Faster forwards for decoding."""
fast_losses = Registry("fast loss", "fast_losses")
"""Faster losses."""
fast_passes = Registry("fast pass over scores", "fast_passes")
"""Faster passes over attention scores."""


def fast_path(paths: Registry, *call: Any) -> Any:
    """Return the first ``serving(*call)`` that is not None; None: take the plain path."""
    # once a layer, so no step of the mapping over again
    for _, kind in sorted(paths._all().items()):
        path = kind.serving(*call)
        if path is not None:
            return path
    return None
