"""A training step, on CUDA captured once as a graph and then replayed: no Python, no launches, no gaps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3  # what PyTorch advises before a capture: allocators, autotuning and compilation settle


class TrainStep:
    """``step(x, y)``: augment, forward, loss, backward, update; returns the loss.

    On CUDA the whole step, random numbers included, is one graph for each shape of input; the loss it returns is
    overwritten by the next call. The captured optimiser reads its learning rate from a tensor: change it with
    ``set_lr``. Capturing leaves network, optimiser and random state as they were.

    Arguments:
        net: any module; its output goes to ``loss(output, y)``, which gives a scalar.
        optimiser: of the net's parameters; on CUDA it is made ``capturable``, so not one that must wait for the CPU.
        augment: a function of ``x`` alone, on its device.
        capture: False for an ordinary step on CUDA too.
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
        device = next(net.parameters()).device
        self.capture = capture and device.type == "cuda"
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        if self.capture:
            for group in optimiser.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
                if "capturable" in group:
                    group["capturable"] = True

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
            self.graphs[key] = self.captured(x, y)
        graph, x0, y0, loss = self.graphs[key]
        x0.copy_(x)
        y0.copy_(y)
        graph.replay()
        return loss

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.augment is not None:
            x = self.augment(x)
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.loss(self.net(x), y)
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def captured(self, x: Tensor, y: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        x, y = x.clone(), y.clone()
        before = {tensor.data_ptr(): tensor.clone() for tensor in self.state()}
        random = torch.cuda.get_rng_state(x.device)
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step(x, y)
            for tensor in self.state():
                if tensor.data_ptr() in before:
                    tensor.copy_(before[tensor.data_ptr()])
                else:  # the optimiser made it just now: before its first step it is zero
                    tensor.zero_()
        torch.cuda.current_stream(x.device).wait_stream(stream)
        torch.cuda.set_rng_state(random, x.device)
        graph = torch.cuda.CUDAGraph()
        self.optimiser.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = self.step(x, y)
        return graph, x, y, loss

    @torch.no_grad()
    def state(self) -> Iterator[Tensor]:
        """Every tensor that a step changes."""
        yield from (p.detach() for p in self.net.parameters())
        yield from self.net.buffers()
        for of_parameter in self.optimiser.state.values():
            yield from (value for value in of_parameter.values() if isinstance(value, Tensor))
