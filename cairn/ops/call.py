"""The bound call of an op, which its implementations, checks, fakes and predicates receive.

Arguments are bound to the definition's signature once, by a function that is generated from the
signature, and are passed as one object with an attribute for each parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any


class Call:
    """Arguments of one call: an attribute for each parameter of the definition, with defaults
    filled in. Each op has a subclass with one slot for each parameter."""

    __slots__: tuple[str, ...] = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def astuple(self) -> tuple[Any, ...]:
        """The arguments, in the order of the definition's parameters."""
        return tuple(getattr(self, name) for name in self.__slots__)

    def asdict(self) -> dict[str, Any]:
        """Parameter name -> argument."""
        return {name: getattr(self, name) for name in self.__slots__}

    def replaced(self, **changes: Any) -> Call:
        """A copy of the call with other arguments for some parameters."""
        other = type(self)()
        for name in self.__slots__:
            setattr(other, name, changes[name] if name in changes else getattr(self, name))
        return other


def call_type(parameters: Sequence[str]) -> type[Call]:
    """The subclass of Call for an op. Raises ValueError for a parameter named like a method of
    Call."""
    taken = [name for name in parameters if hasattr(Call, name)]
    if taken:
        raise ValueError(f"parameter {taken[0]!r} has the name of a method of Call")
    return type("Call", (Call,), {"__slots__": tuple(parameters)})


def binder(name: str, signature: inspect.Signature, kind: type[Call]) -> Callable[..., Call]:
    """A function with the given signature that returns its arguments as a call.

    Slots without a parameter in the signature are None. Arguments that do not match raise the
    TypeError that Python raises for a function of this name.
    """
    # Generated assignments are 20 times as fast as inspect.Signature.bind.
    own = signature.parameters
    lines = [f"def {name}({_declared(signature)}):", "    _call = _kind()"]
    lines += [f"    _call.{slot} = {slot if slot in own else None}" for slot in kind.__slots__]
    defaults = {f"_default_{p.name}": p.default for p in own.values()}
    return _compiled(name, [*lines, "    return _call"], {"_kind": kind, **defaults})


def caller(function: Callable[..., Any], signature: inspect.Signature) -> Callable[[Call], Any]:
    """A function that calls `function`, which has this signature, with the arguments of a call."""
    given = [
        f"{p.name}=_call.{p.name}" if p.kind is p.KEYWORD_ONLY else f"_call.{p.name}"
        for p in signature.parameters.values()
    ]
    lines = ["def call(_call):", f"    return _function({', '.join(given)})"]
    return _compiled("call", lines, {"_function": function})


def expect_call_only(op: str, what: str, function: Callable[..., Any]) -> None:
    """Raise ValueError unless a function has exactly one parameter, the bound call."""
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) != 1:
        raise ValueError(f"{op}, {what}: takes {parameters}, not the bound call alone")


def _declared(signature: inspect.Signature) -> str:
    words, keyword_only = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        words.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
    return ", ".join(words)


def _compiled(name: str, lines: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    # With this file's name torch.compile traces the generated code as it does the module's.
    exec(compile("\n".join(lines), __file__, "exec"), names)
    function: Callable[..., Any] = names[name]
    return function
