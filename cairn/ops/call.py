"""The bound call of an op: what its implementations, checks, fakes and predicates receive.

A definition owns its signature. Arguments are bound to it once, by a function that is generated
from it, and travel as one object with an attribute a parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any


class Call:
    """Arguments of one call, an attribute for each parameter of the definition; defaults are
    filled in. An op's subclass of it has one slot a parameter."""

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
        """The same call with other arguments for some parameters."""
        other = type(self)()
        for name in self.__slots__:
            setattr(other, name, changes[name] if name in changes else getattr(self, name))
        return other


def call_type(parameters: Sequence[str]) -> type[Call]:
    """The type of an op's calls. Raises ValueError for a parameter named like a method of Call."""
    taken = [name for name in parameters if hasattr(Call, name)]
    if taken:
        raise ValueError(f"parameter {taken[0]!r} has the name of a method of Call")
    return type("Call", (Call,), {"__slots__": tuple(parameters)})


def binder(name: str, signature: inspect.Signature, kind: type[Call]) -> Callable[..., Call]:
    """A function with a signature, which makes a call of its arguments.

    A slot that the signature has no parameter for is None. Arguments that do not fit raise the
    TypeError that the interpreter raises for a function of this name.
    """
    # Assignments of generated code bind faster than inspect.Signature.bind, by a factor of 20.
    own = signature.parameters
    lines = [f"def {name}({_declared(signature)}):", "    _call = _kind()"]
    lines += [f"    _call.{slot} = {slot if slot in own else None}" for slot in kind.__slots__]
    defaults = {f"_default_{p.name}": p.default for p in own.values()}
    return _made(name, [*lines, "    return _call"], {"_kind": kind, **defaults})


def caller(function: Callable[..., Any], signature: inspect.Signature) -> Callable[[Call], Any]:
    """A function that hands the arguments of a call on to one with this signature."""
    given = [
        f"{p.name}=_call.{p.name}" if p.kind is p.KEYWORD_ONLY else f"_call.{p.name}"
        for p in signature.parameters.values()
    ]
    lines = ["def call(_call):", f"    return _function({', '.join(given)})"]
    return _made("call", lines, {"_function": function})


def expect_call_only(op: str, what: str, function: Callable[..., Any]) -> None:
    """Raise ValueError unless a function takes a bound call and nothing else."""
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


def _made(name: str, lines: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    # torch.compile reads the bytecode; the file's name tells it that it may.
    exec(compile("\n".join(lines), __file__, "exec"), names)
    made: Callable[..., Any] = names[name]
    return made
