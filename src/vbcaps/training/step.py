"""A training step. On CUDA it is captured once as a graph and then replayed, without Python or single launches."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3  # calls before a capture, as PyTorch advises, so that allocators, autotuning and compilation settle


class Graph:
    """A function ``graph()`` that does ``work()``; on CUDA the first call captures it, and later calls replay it.

    Arguments:
        work: takes and returns nothing. It reads and writes tensors at fixed addresses, and never waits for the device.
        state: returns every tensor that ``work`` changes. Capturing runs ``work`` a few times first; then these tensors
            are restored, and tensors created meanwhile (by an optimiser at its first step) are set to zero.
        stream: graphs that run at the same time need one stream each, because libraries keep memory for each stream.
        capture: False to run ``work`` without capture on CUDA, too.
    """

    def __init__(
        self,
        work: Callable[[], None],
        state: Callable[[], Iterable[Tensor]],
        device: torch.device,
        stream: "torch.cuda.Stream | None" = None,
        capture: bool = True,
    ):
        self.work, self.state, self.device, self.stream = work, state, device, stream
        self.replay = None if capture and device.type == "cuda" else work

    def __call__(self) -> None:
        if self.replay is None:
            self.replay = self.capture()
        self.replay()

    def capture(self) -> Callable[[], None]:
        before = {tensor.data_ptr(): tensor.clone() for tensor in self.state()}
        random = torch.cuda.get_rng_state(self.device)
        stream = self.stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            with warnings.catch_warnings():  # an optimiser made for capture warns when it runs without
                warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
                for _ in range(WARM_UP):
                    self.work()
            with torch.no_grad():
                for tensor in self.state():
                    if tensor.data_ptr() in before:
                        tensor.copy_(before[tensor.data_ptr()])
                    else:
                        tensor.zero_()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.set_rng_state(random, self.device)
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(graph, stream=stream):
            self.work()
        return graph.replay


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not again until the end: freeing the graph of an earlier run breaks a capture."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class TrainStep:
    """A function ``step(x, y)`` that augments, trains the network by one step and returns the loss.

    On CUDA the whole step, random numbers included, is one graph for each shape of input; the loss it returns is
    overwritten by the next call. The captured optimiser reads its learning rate from a tensor: change it with
    ``set_lr``. Capturing leaves network, optimiser and random state as they were.

    Arguments:
        net: any module; ``loss(output, y)`` turns its output into a scalar.
        optimiser: an optimiser of the net's parameters that need not wait for the CPU; on CUDA it is made
            ``capturable`` (or, for SGD, ``fused``).
        augment: a function of ``x`` alone, on the device of ``x``.
        capture: False for an ordinary step on CUDA, too.
    """

    def __init__(
        self,
        net: nn.Module,
        optimiser: torch.optim.Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        augment: Callable[[Tensor], Tensor] | None = None,
        capture: bool = True,
    ):
        self.net, self.optimiser, self.loss, self.augment = net, optimiser, loss, augment
        self.device = next(net.parameters()).device
        self.capture = capture and self.device.type == "cuda"
        self.graphs: dict[tuple, tuple[Graph, Tensor, Tensor, Tensor]] = {}
        if self.capture:
            for group in optimiser.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.device)
                if "capturable" in group:
                    group["capturable"] = True
                elif "fused" in group:  # SGD: its other forms read the learning rate on the CPU
                    group["fused"], group["foreach"] = True, False

    def set_lr(self, lr: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.capture:
            return self.step(x, y)
        key = (x.shape, x.dtype, y.shape, y.dtype, self.net.training)
        if key not in self.graphs:
            self.graphs[key] = self.graph_of(x, y)
        graph, x0, y0, loss = self.graphs[key]
        x0.copy_(x)
        y0.copy_(y)
        graph()
        return loss

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.augment is not None:
            x = self.augment(x)
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.loss(self.net(x), y)
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def graph_of(self, x: Tensor, y: Tensor) -> tuple[Graph, Tensor, Tensor, Tensor]:
        x, y, loss = x.clone(), y.clone(), next(self.net.parameters()).new_zeros(())

        def work() -> None:
            loss.copy_(self.step(x, y))

        return Graph(work, self.state, self.device), x, y, loss

    def state(self) -> Iterator[Tensor]:
        """Return every tensor that a step changes."""
        yield from (p.detach() for p in self.net.parameters())
        yield from self.net.buffers()
        for of_parameter in self.optimiser.state.values():
            yield from (value for value in of_parameter.values() if isinstance(value, Tensor))
