"""Base of the request structs: kinds of fields, bounds, and parsing of a body."""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from cairn.errors import BadRequest
from cairn.server.protocol.explain import BadField, explained

MAX_TOKENS = 2**31 - 1
"""Upper bound of token counts in requests. The engine caps them at the model's context."""

GZIP = b"\x1f\x8b"
LARGEST_WHOLE = 2**63
"""Floats from this magnitude on are not converted to integers."""

T = TypeVar("T")

Refusable = Any
"""Type of a field that is refused, whatever its value."""
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


def refused(reason: str, but: Any = None) -> Meta:
    """Mark a known field that is not supported: a value other than null or `but` is an error.

    Args:
        reason: why it is not supported; part of the error.
        but: the value with which clients switch the feature off.
    """
    return Meta(
        description=f"Not served: {reason}.",
        extra={"refused": reason, "but": but},
        extra_json_schema={"type": "null"} if but is None else {"enum": [None, but]},
    )


def no_effect(why: str) -> Meta:
    """Mark a field that is accepted and has no effect on the output; `why` is documentation."""
    return Meta(description=f"Accepted, without effect: {why}.", extra={"no_effect": why})


def marked(struct: type[Struct], mark: str) -> dict[str, Any]:
    """The fields of a struct with a mark ("refused", "but" or "no_effect") -> the mark's value."""
    found = {}
    for field in msgspec.structs.fields(struct):
        kind = msgspec.inspect.type_info(field.type)
        extra = kind.extra if isinstance(kind, msgspec.inspect.Metadata) else None
        if extra and mark in extra:
            found[field.encode_name] = extra[mark]
    return found


class Fields(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Base of request structs. Unknown fields and fields marked `refused` raise BadField."""

    def __post_init__(self) -> None:
        for name, (reason, but) in _refusals(type(self)).items():
            value = getattr(self, name)
            # False == 0 in Python, so compare the types too.
            asks = isinstance(value, bool) != isinstance(but, bool) or value != but
            if value is not None and asks:
                raise BadField(name, f"{name} is not served: {reason}", "Leave it out")

    @classmethod
    def check_body(cls, body: bytes) -> None:
        """Raise BadField for an invalid body that was decoded without an error."""


class ConversationPart(Fields, forbid_unknown_fields=False):
    """Base of the parts of a conversation. Unknown fields are ignored, because client programs
    store fields of their own there."""


def read(body: bytes, kind: type[T]) -> T:
    """Parse a request body.

    Raises:
        BadRequest: invalid JSON, a wrong type, a value out of bounds, or an unknown or unsupported
            field; `param` names the field.
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
    # Clients in languages without an integer type send 5 as 5.0.
    return msgspec.json.decode(msgspec.json.encode(_whole(msgspec.json.decode(body))), type=kind)


def _whole(value: Any) -> Any:
    """Replace floats without a fraction by integers in decoded JSON."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_WHOLE:
        return int(value)
    return value


def _plain(body: bytes) -> Any:
    """The decoded body for an error message; None if it is not valid JSON."""
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
        # The offset that msgspec reports is relative to the string, not to the body.
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
