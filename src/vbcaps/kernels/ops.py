"""PyTorch operators that take and return NamedTuples.

``torch.library`` handles only flat lists of tensors and numbers. ``Op`` turns a function of NamedTuples into such an
operator, so that every argument has a name.
"""

import functools
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

In = TypeVar("In")
Out = TypeVar("Out")
Args = ParamSpec("Args")
Result = TypeVar("Result")
PLAIN = (Tensor, torch.nn.Parameter)  # what runs as it is; other kinds of tensor know what to do with an operator
SCHEMA = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", float: "float", bool: "bool", str: "str"}


def on_its_device(op: Callable[Args, Result]) -> Callable[Args, Result]:
    """Make the device of an operator's first tensor the current one, because Triton launches kernels there."""

    @functools.wraps(op)
    def on_device(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return op(*args, **kwargs)

    return on_device


class Op(Generic[In, Out]):
    """A torch.library operator that takes one (possibly nested) NamedTuple and returns a NamedTuple of tensors.

    Args:
        name: the operator's name, such as ``"vbcaps::vb_route"``.
        inputs, outputs: the two NamedTuple types.
        run: the function.
        shapes: the same function for tensors without storage: it allocates the outputs and computes nothing.
    """

    def __init__(
        self,
        name: str,
        inputs: type[In],
        outputs: type[Out],
        run: Callable[[In], Out],
        shapes: Callable[[In], Out],
    ):
        self.name, self.inputs, self.outputs, self.run = name.split("::")[1], inputs, outputs, run
        self.recorded: Callable[..., tuple[Any, ...]] | None = None
        taken = ", ".join(f"{SCHEMA[kind]} {field}" for field, kind in fields(inputs))
        given = ", ".join("Tensor" for _ in fields(outputs))

        @on_its_device
        def flat(*values: Any) -> tuple[Any, ...]:
            return flatten(run(unflatten(inputs, iter(values))))

        def flat_shapes(*values: Any) -> tuple[Any, ...]:
            return flatten(shapes(unflatten(inputs, iter(values))))

        self.operator = torch.library.custom_op(name, flat, mutates_args=(), schema=f"({taken}) -> ({given})")
        self.operator.register_fake(flat_shapes)

    def __call__(self, inputs: In) -> Out:
        values = flatten(inputs)
        if traced() or self.recorded is None or any(isinstance(x, Tensor) and type(x) not in PLAIN for x in values):
            return self.outputs(*self.operator(*values))
        return self.outputs(*self.recorded(*values)) if torch.is_grad_enabled() else self._run(inputs)

    def _run(self, inputs: In) -> Out:
        first: Any = inputs
        while isinstance(first, tuple):
            first = first[0]
        with torch.cuda.device_of(first):
            return self.run(inputs)

    def differentiate(
        self,
        keep: Callable[[In, Out], Any],
        back: Callable[[Any, Any, dict[str, bool]], dict[str, Tensor | None]],
    ) -> None:
        """Register the operator's gradient.

        Args:
            keep: maps inputs and outputs to the NamedTuple that the backward pass needs.
            back: maps this NamedTuple, the outputs' gradients (None where there is none) and a flag for each input
                that needs a gradient to the inputs' gradients; flags and gradients have the keys of ``names``.
        """
        every = names(self.inputs)

        def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
            kept = keep(unflatten(self.inputs, iter(inputs)), self.outputs(*output))
            values = flatten(kept)
            ctx.set_materialize_grads(False)
            ctx.kind, ctx.others = type(kept), [None if isinstance(x, Tensor) else x for x in values]
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in values))

        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
            kept = unflatten(ctx.kind, iter([x if other is None else other for x, other in pairs]))
            given = self.outputs(*(None if g is None else g.contiguous() for g in grads))
            made = back(kept, given, dict(zip(every, ctx.needs_input_grad, strict=True)))
            return tuple(made.get(name) for name in every)

        self._record(backward, setup)

    def refuse_to_differentiate(self) -> None:
        """Make a second derivative raise an error that says so."""

        def refuse(ctx: Any, *grads: Tensor | None) -> None:
            raise RuntimeError(
                "fused routing can be differentiated only once; use backend='reference' for second derivatives"
            )

        self._record(refuse, lambda ctx, inputs, output: None)

    def _record(self, backward: Callable[..., Any], setup: Callable[[Any, tuple, tuple], None]) -> None:
        """Register a gradient with PyTorch's dispatcher, and as a function of autograd, which is called faster."""
        self.operator.register_autograd(backward, setup_context=setup)

        def forward(ctx: Any, *values: Any) -> tuple[Any, ...]:
            output = flatten(self._run(unflatten(self.inputs, iter(values))))
            setup(ctx, values, output)
            return output

        functions = dict(forward=staticmethod(forward), backward=staticmethod(backward))
        kind: Any = torch.autograd.function.FunctionMeta(self.name, (torch.autograd.Function,), functions)
        self.recorded = kind.apply


def traced() -> bool:
    """Return whether something watches the operators that are called: a compiler, a tracer or a dispatch mode."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or _len_torch_dispatch_stack() > 0


def fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the name and type of each value in a NamedTuple type; nested values are named ``outer_inner``."""
    found: list[tuple[str, Any]] = []
    for field, inner in typing.get_type_hints(kind).items():
        found += [(f"{field}_{name}", one) for name, one in fields(inner)] if is_named(inner) else [(field, inner)]
    return tuple(found)


def is_named(kind: Any) -> bool:
    """Return whether ``kind`` is a NamedTuple type."""
    return isinstance(kind, type) and issubclass(kind, tuple)


def names(kind: Any) -> tuple[str, ...]:
    """Return the names that ``fields`` gives."""
    return tuple(name for name, _ in fields(kind))


def flatten(value: Any) -> tuple[Any, ...]:
    """Return the values in a (possibly nested) NamedTuple, in order."""
    flat: list[Any] = []
    for one in value:
        flat.extend(flatten(one) if isinstance(one, tuple) else [one])
    return tuple(flat)


_NESTED: dict[Any, tuple[Any, ...]] = {}


def _nested(kind: Any) -> tuple[Any, ...]:
    """Return, for each field of a NamedTuple type, its type if that is one, too, and None otherwise.

    Asking Python for the types takes long, so the answers are kept.
    """
    if kind not in _NESTED:
        inner = typing.get_type_hints(kind).values()
        _NESTED[kind] = tuple(one if is_named(one) else None for one in inner)
    return _NESTED[kind]


def unflatten(kind: type[Out], values: Iterator[Any]) -> Out:
    """Return the NamedTuple that ``flatten`` flattened to ``values``."""
    return kind(*[next(values) if inner is None else unflatten(inner, values) for inner in _nested(kind)])
