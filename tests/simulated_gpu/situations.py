"""What one training does not come to: each a function of a device, whose results are those on CPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastreduce.distributed
from fastreduce import DistributedDataParallel, all_reduce_gradients, hooks
from fastreduce.reduction.pipeline import BucketPipeline
from tests.support.models import Boom

from .host_transports import LateOverHost, OverHost

Situation = Callable[[torch.device], list[Tensor]]


class Layers(nn.Module):
    """A bucket each. Backward may raise in front of the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x: Tensor, raises: bool = False) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(Boom.apply(layer(x), raises and i == 0))  # type: ignore[no-untyped-call]
        return x.sum()


class Streams:
    """Two side streams of a device, used in turn; of a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(device))

    def use(self, turn: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[turn % 2]) if self._streams else contextlib.nullcontext()

    def join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


def _wrap(device: torch.device, setting: str = "none", **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    if make := options.pop("gpu_transport", None):
        options["transport"] = make() if device.type == "cuda" else None
    return DistributedDataParallel(Layers().to(device), bucket_cap_mb=1e-3, compression=setting, **options)


def _inputs(device: torch.device, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 40, generator=generator).to(device)


def _grads(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.cpu().clone() for parameter in module.parameters()]


def calls_on_two_streams(setting: str, device: torch.device, alike: bool = True) -> list[Tensor]:
    """By turns for two lists of parameters, of the same shapes or of others, which share memory for wires."""
    streams, found = Streams(device), []
    models = [Layers().to(device) for _ in range(2)]
    streams.join()
    streams = Streams(device)
    for turn in range(4):
        with streams.use(turn):
            parameters = list(models[turn % 2].parameters())[0 if alike else turn % 2 :]
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, (dist.get_rank() + 1.0) * (i + turn))
            all_reduce_gradients(parameters, compression=setting)
            found += [parameter.grad.clone() for parameter in parameters]
    streams.join()
    return [each.cpu() for each in found]


def calls_in_other_orders(setting: str, device: torch.device) -> list[Tensor]:
    """Residuals move from list to list, and those of the lists that they have left are let go of."""
    streams, found = Streams(device), []
    parameters = list(Layers().to(device).parameters())
    streams.join()
    streams = Streams(device)
    for turn in range(7):
        with streams.use(turn):
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, (dist.get_rank() + 1.0) * (i + turn))
            all_reduce_gradients(parameters[turn % 3 :] + parameters[: turn % 3], compression=setting)
            found += [parameter.grad.clone() for parameter in parameters]
    streams.join()
    return [each.cpu() for each in found]


@contextlib.contextmanager
def _fails_behind(owner: type, name: str) -> Iterator[None]:
    """The first call of a function raises when all is done: what it enqueued, nobody waits for."""
    function, calls = getattr(owner, name), iter(range(1000))

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == 0:
            raise MemoryError("no memory left")
        return result

    with patch.object(owner, name, call):
        yield


def a_backward_that_raises(setting: str, how: str, options: dict[str, Any], device: torch.device) -> list[Tensor]:
    ddp, found = _wrap(device, setting, **options), []
    for step in range(5):
        ddp.zero_grad()
        if step in (2, 3):
            fails = _fails_behind(BucketPipeline, how) if how else contextlib.nullcontext()
            with fails, contextlib.suppress(ValueError, MemoryError):
                ddp(_inputs(device, step), not how).backward()
        else:
            ddp(_inputs(device, step)).backward()
            found += _grads(ddp)
    return found


def a_backward_under_another_stream(setting: str, device: torch.device) -> list[Tensor]:
    """The forward's allocates memory before it waits for the averages: where gradients were that are views now."""
    ddp, found = _wrap(device, setting, gradient_as_bucket_view=True), []
    for step in range(4):
        loss = ddp(_inputs(device, step))
        streams = Streams(device)
        with streams.use(0):
            loss.backward()
        found += [torch.zeros(40 * 40, device=device) for _ in range(3)]
        streams.join()
        found += _grads(ddp)
        ddp.zero_grad()
    return [each.cpu() for each in found]


def memory_of_a_backward(device: torch.device) -> list[Tensor]:
    """Each gradient is in memory once: in its view, but for those of a bucket that is not full yet."""
    ddp, found = _wrap(device, gradient_as_bucket_view=True), []
    taken = 4 * sum(parameter.numel() for parameter in ddp.parameters())
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(_inputs(device, step))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        loss.backward()
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) - before
            assert peak < 0.7 * taken, f"a backward took {peak / taken:.2f} times the gradients' bytes"
        found += _grads(ddp)
    return found


def buckets_laid_out_on_a_stream_of_their_own(device: torch.device) -> list[Tensor]:
    """Which does not wait where they are laid out anew elsewhere, and takes their memory anew."""
    ddp, found = _wrap(device, gradient_as_bucket_view=True), []
    for step, setting in enumerate(("int8:error_feedback", "none", "int4:error_feedback", "int8")):
        streams = Streams(device)
        with streams.use(0):
            ddp.reducer.load_state_dict(ddp.reducer.state_dict())
        streams.join()
        ddp.set_compression(setting)
        loss = ddp(_inputs(device, step))
        with streams.use(0):
            found.append(torch.zeros(40 * 40, device=device))
        streams.join()
        loss.backward()
        found += _grads(ddp)
    return [each.cpu() for each in found]


def averages_that_are_clipped_in_silence(device: torch.device) -> list[Tensor]:
    """Behind error feedback, with each backward under another stream: what its averages were is read by the next."""
    ddp, found, last = _wrap(device, "int8:error_feedback"), [], Streams(device)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(5):
        loss = ddp(_inputs(device, step))
        streams = Streams(device)
        with streams.use(0):
            loss.backward()
        with last.use(0):
            torch.zeros(40 * 40, device=device)
        streams.join()
        found += _grads(ddp)
        for parameter in ddp.parameters():
            parameter.grad.mul_(0.5)
        if step == 0:
            ddp.set_compression("int8")
        if step in (0, 3):
            optimizer.step()
        last = streams
    return found


def first_steps_that_are_skipped(setting: str, device: torch.device) -> list[Tensor]:
    """Their averages are zeroed in place, which only the device knows, and later ones are clipped in silence."""
    ddp, found = _wrap(device, setting), []
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(5):
        ddp(_inputs(device, step)).backward()
        found += _grads(ddp)
        if step > 1:
            for parameter in ddp.parameters():
                parameter.grad.mul_(0.5)
            optimizer.step()
        ddp.zero_grad(set_to_none=False)
    return found


def updates_by_hand(setting: str, device: torch.device) -> list[Tensor]:
    """No optimizer tells that averages have been applied, before they are zeroed in place."""
    ddp, found = _wrap(device, setting), []
    for step in range(5):
        ddp(_inputs(device, step)).backward()
        found += _grads(ddp)
        for parameter in ddp.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)  # its version stays
        ddp.zero_grad(set_to_none=False)
    return found


def a_wrapper_that_goes_behind_one(device: torch.device) -> list[Tensor]:
    ddp = _wrap(device, "int8")
    for raises in (False, True):
        with contextlib.suppress(ValueError):
            ddp(_inputs(device, 0), raises).backward()
    del ddp
    return [torch.zeros(50000, device=device).cpu()]


def states_in_a_backward(setting: str, device: torch.device) -> list[Tensor]:
    """Asked for by another thread, on a stream of its own, when later layers' buckets are on their way."""
    ddp, streams, found = _wrap(device, setting), Streams(device), []
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)

    def tell() -> None:
        with streams.use(0):
            state = ddp.reducer.state_dict()
            for part in (state["residuals"], state["factors"]):
                found.extend(value.cpu().clone() for value in part.values())

    def ask(_: Tensor) -> None:
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()

    ddp.module.layers[1].weight.register_hook(ask)
    for step in range(4):
        optimizer.zero_grad()
        ddp(_inputs(device, step)).backward()
        optimizer.step()
    return found + [parameter.detach().cpu() for parameter in ddp.parameters()]


def a_model_on_the_host_for_a_while(setting: str, options: dict[str, Any], device: torch.device) -> list[Tensor]:
    """With its averages in `.grad` or without; its state is asked for there."""
    ddp, found = _wrap(device, setting, **options), []
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(8):
        ddp(_inputs(device, step)).backward()
        found += _grads(ddp)
        if step % 3 == 1:
            ddp.cpu()
            found += [value.cpu().clone() for value in ddp.reducer.state_dict()["residuals"].values()]
            ddp.to(device)
        if step != 4:
            optimizer.step()
        optimizer.zero_grad(step % 2 == 0)
        if step in (2, 3):
            ddp.cpu().to(device)
    return found + [parameter.detach().cpu() for parameter in ddp.parameters()]


def a_model_moved_behind_a_backward_that_raised(options: dict[str, Any], device: torch.device) -> list[Tensor]:
    """What its gradients let go of is taken anew."""
    ddp, found = _wrap(device, "int8", **options), []
    for step in range(4):
        with contextlib.suppress(ValueError):
            ddp(_inputs(device, step), step == 1).backward()
        if step == 1:
            ddp.cpu().to(device)
            found += [torch.zeros(40 * 40, device=device).cpu() for _ in range(4)]
        else:
            found += _grads(ddp)
        ddp.zero_grad()
    return found


def a_state_loaded_while_the_model_is_on_the_host(setting: str, device: torch.device) -> list[Tensor]:
    """With averages in `.grad`, which are views of buckets that are laid out anew on the device."""
    ddp, found = _wrap(device, setting, gradient_as_bucket_view=True), []
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        ddp(_inputs(device, step)).backward()
        found += _grads(ddp)
        if step == 1:
            ddp.cpu()
            ddp.reducer.load_state_dict(ddp.reducer.state_dict())
            ddp.to(device)
            found += _grads(ddp)
        if step != 1:  # else they are accumulated on
            optimizer.step()
            optimizer.zero_grad()
    return found + [parameter.detach().cpu() for parameter in ddp.parameters()]


def layers_that_are_thawed(setting: str, options: dict[str, Any], device: torch.device) -> list[Tensor]:
    """One after the other from the last on, with averages in `.grad` or without."""
    torch.manual_seed(0)
    model = Layers()
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    ddp = DistributedDataParallel(model.to(device), bucket_cap_mb=1e-3, compression=setting, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    found = []
    for step in range(8):
        if step in (2, 3, 5):
            model.layers[{2: 2, 3: 1, 5: 0}[step]].requires_grad_(True)
        ddp(_inputs(device, step)).backward()
        found += [parameter.grad.cpu().clone() for parameter in ddp.parameters() if parameter.grad is not None]
        if step != 4:
            optimizer.step()
        if step != 2:
            optimizer.zero_grad(step % 2 == 0)
    return found + [parameter.detach().cpu() for parameter in ddp.parameters()]


def the_hook_for_torchs_class(setting: str, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    ddp = TorchDDP(Layers().to(device), bucket_cap_mb=0.01)
    ddp.register_comm_hook(hooks.CompressState(setting), hooks.compress)
    found = []
    for step in range(3):
        ddp.zero_grad()
        ddp(_inputs(device, step)).backward()
        found += _grads(ddp)
    return found


def a_hook_that_asks_the_reducer(device: torch.device) -> list[Tensor]:
    ddp, found = _wrap(device), []
    ddp.register_comm_hook(None, lambda _, bucket: ddp.reducer._run_allreduce_hook(bucket))
    for step in range(3):
        ddp.zero_grad()
        ddp(_inputs(device, step)).backward()
        found += _grads(ddp)
    return found


def a_hook_whose_future_raises(device: torch.device) -> list[Tensor]:
    ddp, found = _wrap(device), []

    def hook(state, bucket):  # torch takes no annotations that are text
        def then(future: torch.futures.Future[Any]) -> Tensor:
            if step == 1:
                raise ValueError("nobody waits for what was begun")
            return future.value()  # type: ignore[no-any-return]

        return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(then)

    ddp.register_comm_hook(None, hook)
    for step in range(4):
        ddp.zero_grad()
        with contextlib.suppress(ValueError, RuntimeError) if step == 1 else contextlib.nullcontext():
            ddp(_inputs(device, step)).backward()
        if step != 1:
            found += _grads(ddp)
    return found


def a_backward_that_raises_under_a_hook(device: torch.device) -> list[Tensor]:
    """On another stream than the wrapper was made on, with averages where the hook's all-reduce is still at work."""
    ddp, found = _wrap(device, gradient_as_bucket_view=True), []
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    streams = Streams(device)
    with streams.use(0):
        for step in range(4):
            ddp.zero_grad(step == 3)  # in place, but behind the backward that raised
            with contextlib.suppress(ValueError):
                ddp(_inputs(device, step), step == 2).backward()
            if step != 2:
                found += _grads(ddp)
    streams.join()
    return found


def optimizers_that_step_in_backward(options: dict[str, Any], device: torch.device) -> list[Tensor]:
    """On a stream of theirs, which has the average of the one parameter that no optimizer takes, too."""
    torch.manual_seed(0)
    model = Layers().to(device)
    left = model.layers[0].weight
    _apply_optimizer_in_backward(torch.optim.SGD, [p for p in model.parameters() if p is not left], {"lr": 0.1})
    ddp, found = DistributedDataParallel(model, bucket_cap_mb=1e-3, **options), []
    for step in range(3):
        left.grad = None
        ddp(_inputs(device, step)).backward()
        assert left.grad is not None
        found += [left.grad.cpu().clone(), *(parameter.detach().cpu().clone() for parameter in ddp.parameters())]
    return found


def a_gather_into_one_row(device: torch.device) -> list[Tensor]:
    """NCCL's takes tensors of any shapes; gloo's would cut the first dimension."""
    ranks = dist.get_world_size()
    if device.type == "cpu":
        return [torch.arange(1.0, ranks + 1).repeat_interleave(6).view(1, -1)]
    row = torch.empty(1, 6 * ranks, device=device)
    dist.all_gather_into_tensor(row, torch.full((1, 6), dist.get_rank() + 1.0, device=device))
    return [row.cpu()]


def a_collective_that_two_streams_wait_for(device: torch.device) -> list[Tensor]:
    streams, found = Streams(device), []
    for turn in range(3):
        with streams.use(turn):
            apart = torch.full((8, 6), dist.get_rank() + 1.0, device=device)[:, ::2]  # a copy comes back into it
            work = fastreduce.distributed.all_reduce(apart, async_op=True)
        with streams.use(turn + 1):
            work.wait()
            found.append(apart * 2)
        with streams.use(turn):
            work.wait()
            found.append(apart * 3)
        streams.join()
    return [each.cpu() for each in found]


def a_collective_whose_copy_is_let_go(device: torch.device) -> list[Tensor]:
    streams = Streams(device)
    with streams.use(0):
        apart = torch.full((8, 6), dist.get_rank() + 1.0, device=device)[:, ::2]
        work = fastreduce.distributed.all_reduce(apart, async_op=True)
    with streams.use(1):
        work.wait()
        del work
        found = [apart * 2]
    with streams.use(0):
        found.append(torch.zeros(8, 3, device=device))  # where the copy was, it may be
    streams.join()
    return [each.cpu() for each in found]


def a_barrier(device: torch.device) -> list[Tensor]:
    streams = Streams(device)
    with streams.use(0):
        x = torch.ones(50, device=device)
    fastreduce.distributed.barrier()
    with streams.use(1):
        return [(x * 2).cpu()]


SITUATIONS: dict[str, Situation] = {
    "calls on two streams": partial(calls_on_two_streams, "none"),
    "calls on two streams, fp16": partial(calls_on_two_streams, "fp16"),
    "calls on two streams, feedback": partial(calls_on_two_streams, "int8:error_feedback"),
    "calls on two streams, other shapes": partial(calls_on_two_streams, "fp16", alike=False),
    "calls on two streams, other shapes, feedback": partial(calls_on_two_streams, "int8:error_feedback", alike=False),
    "calls in other orders": partial(calls_in_other_orders, "int8:error_feedback"),
    "a backward that raises": partial(a_backward_that_raises, "none", "", {}),
    "a backward that raises, views": partial(a_backward_that_raises, "none", "", {"gradient_as_bucket_view": True}),
    "a backward that raises, feedback": partial(a_backward_that_raises, "int8:error_feedback", "", {}),
    "a bucket that fails at its end": partial(a_backward_that_raises, "int8", "_finish", {}),
    "a bucket that fails behind its compression": partial(a_backward_that_raises, "int8", "compress", {}),
    "so over the host": partial(a_backward_that_raises, "int8", "compress", {"gpu_transport": OverHost}),
    "so over the host, late": partial(a_backward_that_raises, "int8", "compress", {"gpu_transport": LateOverHost}),
    "backward elsewhere": partial(a_backward_under_another_stream, "none"),
    "backward elsewhere, feedback": partial(a_backward_under_another_stream, "int8:error_feedback"),
    "memory of a backward": memory_of_a_backward,
    "laid out elsewhere": buckets_laid_out_on_a_stream_of_their_own,
    "clipped in silence": averages_that_are_clipped_in_silence,
    "first steps that are skipped": partial(first_steps_that_are_skipped, "int8:error_feedback"),
    "updates by hand": partial(updates_by_hand, "int8:error_feedback"),
    "a wrapper that goes": a_wrapper_that_goes_behind_one,
    "states, int8": partial(states_in_a_backward, "int8:error_feedback"),
    "states, powersgd": partial(states_in_a_backward, "powersgd:rank=2"),
    "on the host": partial(a_model_on_the_host_for_a_while, "none", {}),
    "on the host, views": partial(a_model_on_the_host_for_a_while, "fp16", {"gradient_as_bucket_view": True}),
    "on the host, feedback": partial(a_model_on_the_host_for_a_while, "int8:error_feedback", {}),
    "on the host, feedback, views": partial(
        a_model_on_the_host_for_a_while, "int4:error_feedback=bf16", {"gradient_as_bucket_view": True}
    ),
    "moved behind a backward that raises": partial(a_model_moved_behind_a_backward_that_raised, {}),
    "so with views": partial(a_model_moved_behind_a_backward_that_raised, {"gradient_as_bucket_view": True}),
    "loaded on the host": partial(a_state_loaded_while_the_model_is_on_the_host, "none"),
    "loaded on the host, feedback": partial(a_state_loaded_while_the_model_is_on_the_host, "int8:error_feedback"),
    "thawed": partial(layers_that_are_thawed, "none", {}),
    "thawed, views": partial(layers_that_are_thawed, "fp16", {"gradient_as_bucket_view": True}),
    "thawed, feedback": partial(layers_that_are_thawed, "int8:error_feedback", {}),
    "thawed, random bits": partial(layers_that_are_thawed, "int4:rounding=stochastic", {}),
    "hook for torch": partial(the_hook_for_torchs_class, "fp16"),
    "hook for torch, feedback": partial(the_hook_for_torchs_class, "int8:error_feedback"),
    "hook that asks": a_hook_that_asks_the_reducer,
    "hook that fails": a_hook_whose_future_raises,
    "hook beside a backward that raises": a_backward_that_raises_under_a_hook,
    "optimizers in backward": partial(optimizers_that_step_in_backward, {}),
    "optimizers in backward, views": partial(optimizers_that_step_in_backward, {"gradient_as_bucket_view": True}),
    "a gather into one row": a_gather_into_one_row,
    "a collective": a_collective_that_two_streams_wait_for,
    "a collective's copy": a_collective_whose_copy_is_let_go,
    "a barrier": a_barrier,
}
