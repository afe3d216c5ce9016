"""Signatures of models that a person can read, in tooltips and ``help()``."""

from __future__ import annotations

import inspect
from types import GenericAlias, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def readable(model: type[Model]) -> type[Model]:
    """Give a model a signature with the types alone: pydantic's shows each validator by its address."""
    made = inspect.signature(model)
    parameters = [each.replace(annotation=_plain(each.annotation)) for each in made.parameters.values()]
    model.__signature__ = made.replace(parameters=parameters)
    return model


def _plain(annotation: Any) -> Any:
    """Return an annotation without the metadata of ``Annotated``, at any depth."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain(inner[0])
    if origin in {Union, UnionType}:
        return Union[tuple(_plain(each) for each in inner)]  # noqa: UP007 - of types that are known at run time only
    if isinstance(annotation, GenericAlias):
        return GenericAlias(origin, tuple(_plain(each) for each in inner))
    return annotation
