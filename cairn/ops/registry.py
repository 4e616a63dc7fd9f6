"""Registry of ops. An op is a definition in plain PyTorch with registered implementations.

    @op
    def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
        "SwiGLU gate ..."
        return ...

    @silu_and_mul.implementation("triton", devices=("cuda",))
    def _(call: Call) -> Tensor: ...  # call.input, call.out

    @silu_and_mul.cases  # in the family's cases.py
    def _(make: Make) -> Cases: yield make.args(make.randn(7, 192))

    @silu_and_mul.bench  # in the family's bench.py
    def _(draw: Draw) -> Points: yield Point("7 x 192", draw.args(draw.randn(7, 192)), bytes=4032)

The definition gives the signature. Implementations, checks, fakes and `when` receive one bound
call, whose attributes are the definition's parameters with defaults filled in (call.py).

A call runs the implementation that CAIRN_OPS forces, otherwise the first registered one whose
devices, dtypes and `when` accept the call, otherwise the definition ("reference"), which also runs
calls that a forced implementation refuses. `torch.ops.cairn.NAME` makes the same choice; it is what
torch.compile, fake tensors and dispatch modes see. Eager calls bypass the dispatcher.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor

from cairn.errors import BadConfig
from cairn.ops import checks, gpu
from cairn.ops.autocast import without_autocast
from cairn.ops.call import Call, binder, call_type, caller, expect_call_only
from cairn.ops.implementation import REFERENCE, Implementation
from cairn.ops.launch_cache import plans, recording
from cairn.ops.overrides import FORCED, REGISTERED_LATER, VARIABLE, parse, unknown
from cairn.ops.sync_debug import mode, run_and_synchronize

if TYPE_CHECKING:
    from cairn.ops.bench_points import Draw, Point
    from cairn.ops.testing import Arguments, Make

CaseSource: TypeAlias = "Callable[[Make], Iterable[Arguments | Tensor]]"
BenchSource: TypeAlias = "Callable[[Draw], Iterable[Point]]"
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Tolerance = tuple[float, float]

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


class Op(Generic[P, R]):
    """A public function with a definition, implementations, test cases and a torch operator.

    If the definition has a parameter `out`, an implementation may write to it and return it, or
    ignore it; then the result is copied to it here. `cairn::NAME_out` mutates `out` and returns
    nothing.
    """

    def __init__(
        self,
        definition: Callable[P, R],
        mutates: Iterable[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.name = definition.__name__
        self.reference = definition
        self.mutates = tuple(mutates)
        self.aliases = dict(aliases or {})
        self.family = definition.__module__.rpartition(".")[0].rpartition(".")[2]
        self.implementations: dict[str, Implementation] = {}
        self._package = definition.__module__.rpartition(".")[0]
        self.tolerances: dict[torch.dtype, Tolerance] = {}
        self.tolerance_reason = ""
        self.fronts: dict[str, Callable[..., Any]] = {}
        self._check: Callable[[Call], None] | None = None
        self._chosen: dict[str, tuple[list[Implementation], Implementation]] = {}
        self._plans: plans.Plans | None = None
        self._front_plans: list[plans.Plans] = []
        self.__doc__ = definition.__doc__
        self.__name__ = definition.__name__
        self.__qualname__ = definition.__qualname__
        self.__module__ = definition.__module__
        self.__wrapped__ = definition
        self.__signature__ = signature = inspect.signature(definition)
        names = list(signature.parameters)
        # If the op declares `out` in mutates, it is an argument like any other.
        optional = "out" in names and "out" not in self.mutates
        self._out = names.index("out") if optional else None
        self._kind = call_type(names)
        self.bind = binder(self.name, signature, self._kind)
        self._run_reference = self._fake = caller(definition, signature)
        self._definition = Implementation(
            REFERENCE, self._run_reference, self.bind, ("cpu", "cuda")
        )
        self._register(signature)

    def __repr__(self) -> str:
        return f"<op cairn::{self.name}>"

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in `cairn.ops`: those of its fronts, or its own."""
        return tuple(self.fronts) or (self.name,)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the chosen implementation; raises TypeError if arguments do not match the
        signature."""
        if kwargs and self.aliases:
            self._rename_aliases(kwargs)
        position = self._key
        key = args[position] if len(args) > position else kwargs.get(self._key_name)
        if plans.is_traced(key):
            return cast(R, self._traced(args, kwargs))
        if mode.enabled:
            return cast(R, run_and_synchronize(self.name, key, self._eager, args, kwargs))
        if self._plans is not None and cast(Tensor, key).is_cuda:
            return cast(R, self._plans.run(self._eager, args, kwargs))
        return cast(R, self._eager(args, kwargs))

    def _eager(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Bind and check the arguments, choose an implementation and run it."""
        try:
            call = self.bind(*args, **kwargs)
            if self._check is not None and checks.state.enabled:
                self._check(call)
            chosen = self._select(call)
            if gpu.watch.observer is not None and not chosen.replayed:
                recording.mark_not_replayable()
            run = chosen.run
            if _is_any_autocast_enabled():
                run = without_autocast(run)
            return run(call) if self._out is None else self._with_out(run, call)
        except Exception as error:
            checks.explain(error, self.reference, args, kwargs)
            raise

    def _traced(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Bind and check the arguments, then call PyTorch's dispatcher."""
        call = self._checked(args, kwargs)
        if not isinstance(getattr(call, self._key_name), Tensor):
            return self._run_reference(call)
        if self._dispatch_out is None or call.out is None:
            return self._dispatch(call)
        self._dispatch_out(call)
        return call.out

    def _checked(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        try:
            call = self.bind(*args, **kwargs)
            if self._check is not None:
                self._check(call)
        except Exception as error:
            checks.explain(error, self.reference, args, kwargs)
            raise
        return call

    def _rename_aliases(self, kwargs: dict[str, Any]) -> None:
        """Replace aliases of keywords by the definition's parameter names."""
        for other in self.aliases.keys() & kwargs.keys():
            name = self.aliases[other]
            if name in kwargs:
                raise TypeError(f"{self.name}() got both {name!r} and {other!r}, which is the same")
            kwargs[name] = kwargs.pop(other)

    def using(self, name: str) -> Callable[P, R]:
        """An implementation by name ("reference": the definition). Raises BadConfig if unknown."""
        run = self._named(name).run

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = self.bind(*args, **kwargs)
            return cast(R, run(bound) if self._out is None else self._with_out(run, bound))

        return call

    def choice(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Name of the implementation that a call with these arguments runs. Raises BadArgument as
        the call does."""
        self._rename_aliases(kwargs)
        return self._select(self._checked(args, kwargs)).name

    def accepts(self, name: str, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether the dtypes and `when` of an implementation accept these arguments."""
        return self._named(name).accepts(self.bind(*args, **kwargs))

    def candidates(self, device: str) -> tuple[Implementation, ...]:
        """Implementations for tensors on a device type, in the order in which they are tried; the
        last one accepts every call."""
        forced = FORCED.get(self.name, FORCED.get("*"))
        if forced is not None:
            implementation = self._named(forced)
            if implementation.missing:
                raise BadConfig(f"{VARIABLE} forces {self.name}={forced}: {implementation.missing}")
            if device not in implementation.devices and forced != REFERENCE:
                runs_on = ", ".join(implementation.devices)
                raise BadConfig(
                    f"{VARIABLE} forces {self.name}={forced}, which runs on {runs_on}, not {device}"
                )
            if not implementation.conditional:
                return (implementation,)
            return (implementation, self._named(REFERENCE))
        present = [i for i in self.implementations.values() if not i.missing]
        fitting = [i for i in present if device in i.devices]
        for position, implementation in enumerate(fitting):
            if not implementation.conditional:
                return tuple(fitting[: position + 1])
        return (*fitting, self._named(REFERENCE))

    def _select(self, call: Call) -> Implementation:
        device = self._key_of(call).device.type
        chosen = self._chosen.get(device)
        if chosen is None:
            *conditional, last = self.candidates(device)
            chosen = self._chosen[device] = (conditional, last)
        for implementation in chosen[0]:
            if implementation.accepts(call):
                return implementation
        return chosen[1]

    def _named(self, name: str) -> Implementation:
        if name == REFERENCE:
            return self._definition
        try:
            return self.implementations[name]
        except KeyError:
            known = [*self.implementations, REFERENCE]
            raise unknown(f"op {self.name} has no implementation {name!r}", name, known) from None

    def _with_out(self, run: Callable[[Call], Any], call: Call) -> Any:
        result, out = run(call), call.out
        if out is None or result is out:
            return result
        recording.mark_not_replayable()
        if out.shape != result.shape:
            raise ValueError(
                f"{self.name}: out has shape {tuple(out.shape)}, the result {tuple(result.shape)}"
            )
        return out.copy_(result)

    def _register(self, signature: inspect.Signature) -> None:
        if self.name in _ops:
            raise ValueError(f"op {self.name} is already defined in {_ops[self.name].__module__}")
        self._library: Any = torch.library.Library("cairn", "FRAGMENT")
        parameters = list(signature.parameters.values())
        if self._out is not None:
            del parameters[self._out]
        plain = signature.replace(parameters=parameters)
        self._bind_plain = self.bind if self._out is None else binder(self.name, plain, self._kind)
        arguments = self._define(self.name, plain, self.mutates, self._run)
        names = [a.name for a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
        if not names:
            raise TypeError(f"op {self.name} takes no tensor")
        self._key_name = names[0]
        self._key_of = operator.attrgetter(self._key_name)
        self._key = list(signature.parameters).index(self._key_name)
        self.registered = getattr(torch.ops.cairn, self.name).default
        self._dispatch = caller(self.registered, plain)
        self.registered_out: Any = None
        self._dispatch_out: Callable[[Call], Any] | None = None
        if self._out is not None:
            out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, annotation=Tensor)
            into = signature.replace(parameters=[*parameters, out], return_annotation=None)
            self._bind_out = binder(self.name, into, self._kind)
            self._define(f"{self.name}_out", into, (*self.mutates, "out"), self._run_out)
            self.registered_out = getattr(torch.ops.cairn, f"{self.name}_out").default
            self._dispatch_out = caller(self.registered_out, into)
        _ops[self.name] = self

    def _define(
        self,
        name: str,
        signature: inspect.Signature,
        mutates: Sequence[str],
        kernel: Callable[..., Any],
    ) -> list[Any]:
        """Define the operator cairn::name and return the arguments of its schema."""
        code = cast(types.FunctionType, self.reference)
        prototype = types.FunctionType(code.__code__, code.__globals__, name)
        prototype.__signature__ = signature  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(prototype, mutates_args=mutates, op_name=name)
        self._library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._library.impl(name, kernel, "CompositeExplicitAutograd")
        parsed = torch._C.parse_schema(schema)
        fake = self._run_fake if parsed.returns else _nothing
        torch.library.register_fake(f"cairn::{name}", fake, lib=self._library)
        return list(parsed.arguments)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        call = self._bind_plain(*args, **kwargs)
        return without_autocast(self._select(call).run)(call)

    def _run_out(self, *args: Any, **kwargs: Any) -> None:
        call = self._bind_out(*args, **kwargs)
        self._with_out(without_autocast(self._select(call).run), call)

    def _run_fake(self, *args: Any, **kwargs: Any) -> Any:
        return self._fake(self._bind_plain(*args, **kwargs))

    def unregister(self) -> None:
        """Remove the op from the registry and from torch.ops; for ops that tests define."""
        del _ops[self.name]
        self._library._destroy()

    def implementation(
        self,
        name: str,
        devices: Sequence[str] = ("cpu", "cuda"),
        dtypes: Sequence[torch.dtype] | None = None,
        when: Callable[[Call], bool] | None = None,
        missing: str = "",
        replayed: bool = False,
    ) -> Callable[[F], F]:
        """Decorator: register an implementation. Earlier registrations are preferred.

        The function takes the bound call and returns what the definition returns.

        Args:
            name: unique within the op, not "reference".
            devices: device types it runs on.
            dtypes: accepted dtypes of the first floating-point tensor argument; None: any.
            when: predicate of the bound call; if it is False the next candidate is tried.
            missing: why it cannot run on this machine, for `cairn ops`; empty: it can.
            replayed: on the device it only allocates memory through gpu.py and launches kernels, so
                launch_cache can replay the launches without calling it.
        Raises:
            ValueError: the name is taken, or the function has other parameters than the call.
        """

        def register(function: F) -> F:
            if name == REFERENCE or name in self.implementations:
                raise ValueError(f"op {self.name} already has an implementation {name!r}")
            expect_call_only(self.name, f"implementation {name!r}", function)
            given = name, function, self.bind, tuple(devices), dtypes and tuple(dtypes)
            self.implementations[name] = Implementation(*given, when, missing, replayed)
            if replayed:
                self._plans = plans.Plans()
            self._chosen.clear()
            return function

        return register

    def fake(self, function: F) -> F:
        """Decorator: register a fake (meta) function, which returns empty outputs.

        It is called with a bound call without `out`. Ops that return nothing and definitions that
        run under fake tensors need none.
        """
        expect_call_only(self.name, "fake", function)
        self._fake = function
        return function

    @overload
    def front(self, function: F, /) -> F: ...
    @overload
    def front(self, /, *, replayed: bool) -> Callable[[F], F]: ...
    def front(
        self, function: Callable[..., Any] | None = None, /, *, replayed: bool = False
    ) -> Callable[..., Any]:
        """Decorator: a public function that calls this op, for a signature that a torch schema
        cannot express. The op is exported only through its fronts.

        replayed: as for an implementation; the launches are those of the ops that it calls.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if not hasattr(function, "__wrapped__"):  # not yet a front of another op
                function = checks.naming(function)
            if replayed:
                self._front_plans.append(plans.Plans())
                function = self._front_plans[-1].of(function)
            self.fronts[function.__name__] = function
            return function

        return register if function is None else register(function)

    def check(self, function: Callable[[Call], None]) -> Callable[[Call], None]:
        """Decorator: the function that checks a bound call and raises BadArgument."""
        expect_call_only(self.name, "check", function)
        self._check = function
        return function

    def cases(self, source: CaseSource) -> CaseSource:
        """Decorator: the generator of arguments that every implementation is tested with."""
        self.case_source = source
        return source

    def bench(self, source: BenchSource) -> BenchSource:
        """Decorator: the generator of points that `cairn bench ops` times."""
        self.bench_source = source
        return source

    @functools.cached_property
    def case_source(self) -> CaseSource | None:
        """The generator registered with `cases`, or None; this imports the family's cases.py."""
        _import(f"{self._package}.cases")
        return self.__dict__.get("case_source")

    @functools.cached_property
    def bench_source(self) -> BenchSource | None:
        """The generator registered with `bench`, or None; this imports the family's bench.py."""
        _import(f"{self._package}.bench")
        return self.__dict__.get("bench_source")

    def tolerance(self, by_dtype: dict[torch.dtype, Tolerance], reason: str) -> None:
        """Override the tolerances of cairn.ops.testing.TOLERANCES for this op.

        Args:
            by_dtype: coarsest floating dtype of a case -> (rtol, atol) of all its outputs.
            reason: why this op needs other tolerances.
        """
        if not reason:
            raise ValueError(f"op {self.name}: a tolerance of its own needs a reason")
        self.tolerances = dict(by_dtype)
        self.tolerance_reason = reason


@overload
def op(definition: Callable[P, R], /) -> Op[P, R]: ...
@overload
def op(
    *, mutates: Sequence[str] = (), aliases: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]: ...
def op(
    definition: Callable[P, R] | None = None,
    /,
    *,
    mutates: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> Op[P, R] | Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator: make a definition an op. An op that changes arguments declares them, as in
    `@op(mutates=("k_cache",))`. `aliases` maps other keywords to parameter names.

    The definition's annotations give the schema (torch.library.infer_schema), so they must be
    Tensor, numbers, bool, str, dtype, device, lists of these or None; results may not alias
    arguments. Raises ValueError for a name that is taken or a signature without a schema.
    """
    if definition is not None:
        return Op(definition)
    return lambda function: Op(function, mutates, aliases)


_ops: dict[str, Op[..., Any]] = {}


def all_ops() -> list[Op[..., Any]]:
    """All ops imported so far, sorted by family and name."""
    return sorted(_ops.values(), key=lambda o: (o.family, o.name))


def check_forced() -> None:
    """Raise BadConfig if CAIRN_OPS names an unknown op or implementation; the error suggests the
    nearest known name."""
    for name, implementation in FORCED.items():
        if name in _ops:
            _ops[name]._named(implementation)
        elif name not in ("*", *REGISTERED_LATER):
            raise unknown(f"{VARIABLE} names no op {name!r}", name, _ops)


@contextlib.contextmanager
def force(choices: str) -> Iterator[None]:
    """Within the block, choose implementations as with CAIRN_OPS=choices, in the whole process."""
    before = dict(FORCED)
    try:
        _set_forced(parse(choices))
        check_forced()
        yield
    finally:
        _set_forced(before)


def _set_forced(forced: dict[str, str]) -> None:
    FORCED.clear()
    FORCED.update(forced)
    for entry in _ops.values():
        entry._chosen.clear()
        for own in (*entry._front_plans, *filter(None, [entry._plans])):
            own.forget()


def _import(module: str) -> None:
    """Import a module if it exists."""
    if importlib.util.find_spec(module) is not None:
        importlib.import_module(module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Fake function of an op that only mutates its arguments."""
