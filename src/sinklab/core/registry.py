"""Registries: everything that can be extended, by name, its values as text, and lazily loaded
public names.

A rule, statistic, intervention, … is a function or a class under a name. Registered, it is
reachable from Python, from the command line and from run folders; its further arguments or fields
are its options, its docstring is its help::

    from sinklab.core.registry import selectors

    @selectors.register("weak_values")
    def weak_values(call, k=1): ...

From then on `weak_values` is a class, a frozen dataclass: ``BlockKeys(weak_values(k=3))``. A class
is written where something is kept; one that adds fields needs ``@dataclass(frozen=True)``.

Classes of the package are found by the ``PROVIDES`` of its rings and extras, those of others in
installed packages with the entry point group ``sinklab.plugins`` (its values are modules), or in a
file that is loaded by `sinklab.lab.files.load_plugin`.
"""

import dataclasses
import importlib.util
import inspect
import operator
import pkgutil
import re
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from sinklab.core.errors import Checked, known_fields, unknown

Class = TypeVar("Class", bound=Callable[..., Any])
PLUGINS = "sinklab.plugins"
_loaded: set[str] = set()
REGISTRIES: dict[str, "Registry"] = {}
"""By name; those of a ring once it is imported."""
INSTEAD: dict[str, str] = {}
"""Advice for names that are not known, from the command line."""


# a forward asks for the kind of its sink several times, mostly to read these
_type_hints = cache(typing.get_type_hints)


@cache
def providers() -> tuple[str, ...]:
    """Packages with a ``PROVIDES``: the rings that are there, and each folder of the outermost one.

    ``PROVIDES`` maps a registry to the modules, separated by blanks, that register classes in it.
    A ring or an extra whose folder was deleted provides nothing.
    """
    rings = [f"sinklab.{ring}" for ring in ("core", "lab", "extras")]
    found = [ring for ring in rings if importlib.util.find_spec(ring)]
    if rings[-1] in found:
        extras = import_module(rings[-1])
        found += [f"{rings[-1]}.{one.name}" for one in pkgutil.iter_modules(extras.__path__)]
    return tuple(found)


@cache
def provided(group: str) -> tuple[str, ...]:
    """Modules of the package that register classes in this registry, by their full names."""
    found: list[str] = []
    for package in providers():
        modules = getattr(import_module(package), "PROVIDES", {}).get(group, "")
        found += [f"{package}.{module}" for module in modules.split()]
    return tuple(found)


class DefinedTwice(ValueError):
    """A name that two classes claim."""


def _load_plugins() -> None:
    """Import the plug-ins of installed packages. Warns of a broken one; raises `DefinedTwice`."""
    for entry in entry_points(group=PLUGINS):
        try:
            entry.load()
        except DefinedTwice:
            _loaded.discard(PLUGINS)
            raise
        except Exception as error:  # a plug-in may fail in any way
            warnings.warn(
                f"the plug-in {entry.name!r} ({entry.value}) is left out: {error!r}", stacklevel=2
            )


class Registry(Mapping[str, Any]):
    """Classes by name. ``registry[name]`` raises ValueError for an unknown name, listing the near
    ones.
    """

    def __init__(self, what: str, group: str, made_as: str = "") -> None:
        self.what = what
        """Kind of its members, in the singular, for errors."""
        self._group = group
        """Name in the ``PROVIDES`` of rings and extras."""
        REGISTRIES[group] = self
        self._classes: dict[str, Any] = {}
        self._made_as = made_as
        """Path of the method that a function is registered as; empty where it stays a function."""

    def register(self, name: str, **marks: Any) -> Callable[[Class], Class]:
        """A decorator that puts a class under this name, or the class of a function, whose `marks`
        are the attributes of that class. Raises ValueError for a name that is taken.
        """

        def put(kind: Any) -> Any:
            if inspect.isfunction(kind) and self._made_as:
                kind = self._kind_of(kind, marks)
            elif marks:
                raise ValueError(
                    f"{', '.join(marks)}: only a function that becomes a {self.what} is marked so; "
                    "write attributes of the class"
                )
            there = self._classes.get(name)
            if there is not None and (there.__module__, there.__qualname__) != (
                kind.__module__,
                kind.__qualname__,
            ):
                raise DefinedTwice(
                    f"the {self.what} {name!r} is defined twice, in {there.__module__} and in "
                    f"{kind.__module__}; rename one of them"
                )
            self._classes[name] = kind
            return kind

        return put

    def _kind_of(self, function: Callable[..., Any], marks: dict[str, Any]) -> type:
        """The class of a function: a frozen dataclass of the base, whose method it is. The function
        takes the arguments of the method, and those behind them are the fields.

        Raises ValueError for a function of fewer arguments, and for a mark that is no attribute of
        the base.
        """
        base_name, _, method = self._made_as.rpartition(".")
        base = pkgutil.resolve_name(base_name)
        own = [one for one in dir(base) if not one.startswith("_")]
        known_fields(f"a {self.what}", marks, own)
        taken = list(inspect.signature(pkgutil.resolve_name(self._made_as)).parameters)[1:]
        parameters = list(inspect.signature(function).parameters.values())
        if len(parameters) < len(taken):
            raise ValueError(
                f"a {self.what} takes {', '.join(taken)}, but {function.__name__} takes "
                f"{len(parameters)} arguments: give it these, and options with defaults after them"
            )
        options = parameters[len(taken) :]
        for one in options:
            if one.kind is not one.POSITIONAL_OR_KEYWORD or one.name in own:
                raise ValueError(
                    f"{one} of {function.__name__} cannot be an option of a {self.what}: give it "
                    "another name, and neither a star nor a slash"
                )
        fields = [(one.name, *_field_of(one)) for one in options]

        def run(value: Any, *call: Any, **named: Any) -> Any:
            given = {name: getattr(value, name) for name, *_ in fields}
            return function(*call, **named, **given)

        bases: tuple[type, ...] = (base,)
        if not issubclass(base, Checked):
            bases = (base, Checked)
        kind = dataclasses.make_dataclass(
            function.__name__,
            fields,
            bases=bases,
            namespace={method: run, "__doc__": function.__doc__, **marks},
            frozen=True,
        )
        # by which pickle finds it
        kind.__module__, kind.__qualname__ = function.__module__, function.__qualname__
        return kind

    def _all(self) -> dict[str, Any]:
        """Every class, those of plug-ins of installed packages too: a broken one is left out, a
        taken name an error.
        """
        if PLUGINS not in _loaded:
            # before they are: each asks for registries
            _loaded.add(PLUGINS)
            _load_plugins()
        for module in provided(self._group):
            if module not in _loaded:
                import_module(module)
                # one that fails does so again: nothing of the package is silently left out
                _loaded.add(module)
        return self._classes

    def __getitem__(self, name: str) -> Any:
        classes = self._all()
        if name not in classes:
            remedy = "if a plug-in defines it, install that or name its file: --plugin"
            raise unknown(self.what, name, classes, INSTEAD.get(name, remedy))
        return classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def name_of(self, value: object) -> str:
        """The name of the class of a value, or of a class. Raises ValueError for one that is not
        registered.
        """
        kind = value
        if not isinstance(value, type):
            kind = type(value)
        for name, known in self._all().items():
            if known is kind:
                return name
        raise ValueError(
            f"{value!r} is no registered {self.what}; known are {', '.join(self)}; register its "
            "class"
        )

    def make(self, name: str, /, **fields: Any) -> Any:
        """The value called ``name`` with these fields.

        Raises ValueError for an unknown name or field (naming the near ones), and for fields that
        are missing or that the class refuses.
        """
        kind = self[name]
        own = {field.name: field for field in dataclasses.fields(kind) if field.init}
        for key in inspect.get_annotations(kind).keys() & fields.keys() - own.keys():
            raise ValueError(
                f"{key} is no field of the {self.what} {name!r} yet; write @dataclass(frozen=True) "
                "above its class, below the registry's line"
            )
        known_fields(f"the {self.what} {name!r}", fields, own)
        no_default = [
            key
            for key, one in own.items()
            if one.default is one.default_factory is dataclasses.MISSING
        ]
        needed = [key for key in no_default if key not in fields]
        if needed:
            raise ValueError(
                f"the {self.what} {name!r} needs {' and '.join(needed)}; write {name}:{needed[0]}=…"
            )
        return kind(**fields)

    def parse(self, given: Any) -> Any:
        """A value from its text ``name:field=value,field=value``, or as it is.

        Several values are joined by "+" (layers=0+2) or are a range without its end
        (positions=8..16); "none", "true" and "false" stand for None, True and False; a value that
        is itself ``name:field=value`` and has a comma stands in brackets.
        """
        if isinstance(given, type):
            raise ValueError(f"a {self.what} is an object, got a class; pass {given.__name__}(…)")
        if not isinstance(given, str):
            self.name_of(given)
            return given
        name, _, rest = given.strip().partition(":")
        kind = self[name]
        fields: dict[str, Any] = {}
        hints = _type_hints(kind)
        own = {field.name: field for field in dataclasses.fields(kind)}
        for part in _split(rest):
            key, equals, text = (piece.strip() for piece in part.partition("="))
            if not (key and equals and text) or key in fields:
                raise ValueError(
                    f"a {self.what} is written name:field=value,field=value, got {given!r}: "
                    f"{part.strip()!r} is no single field=value"
                )
            fields[key] = text
            if key in own:
                fields[key] = _from_text(own[key], text, hints[key])
        return self.make(name, **fields)

    def parsed(self, given: Any) -> Any:
        """A value from its text, and anything else as it is: for arguments that take either.

        Raises ValueError for text as `parse` does. An object need not be registered to be used, so
        it is not looked up.
        """
        if isinstance(given, str):
            return self.parse(given)
        return given

    def words(self, value: Any) -> str:
        """The value, or that of a text, as a reader is told of it, "heavy (w = 0.2)": with all its
        options, so that two can be told apart.

        Raises ValueError for a value that is not registered.
        """
        value = self.parsed(value)
        name, fields = self._named(value)
        if not fields:
            return name
        options = [f"{field.name} = {_in_words(field, one)}" for field, one in fields]
        return f"{name} ({', '.join(options)})"

    def as_text(self, value: Any) -> str:
        """The value as `parse` reads it, with the fields that differ from their defaults: a short
        label.
        """
        name, fields = self._named(value)
        texts = [
            f"{field.name}={_to_text(field, one)}"
            for field, one in fields
            if one != _default(field)
        ]
        return ":".join(filter(None, (name, ",".join(texts))))

    def _named(self, value: Any) -> tuple[str, list[tuple[dataclasses.Field, Any]]]:
        """The name of a value, and its options in the order of the parameters: those that only
        keywords reach come last.
        """
        fields = [(field, getattr(value, field.name)) for field in _fields(value)]
        return self.name_of(value), fields


def _field_of(option: inspect.Parameter) -> tuple[Any, Any]:
    """Type and default of the field that an argument of a function becomes; without an annotation
    the type is that of the default, or any that text can stand for.
    """
    default = option.default
    if default is option.empty:
        default = dataclasses.field()
    bare = default
    if isinstance(default, dataclasses.Field):
        bare = default.default
    hint: Any = type(bare)
    if option.annotation is not option.empty:
        hint = option.annotation
    elif bare is None or bare is dataclasses.MISSING:
        hint = int | float | str | None
    return hint, default


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


def registered(registry: Registry, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field for a value that is registered, which may be given as its text."""
    return dataclasses.field(default=default, metadata={"registry": registry})


def value_of(registry: Registry, given: Any, base: type) -> Any:
    """A value from its text, or an object of this base class: for arguments that take either.

    Raises TypeError for a class in place of its object, and for any other object.
    """
    if isinstance(given, str):
        return registry.parse(given)
    what = registry.what.split()[-1]
    if isinstance(given, type):
        raise TypeError(
            f"a {what} is an object, got the class {given.__name__}; pass {given.__name__}()."
        )
    if not isinstance(given, base):
        raise TypeError(
            f"a {what} is a name or an object of class {base.__name__}, got {given!r}; inherit "
            "from that class"
        )
    return given


def _fields(value: Any) -> list[dataclasses.Field]:
    """The fields of a value in the order of its class's parameters: those that only keywords reach
    come last.
    """
    if isinstance(value, type):
        raise ValueError(
            f"text is that of a value, got the class {value.__name__}; pass an instance"
        )
    if not dataclasses.is_dataclass(value):
        raise ValueError(
            f"text is made of the fields of a dataclass, got {value!r}; write "
            "@dataclass(frozen=True) above its class, and make a value of a text by parse(…)"
        )
    fields = [field for field in dataclasses.fields(value) if field.init]
    return sorted(fields, key=operator.attrgetter("kw_only"))


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _to_text(field: dataclasses.Field, value: Any) -> str:
    if "registry" in field.metadata and value is not None:
        text = field.metadata["registry"].as_text(value)
        if "," in text:
            return f"({text})"
        return text
    if isinstance(value, tuple | list):
        return "+".join(_to_text(field, item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _in_words(field: dataclasses.Field, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return _to_text(field, value)


def _from_text(field: dataclasses.Field, text: str, hint: Any) -> Any:
    kinds: tuple[Any, ...] = (hint,)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = typing.get_args(hint)
    origins = {typing.get_origin(one) or one for one in kinds}
    if text.lower() == "none" and types.NoneType in origins:
        return None
    if text.startswith("("):
        text = text.removeprefix("(").removesuffix(")")
    if "registry" in field.metadata:
        return field.metadata["registry"].parse(text)
    if tuple in origins:
        return tuple(item for piece in text.split("+") for item in _items(piece))
    if bool in origins and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        value = _number(text, number)
        if number in origins and value is not None:
            return value
    if str in origins:
        return text
    names = " or ".join(sorted(one.__name__ for one in origins - {types.NoneType}))
    raise ValueError(f"{field.name} takes {names}, got {text!r}; write {field.name}=…")


def _items(piece: str) -> list[Any]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
    if span is not None:
        return list(range(int(span[1]), int(span[2])))
    if piece.lower() == "none":
        return [None]
    number = _number(piece, int)
    if number is None:
        return [piece]
    return [number]


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None


rules = Registry("sink rule", "rules", "sinklab.core.sinks:Rule.__call__")
"""Rules for sinks: `sinklab.core.sinks.Rule`."""
statistics = Registry(
    "statistic", "statistics", "sinklab.core.probing.statistics:Statistic.measure"
)
"""Statistics that a trace records: `sinklab.core.probing.Statistic`."""
interventions = Registry(
    "intervention",
    "interventions",
    "sinklab.core.probing.interventions.base:LayerIntervention.edit",
)
"""Edits of attention calls and hidden states: `sinklab.core.probing.Intervention`."""
selectors = Registry(
    "selector", "selectors", "sinklab.core.probing.interventions.selectors:Selector.select"
)
"""Choices of keys to block: `sinklab.core.probing.Selector`."""
removals = Registry(
    "removal", "removals", "sinklab.core.probing.interventions.removals:Removal.apply"
)
"""Ways to take a key away: `sinklab.core.probing.Removal`."""
sinks = Registry("sink kind", "sinks")
"""Kinds of added sinks: `sinklab.core.models.Sink`."""
unmasking_rules = Registry(
    "unmasking rule", "unmasking_rules", "sinklab.core.sampling.rules:UnmaskingRule.__call__"
)
"""Order in which proposals are committed: `sinklab.core.sampling.UnmaskingRule`."""
schedules = Registry("schedule", "schedules")
"""Number of proposals committed at a step: `sinklab.core.sampling.Schedule`."""
caches = Registry("cache", "caches")
"""Keys and values to keep while a text is written: `sinklab.core.sampling.Cache`."""
backbones = Registry("backbone", "backbones")
"""Decoders of our own, if transformers has none."""
attention_functions = Registry("attention function", "attention_functions")
"""Attention functions of transformers that are read beside SDPA: `sinklab.lab.eager`."""
fast_attentions = Registry("fast attention", "fast_attentions")
"""Calls of SDPA that keep what statistics behind them would compute anew."""
fast_decoders = Registry("fast decoder", "fast_decoders")
"""Faster forwards for decoding."""
fast_losses = Registry("fast loss", "fast_losses")
"""Faster losses."""
fast_passes = Registry("fast pass over scores", "fast_passes")
"""Faster passes over attention scores."""
fast_sinks = Registry("fast sink form", "fast_sinks")
"""Faster forms of an added sink."""


def fast_path(paths: Registry, *call: Any) -> Any:
    """The first fast path that serves this call, the result of its class's ``serving(*call)``;
    None: take the plain one.

    Every fast path has a plain twin in the core, which runs without them.
    """
    # once a layer, so no step of the mapping over again
    for _, kind in sorted(paths._all().items()):
        path = kind.serving(*call)
        if path is not None:
            return path
    return None
