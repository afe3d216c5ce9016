"""Our header files as data: what they declare, and what cffi makes of it."""

from __future__ import annotations

import copy
import re
import runpy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cffi
from pycparser import c_ast, c_generator, c_parser  # type: ignore[import-untyped]

from . import REPOSITORY, CannotCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# The package's own reader, without importing the package: the gate judges headers that need not be built yet.
cdef_source: Callable[..., str] = runpy.run_path(str(REPOSITORY / "native/declare.py"))["cdef_source"]

# Names that a C compiler takes from <stddef.h> and <stdint.h>. pycparser only has to know that they are types.
_STANDARD_TYPES = ("size_t", "intptr_t", "uintptr_t", *(f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)))
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEFINE = re.compile(r"[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\S")

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True)
class Tags:
    """Tags in the comments beside a declaration."""

    since: Version | None = None  # @since X.Y: older vendor headers may lack it
    prefix: bool = False  # @prefix: the vendor's struct may be longer
    hidden: bool = False  # @internal, @noheader: the vendor ships no header that declares it
    internal: bool = False  # @internal: but there is one, in the toolkit's internal includes and in the open sources

    @classmethod
    def of(cls, comment: str) -> Tags:
        since = re.search(r"@since\s+(\d+(?:\.\d+)*)", comment)
        return cls(
            since=parse_version(since[1]) if since else None,
            prefix="@prefix" in comment,
            hidden="@internal" in comment or "@noheader" in comment,
            internal="@internal" in comment,
        )


@dataclass(frozen=True)
class Declaration:
    name: str
    tags: Tags

    @property
    def alias(self) -> str:
        """The name under which the generated unit repeats this declaration's type."""
        return "ours_" + self.name.replace(".", "_")


@dataclass(frozen=True)
class Function(Declaration):
    typedef: str  # `typedef <its type> <alias>;`
    prototype: str  # as declared
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Alias(Declaration):
    typedef: str


@dataclass(frozen=True)
class Enum(Declaration):
    size: int


@dataclass(frozen=True)
class Constant(Declaration):
    """An enumerator or a ``#define``."""

    value: int


@dataclass(frozen=True)
class Struct(Declaration):
    size: int


@dataclass(frozen=True)
class Field(Declaration):
    """``name`` is ``struct.member``."""

    struct: str
    member: str
    typedef: str
    offset: int
    size: int


def read_declarations(*paths: Path) -> list[Declaration]:
    """Return everything that the header files declare; included files come before those that include them."""
    source = cdef_source(*paths)
    ffi = cffi.FFI()
    try:
        ffi.cdef(source)
    except (cffi.CDefError, cffi.FFIError) as error:
        raise CannotCheck("cffi cannot read the headers: " + " ".join(str(error).split())) from None
    return list(_Reader(source, ffi).declarations())


class _Reader:
    """Pairs each statement of the source with its syntax tree, its comments and cffi's numbers."""

    def __init__(self, source: str, ffi: cffi.FFI) -> None:
        self._ffi = ffi
        self._constants: Any = ffi.dlopen(None)  # cffi's values of enumerators and #defines
        self._lines = source.splitlines()
        code = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), source).splitlines()
        self._defines = {number: found[1] for number, line in enumerate(code) if (found := _DEFINE.match(line))}
        self._code = ["" if number in self._defines else line for number, line in enumerate(code)]

    def declarations(self) -> Iterator[Declaration]:
        spans, nodes = list(self._spans()), self._nodes()
        if len(spans) != len(nodes):
            raise CannotCheck(f"{len(spans)} statements make {len(nodes)} declarations: write one in each statement")
        for (first, last), node in zip(spans, nodes, strict=True):
            yield from self._declare(node, self._tags(first, last))
        for number, name in self._defines.items():
            yield Constant(name, self._tags(number, number), self._value(name))

    def _nodes(self) -> list[Any]:
        known = [f"typedef int {name};" for name in _STANDARD_TYPES]
        tree = c_parser.CParser().parse("\n".join(known + self._code))
        return list(tree.ext[len(known) :])

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Return the first and last line of each statement."""
        depth, first = 0, None
        for number, line in enumerate(self._code):
            for character in line:
                if first is None and not character.isspace():
                    first = number
                depth += (character == "{") - (character == "}")
                if character == ";" and depth == 0 and first is not None:
                    yield first, number
                    first = None

    def _tags(self, first: int, last: int) -> Tags:
        return Tags.of(" ".join(_COMMENT.findall("\n".join(self._lines[first : last + 1]))))

    def _value(self, name: str) -> int:
        return int(getattr(self._constants, name))

    def _declare(self, node: Any, tags: Tags) -> Iterator[Declaration]:
        inner = node.type.type if isinstance(node, c_ast.Typedef) else None
        if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
            yield _function(node, tags)
        elif isinstance(inner, c_ast.Enum) and inner.values:
            yield Enum(node.name, tags, self._ffi.sizeof(node.name))
            for member in inner.values.enumerators:
                yield Constant(member.name, tags, self._value(member.name))
        elif isinstance(inner, c_ast.Struct) and inner.decls:
            yield Struct(node.name, tags, self._ffi.sizeof(node.name))
            for member in inner.decls:
                yield self._field(node.name, member, tags)
        elif isinstance(node, c_ast.Typedef) and not isinstance(inner, c_ast.Struct | c_ast.Union | c_ast.Enum):
            yield Alias(node.name, tags, _typedef(node.type, Declaration(node.name, tags).alias))
        else:
            raise CannotCheck(f"no check is written for this kind of declaration: {_c(node)}")

    def _field(self, struct: str, member: Any, tags: Tags) -> Field:
        name = f"{struct}.{member.name}"
        layout = dict(self._ffi.typeof(struct).fields or ())[member.name]
        return Field(
            name=name,
            tags=tags,
            struct=struct,
            member=member.name,
            typedef=_typedef(member.type, Declaration(name, tags).alias),
            offset=layout.offset,
            size=self._ffi.sizeof(layout.type),
        )


def _function(node: Any, tags: Tags) -> Function:
    given = node.type.args.params if node.type.args else []
    names = tuple(parameter.name for parameter in given if isinstance(parameter, c_ast.Decl) and parameter.name)
    return Function(node.name, tags, _typedef(node.type, Declaration(node.name, tags).alias), _c(node), names)


def _typedef(type_node: Any, name: str) -> str:
    """Return the ``typedef`` of a type. Names of other types stay as our header spells them."""
    renamed = copy.deepcopy(type_node)
    innermost = renamed
    while not isinstance(innermost, c_ast.TypeDecl):
        innermost = innermost.type
    innermost.declname = name
    return _c(c_ast.Typedef(name, [], ["typedef"], renamed)) + ";"


def _c(node: Any) -> str:
    return " ".join(str(c_generator.CGenerator().visit(node)).split())
