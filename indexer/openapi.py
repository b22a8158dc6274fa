"""One table of endpoints, and the OpenAPI document that follows from it.

The server routes from the same table, so a path cannot exist without being described, and schemas are generated from
the structs that decode and encode the bodies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..proto.api import Problem
from ..proto.http import JSON, MSGPACK, PROBLEM_JSON, Handler, HotHandler

_SCHEMA = "#/components/schemas/{name}"


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A path or query parameter."""

    name: str
    text: str
    path: bool = False
    kind: type = str


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path."""

    method: str
    path: str
    """Path template; each `{name}` in it has a Parameter with `path`."""
    handler: Handler
    hot: HotHandler | None = None
    """The same for plain requests, without aiohttp."""
    text: str
    """What it does, in one line."""
    request: type | None = None
    """Struct of the body, if it takes one."""
    parameters: Sequence[Parameter] = ()
    status: int = 200
    """Of success."""
    response: type | str | None = None
    """Struct of a successful answer, or its media type where it is no struct; None: no content."""
    problems: Mapping[int, str] = {}
    """Errors of its own, by status, with the reason."""


def document(endpoints: Sequence[Endpoint], *, title: str, version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description of these endpoints, as JSON-compatible builtins."""
    structs = {kind for e in endpoints for kind in (e.request, e.response) if isinstance(kind, type)} | {Problem}
    ordered = sorted(structs, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_SCHEMA)
    reference = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, reference)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(endpoint: Endpoint, reference: Mapping[type, Mapping[str, Any]]) -> dict[str, Any]:
    words = [word for word in endpoint.path.replace("{", "").replace("}", "").replace(".", "/").split("/") if word]
    success: dict[str, Any] = {"description": endpoint.text}
    if isinstance(endpoint.response, str):
        success["content"] = {endpoint.response: {}}
    elif endpoint.response is not None:
        success["content"] = _bodies(reference[endpoint.response])
    problem = {PROBLEM_JSON: {"schema": reference[Problem]}}
    operation: dict[str, Any] = {
        "operationId": "_".join([endpoint.method.lower(), *words]),
        "summary": endpoint.text,
        "responses": {
            str(endpoint.status): success,
            **{
                str(status): {"description": reason, "content": problem}
                for status, reason in sorted(endpoint.problems.items())
            },
            "default": {"description": "Any other error", "content": problem},
        },
    }
    if endpoint.parameters:
        operation["parameters"] = [
            {
                "name": parameter.name,
                "in": "path" if parameter.path else "query",
                "required": parameter.path,
                "description": parameter.text,
                "schema": {"type": "integer" if parameter.kind is int else "string"},
            }
            for parameter in endpoint.parameters
        ]
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": _bodies(reference[endpoint.request])}
    return operation


def _bodies(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}
