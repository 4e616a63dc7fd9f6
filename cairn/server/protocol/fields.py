"""What all request structs share: the three kinds of fields, bounds, and reading a body."""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from cairn.errors import BadRequest
from cairn.server.protocol.explain import BadField, explained

MAX_TOKENS = 2**31 - 1
"""Largest count of tokens that a field takes; the engine caps it at the model's context."""

GZIP = b"\x1f\x8b"
LARGEST_WHOLE = 2**63
"""Floats beyond it are no integers that a field takes."""

T = TypeVar("T")

Refusable = Any
"""Type of a field that is refused for every value."""
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


def refused(reason: str, but: Any = None) -> Meta:
    """Marks a known field that is not served: any value but null is an error that says why. So is
    none that asks for nothing, as clients write it (`but`)."""
    return Meta(
        description=f"Not served: {reason}.",
        extra={"refused": reason, "but": but},
        extra_json_schema={"type": "null"} if but is None else {"enum": [None, but]},
    )


def no_effect(why: str) -> Meta:
    """Marks a field that is accepted and cannot change the answer."""
    return Meta(description=f"Accepted, without effect: {why}.", extra={"no_effect": why})


def marked(struct: type[Struct], mark: str) -> dict[str, Any]:
    """Fields of a struct with the given mark ("refused" or "no_effect") and their reasons."""
    found = {}
    for field in msgspec.structs.fields(struct):
        kind = msgspec.inspect.type_info(field.type)
        extra = kind.extra if isinstance(kind, msgspec.inspect.Metadata) else None
        if extra and mark in extra:
            found[field.encode_name] = extra[mark]
    return found


class Fields(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A part of a request body. Unknown fields and fields marked `refused` raise an error."""

    def __post_init__(self) -> None:
        for name, (reason, but) in _refusals(type(self)).items():
            value = getattr(self, name)
            # bool is a subclass of int in Python
            asks = isinstance(value, bool) != isinstance(but, bool) or value != but
            if value is not None and asks:
                raise BadField(name, f"{name} is not served: {reason}", "Leave it out")

    @classmethod
    def check_body(cls, body: bytes) -> None:
        """Raise BadField for what is wrong with a body although it could be read."""


class History(Fields, forbid_unknown_fields=False):
    """A part of a conversation. The programs that keep it write fields of their own into it:
    unknown ones are left out."""


def read(body: bytes, kind: type[T]) -> T:
    """A request body as its struct.

    Raises:
        BadRequest: no valid JSON, a wrong type, a value out of bounds, an unknown field or one
            that is not served; `param` names the field.
    """
    try:
        value = _decoded(body, kind)
        if issubclass(kind, Fields):
            kind.check_body(body)
        return value
    except msgspec.ValidationError as error:
        raise explained(error, kind, _plain(body)) from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(body, error) from error


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    # Languages without an integer type write 5 as 5.0 in JSON.
    return msgspec.json.decode(msgspec.json.encode(_whole(msgspec.json.decode(body))), type=kind)


def _whole(value: Any) -> Any:
    """Plain data with integers in place of floats without a fraction."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_WHOLE:
        return int(value)
    return value


def _plain(body: bytes) -> Any:
    """What a body says, to be shown in an error; nothing where it is not JSON further on."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _unreadable(body: bytes, error: Exception) -> BadRequest:
    if not body:
        return BadRequest("the body is empty", "Send a JSON object")
    if body.startswith(GZIP):
        return BadRequest("the body is compressed", "Send the header Content-Encoding: gzip")
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        # msgspec counts bytes from the start of the string, not of the body.
        return BadRequest(
            f"the body is not UTF-8: {wrong.reason} (0x{body[wrong.start]:02x} at byte "
            f"{wrong.start})",
            "Encode it as UTF-8",
        )
    return BadRequest(f"the body is not valid JSON: {error}")


@functools.cache
def _refusals(struct: type[Struct]) -> dict[str, tuple[str, Any]]:
    reasons, values = marked(struct, "refused"), marked(struct, "but")
    return {name: (reason, values.get(name)) for name, reason in reasons.items()}
