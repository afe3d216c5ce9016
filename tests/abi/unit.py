"""The generated C++ unit: each declaration as lines that compile only where the vendor's headers agree.

Two templates do the comparing, and their names are what g++ prints: an error about ``abi::type<A>::equals<B>`` says
that the headers have A and we declare B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import declarations as d
from .findings import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PRELUDE = """\
#include <cstddef>
#include <cstdint>
#include <type_traits>
namespace abi {
template <class A> struct type { template <class B, class = void> struct equals; template <class V> struct equals<A, V> {}; };
template <long long A> struct value { template <long long B, class = void> struct equals; template <class V> struct equals<A, V> {}; };

// Two integer types of one width and sign are one type to a caller, however they are spelled.
template <unsigned size, bool is_signed> struct integer;
template <> struct integer<1, true> { using type = int8_t; };   template <> struct integer<1, false> { using type = uint8_t; };
template <> struct integer<2, true> { using type = int16_t; };  template <> struct integer<2, false> { using type = uint16_t; };
template <> struct integer<4, true> { using type = int32_t; };  template <> struct integer<4, false> { using type = uint32_t; };
template <> struct integer<8, true> { using type = int64_t; };  template <> struct integer<8, false> { using type = uint64_t; };
template <class T> constexpr bool is_integer = std::is_integral_v<T> && !std::is_const_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>;
template <class T, class = void> struct plain { using type = T; };
template <class T> struct plain<T, std::enable_if_t<is_integer<T>>> { using type = typename integer<sizeof(T), std::is_signed_v<T>>::type; };
template <class T> struct plain<const T> { using type = const typename plain<T>::type; };
template <class T> struct plain<T *> { using type = typename plain<T>::type *; };
template <class T, std::size_t n> struct plain<T[n]> { using type = typename plain<T>::type[n]; };
template <class R, class... A> struct plain<R(A...)> { using type = typename plain<R>::type(typename plain<A>::type...); };
template <class A, class B> constexpr bool equivalent = std::is_same_v<typename plain<A>::type, typename plain<B>::type>;
}
"""  # noqa: E501  (C++, one specialization per line)


@dataclass(frozen=True)
class Line:
    text: str
    failing_means: Status
    about: str = ""


@dataclass(frozen=True)
class Unit:
    text: str
    origin: dict[int, tuple[d.Declaration, Line]]  # by line number, from 1
    end: int  # the number of a last line that no compiler accepts: silence about it means that g++ never got there


def write_unit(headers: Iterable[str], declared: Iterable[d.Declaration], *, has_internal: bool = False) -> Unit:
    text = _PRELUDE + "".join(f"#include <{header}>\n" for header in headers)
    origin: dict[int, tuple[d.Declaration, Line]] = {}
    number = text.count("\n")
    for declaration in declared:
        for line in _lines(declaration, is_hidden(declaration, has_internal=has_internal)):
            number += 1
            origin[number] = declaration, line
            text += line.text.replace("@", str(number)) + "\n"
    return Unit(text + "abi::value<0>::equals<1> the_end;\n", origin, number + 1)


def is_hidden(declaration: d.Declaration, *, has_internal: bool) -> bool:
    """Return True if no header at hand declares it."""
    return declaration.tags.hidden and not (has_internal and declaration.tags.internal)


def _lines(declaration: d.Declaration, hidden: bool) -> Iterator[Line]:
    absent = Status.HIDDEN if hidden else Status.MISSING
    yield Line(f"{_mention(declaration)};", absent)
    if hidden:
        return
    name = f"::{declaration.name}"
    match declaration:
        case d.Function():
            yield from _same_type(f"decltype({name})", declaration.typedef, declaration.alias)
        case d.Alias():
            yield from _same_type(name, declaration.typedef, declaration.alias)
        case d.Enum():
            yield _equal("is an enum", f"std::is_enum_v<{name}>", 1)
            yield _equal("size", f"sizeof({name})", declaration.size)
        case d.Constant():
            yield _equal("value", f"(long long)({declaration.name})", declaration.value)
        case d.Struct(size=size, tags=tags):
            longer_is_fine = f"(sizeof({name}) >= {size}) ? {size} : sizeof({name})"
            yield _equal("size", longer_is_fine if tags.prefix else f"sizeof({name})", size)
        case d.Field(struct=struct, member=member):
            yield _equal("offset", f"offsetof(::{struct}, {member})", declaration.offset)
            yield _equal("size", f"sizeof(::{struct}::{member})", declaration.size)
            yield from _same_type(f"decltype(::{struct}::{member})", declaration.typedef, declaration.alias)
        case _:
            raise TypeError(f"no lines are written for {declaration}")


def _mention(declaration: d.Declaration) -> str:
    match declaration:
        case d.Constant(name=name):  # unqualified: it may be a macro
            return f"constexpr auto line_@ = (long long)({name})"
        case d.Function(name=name):
            return f"using line_@ = decltype(::{name})"
        case d.Field(struct=struct, member=member):
            return f"using line_@ = decltype(::{struct}::{member})"
        case _:
            return f"using line_@ = ::{declaration.name}"


def _equal(about: str, theirs: str, ours: int) -> Line:
    return Line(f"abi::value<({theirs})>::equals<{ours}LL> line_@;", Status.DIFFERENT, about)


def _same_type(theirs: str, typedef: str, ours: str) -> Iterator[Line]:
    yield Line(typedef, Status.DIFFERENT, "type")  # our type may use names that the headers do not have
    yield Line(f"abi::type<{theirs}>::equals<{ours}> line_@;", Status.EQUIVALENT, "type")
    yield Line(f"static_assert(abi::equivalent<{theirs}, {ours}>);", Status.DIFFERENT, "type")
