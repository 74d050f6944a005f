"""Pages of the site that no file of docs/ holds: a hook of mkdocs, named in mkdocs.yml.

The README is the home page. Changelog, architecture, studies and other Markdown of the repository
are taken as they are, with links that lead from page to page; examples become "Add a …" pages,
notebooks become pages with their outputs, and every public name gets its place in the reference.
Nothing is imported of the package: names are read off the `__init__` files, docstrings by griffe.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sinklab"
TAKEN = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
"""page of the site -> file of the repository"""
MODULES = {
    "lab.data.noise": None,
    "core.registry": None,
    "core.sinks": None,
    "lab.studies.trace.study": ("StudySettings", "study"),
}
"""public modules that are no packages with a list of names; None: everything without an
underscore
"""
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.M | re.S)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")


def taken() -> dict[str, str]:
    """Every page of the site that is a file elsewhere in the repository -> that file."""
    studies = [*(ROOT / "studies").glob("*.md"), *(ROOT / "studies").glob("*/*.md")]
    return TAKEN | {
        str(path.relative_to(ROOT)).replace("README", "index"): str(path.relative_to(ROOT))
        for path in studies
    }


def public_names() -> dict[str, dict[str, str]]:
    """Public package or module -> public name -> where it is defined
    (``sinklab.core.subject.canvas.Canvas``).
    """
    found = {}
    for file in sorted(SOURCE.rglob("__init__.pyi")):
        room = ".".join(file.relative_to(SOURCE.parent).parent.parts)
        found[room] = dict(_exported(room, ast.parse(file.read_text("utf-8"))))
    for module, names in MODULES.items():
        path = f"sinklab.{module}"
        tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text("utf-8"))
        found[path] = {name: f"{path}.{name}" for name in names or _defined(tree)}
    return found


def _exported(room: str, stub: ast.Module) -> Iterator[tuple[str, str]]:
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.name, f"{room}.{node.module}.{alias.name}") for alias in node.names)


def _defined(tree: ast.Module) -> list[str]:
    """Public functions and classes of a module, and its public values that are instances of its own
    classes.
    """
    named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) in own
        ):
            named += [ast.unparse(target) for target in node.targets]
    return [name for name in named if not name.startswith("_")]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Patterns of the navigation become the pages that match them and are not named elsewhere in
    it.
    """
    here = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")}
    named = set(re.findall(r"[\w./]+\.md", json.dumps(config.nav)))
    pages = sorted(here | set(taken()) | set(_made()))
    config.nav = _expanded(config.nav, pages, named)
    config.mdx_configs.setdefault("pymdownx.snippets", {})["base_path"] = [str(ROOT)]
    return config


def _expanded(entry: Any, pages: list[str], named: set[str]) -> Any:
    if isinstance(entry, list):
        parts = [_expanded(one, pages, named) for one in entry]
        return [one for part in parts for one in (part if isinstance(part, list) else [part])]
    if isinstance(entry, dict):
        ((title, inner),) = entry.items()
        inside = _expanded(inner, pages, named)
        return {title: inside[0] if inside == [inner] else inside} if inside else []
    found = [page for page in matching(pages, entry) if page.count("/") == entry.count("/")]
    return [page for page in found if page == entry or page not in named]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is taken from elsewhere and what is made here."""
    for uri, path in taken().items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text("utf-8")))
        images = [found[3] for found in LINK.finditer((ROOT / path).read_text("utf-8")) if found[1]]
        for image in (
            posixpath.normpath(posixpath.join(posixpath.dirname(path), one)) for one in images
        ):
            if not image.startswith("docs/") and files.get_file_from_path(image) is None:
                files.append(File.generated(config, image, abs_src_path=str(ROOT / image)))
    for uri, content in _made().items():
        files.append(File.generated(config, uri, content=content))
    return files


def _made() -> dict[str, str]:
    return {**_examples(), **_reference(), **_notebooks()}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """GitHub's Markdown, as the files of the repository have it, in the words of mkdocs."""
    uri = page.file.src_uri
    origin = taken().get(uri, f"docs/{uri}")
    text, at = [], 0
    for fence in FENCE.finditer(markdown):
        text += [_prose(markdown[at : fence.start()], origin, uri, files), fence[0]]
        at = fence.end()
    return "".join([*text, _prose(markdown[at:], origin, uri, files)])


def _prose(text: str, origin: str, uri: str, files: Files) -> str:
    text = re.sub(r"^<!--.*?-->\n", "\n", text, flags=re.M | re.S)  # marks for tests and scripts
    text = re.sub(r"<!-- (?:findings:|as in) [^>]*-->", "", text)  # and those behind a number
    text = re.sub(r"`[^`\n]*\\\|[^`\n]*`", lambda code: code[0].replace(r"\|", "|"), text)
    return LINK.sub(lambda link: _link(link, origin, uri, files), text)


def _link(link: re.Match[str], origin: str, uri: str, files: Files) -> str:
    """A link between files of the repository as one between pages; text alone where the site has no
    such page.
    """
    mark, label, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path or re.match(r"\w+:", path):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    pages = {there: here for here, there in taken().items()} | {"examples": "examples/index.md"}
    found = pages.get(path, path.removeprefix("docs/"))
    if path.startswith("examples/") and path.endswith(".py"):
        found = path.removesuffix(".py") + ".md"
    if files.get_file_from_path(found) is None:
        if path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]  # for mkdocs to complain about
        return label
    path = posixpath.relpath(found, posixpath.dirname(uri) or ".")
    place = f"#{anchor}" if anchor else ""
    return f"{mark}[{label}]({path}{place})"


def _examples() -> dict[str, str]:
    """A page for each script of examples/, which shows the script itself."""
    pages, rows = {}, []
    for path in sorted((ROOT / "examples").glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        kind = path.stem.removeprefix("add_a_").replace("_", " ")
        added = f"Add {'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        title = added if path.stem.startswith("add_a_") else kind.capitalize()
        script = f'```python title="examples/{path.name}"\n--8<-- "examples/{path.name}"\n```'
        ending = f"`python examples/{path.name}` runs it; the tests do so too."
        pages[f"examples/{path.stem}.md"] = f"# {title}\n\n{about}\n\n{script}\n\n{ending}\n"
        rows.append(f"- [{title}]({path.stem}.md): {_first(about)}")
    how = (
        "What you can add to sinklab is one file each, and each of these files has at most 40 "
        "lines."
    )
    pages["examples/index.md"] = "\n".join(["# Examples", "", how, "", *rows, ""])
    return pages


def _reference() -> dict[str, str]:
    """A page for each public package, with every public name."""
    (first, offered), *rooms = public_names().items()
    home = {path: room.removeprefix("sinklab.") for room, names in rooms for path in names.values()}
    pages, rows = {}, []
    for room, names in rooms:
        file, about = f"{room.removeprefix('sinklab.')}.md", _docstring(room)
        rows.append(f"- [`{room}`]({file}): {_first(about)}")
        parts = [f"[](){{#{room}.{name}}}\n\n::: {path}\n" for name, path in sorted(names.items())]
        pages[f"reference/{file}"] = "\n".join([f"# {room}", "", about, "", *parts])
    short = [
        f"- [](){{#{first}.{name}}}[`{first}.{name}`]({home[path]}.md#{path})"
        for name, path in sorted(offered.items())
    ]
    head = "Every public name: what `import sinklab` offers, and the packages behind it."
    pages["reference/index.md"] = "\n".join(
        ["# Reference", "", head, "", *short, "", "## Packages", "", *rows, ""]
    )
    return pages


def _docstring(room: str) -> str:
    """That of a package or module."""
    path = SOURCE.parent / room.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""


def _first(text: str) -> str:
    """Its first paragraph, on one line."""
    return " ".join(text.partition("\n\n")[0].split())


def _notebooks() -> dict[str, str]:
    """A page for each notebook, with the outputs that it was committed with."""
    pages = {}
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        parts = [part for cell in cells for part in _cell(cell)]
        title = parts[0].partition("\n")
        download = f"[Download this notebook]({path.name})"
        pages[f"notebooks/{path.stem}.md"] = "\n\n".join(
            [title[0], download, title[2], *parts[1:], ""]
        )
    return pages


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] != "code":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join(data["image/png"]).replace("\n", "")
            yield f"![](data:image/png;base64,{picture})"
        elif "text/markdown" in data:
            yield re.sub(r"^#+ (.*)", r"**\1**", "".join(data["text/markdown"]), flags=re.M)
        elif "text/html" in data:
            yield re.sub(
                r'<table border="1" class="dataframe">', "<table>", "".join(data["text/html"])
            )
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield f"```{{.text .output}}\n{text}\n```"


class Docstrings(griffe.Extension):
    """Roles of reStructuredText as links, and the docstring of a function for what
    `functools.wraps` it.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Over every object of the package, once."""
        self._places = {
            f"{room}.{name}": path
            for room, names in public_names().items()
            for name, path in names.items()
        }
        for module in self._within(pkg):
            if module.docstring:
                module.docstring.value = ROLE.sub(self._reference, module.docstring.value)
            elif isinstance(module, griffe.Function):
                self._take_over(pkg, module)

    def _within(self, thing: Any) -> Iterator[Any]:
        yield thing
        for member in list(thing.members.values()):
            if not member.is_alias:
                yield from self._within(member)

    def _reference(self, role: re.Match[str]) -> str:
        path, short = self._places.get(role[1], role[1]), role[1].rpartition(".")[2]
        if path == role[1] and "." not in path:
            path = next(
                (full for full in self._places.values() if full.endswith(f".{short}")), path
            )
        return f'<autoref identifier="{path}" optional><code>{short}</code></autoref>'

    def _take_over(self, pkg: griffe.Module, function: griffe.Function) -> None:
        for decorator in function.decorators:
            if found := re.fullmatch(r"wraps\((\w+)\.(\w+)\)", str(decorator.value)):
                wrapped = pkg[
                    f"{function.module[found[1]].target_path.removeprefix('sinklab.')}.{found[2]}"
                ]
                function.docstring, function.parameters = wrapped.docstring, wrapped.parameters
