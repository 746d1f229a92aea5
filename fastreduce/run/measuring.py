"""A training under `fastreduce compare`, seen from its ranks: losses at the root of `backward`, seconds, turns.

The script knows nothing of it. A step ends with the backward that reduces gradients: all ranks count the same steps.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP  # its other name is ours in a run

from ..ddp import DistributedDataParallel, Shadow
from ..environment.exits import Exit, at_exit
from ..errors import SettingError
from ..reduction.reducer import GradientReducer
from ..transports import make_transport
from . import contestants, probing
from .listening import listen, loss_of
from .machine import machine
from .orders import LEFT, Orders
from .weights_from import WeightsFrom

MOST_BEGUN_AGAIN = 3  # turns without one that came to its end, where one wrapper follows another

_training: MeasuredTraining | None = None


def attach(model: Any) -> None:
    """Measure the training of this process, whose new wrapper `model` is, or `sharded.MeasuredModel`."""
    global _training
    if _training is None:
        _training = MeasuredTraining(Orders.read(), model)
    _training.add(model)


class MeasuredTraining:
    """What this rank does, and when.

    1. `add`: a wrapper begins as the first contestant.
    2. `forward`: before a forward with gradients, a turn that is due begins.
    3. `output`: where losses are taken, lets a backward tell whether it comes through the wrapper whose steps count.
    4. `after_backward`: takes the loss; where gradients were reduced, a step has ended.
    5. Rank 0 writes what all ranks have measured, after each step or turn, while nobody is timed.

    Of several wrappers the steps of the first one count, and when that is gone those of the next one that is called,
    where a turn begins again. Ranks look whether it is gone at the same forwards, behind a garbage collection.
    """

    def __init__(self, orders: Orders, model: Any) -> None:
        self._orders, self._turns = orders, orders.turns
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lead: weakref.ref[Any] | None = None  # the wrapper whose reductions are steps; gone, until we have looked
        self._called: weakref.WeakSet[Any] = weakref.WeakSet()
        self._others_called = 0  # since the lead was
        self._are_several = False
        self._lost_steps, self._begun_again = 0, 0  # of turns that began again, and how often in a row
        self._place = _open_place(orders.record, model.process_group.rank())
        self._transport = make_transport(model.process_group, "cpu")
        self._cuda = model.device_type == "cuda"
        self._steps = 0
        self._due: int | None = 0 if self._turns and not orders.warm_up else None
        self._armed = False
        self._roots: list[float] = []
        self._reached, self._watched = False, False  # by this backward; whether it would tell
        self._seconds: list[float] = []
        self._clock = 0.0
        self._weights: WeightsFrom | None = None
        self._shadow: Shadow | None = None
        self._arrivals: probing.ArrivalTimes | None = None
        self._measured = -1  # the step of what the shadow has found last
        parameters = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
        self._write(
            wrapped=type(model.module).__name__,
            parameters=parameters,
            ranks=self._transport.world_size,
            device=model.device_type,
            machine=machine(model.device_type),
            transport=_transport_of(model),
            local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", self._transport.world_size)),
        )
        listen(self)
        at_exit(Exit.TELL, self._say_left, [self])

    def add(self, model: Any) -> None:
        """Let a new wrapper begin as the first contestant."""
        missing = {name: why for name in set(self._turns) if (why := contestants.why_missing(model, name))}
        if missing and len(missing) < len(set(self._turns)):
            self._turns = [name for name in self._turns if name not in missing]
            self._write(missing=missing)
        if isinstance(model, TorchDDP):
            contestants.begin(model, self._orders.first)
            if self._orders.weights_from and isinstance(model, DistributedDataParallel) and not self._why_fixed(model):
                self._weights = WeightsFrom(model)
        if self._orders.shadow and self._shadow is None and isinstance(model, DistributedDataParallel):
            self._shadow = Shadow(model, self._orders.shadow, self._orders.shadow_every)
        self._models.add(model)
        if not isinstance(model, TorchDDP):  # sharded: it has begun, and is in its first forward
            model.module.register_forward_pre_hook(lambda *_: self.forward(model))
            self.forward(model)

    def forward(self, model: Any) -> None:
        """Called before each forward of a wrapper."""
        if not torch.is_grad_enabled():
            return
        if model._comm_hooks and isinstance(model, DistributedDataParallel):
            raise SettingError(
                "the script registers a communication hook, which decides what goes on the wire, whatever the setting"
            )
        self._look_for_lead(model)
        if len(self._turns) > 1 and (why := self._why_fixed(model)):
            self._write(fixed=why)
            self._leave()
        if self._weights is not None:
            self._weights.contest(model)
        if self._due is not None and (self._lead is None or self._lead() is model):
            if self._due == 0 and self._orders.probes:
                self._probe(model)
            if self._due == 0 and self._weights is not None:
                self._write(copy_seconds=self._weights.copy_seconds())
            name, self._due = self._turns[self._due], None
            if len(self._turns) > 1:
                contestants.take(model, name)
        if model.require_backward_grad_sync:
            if self._lead is None:
                self._lead = weakref.ref(model)
            if not self._armed and self._lead() is model:
                self._armed = True
                self._say_place(f"is in step {self._steps + 1}")

    def _look_for_lead(self, model: Any) -> None:
        """Before a wrapper's first forward, and now and then while others than the lead are called."""
        if self._lead is not None and self._lead() is model:
            self._others_called = 0
            return
        self._others_called += 1
        if model in self._called and self._others_called & (self._others_called - 1):
            return
        self._called.add(model)
        gc.collect()  # a wrapper may be in a cycle, which each rank's collector finds at a time of its own
        self._are_several = len(self._models) > 1
        if self._lead is not None and self._lead() is None:
            self._lead, self._others_called = None, 0
            if self._arrivals is not None:
                self._arrivals = probing.ArrivalTimes(model.reducer, self._orders.steps)
            if len(self._turns) > 1:
                self._begin_again()

    def _begin_again(self) -> None:
        """Begin the turn again that is under way, since it had another wrapper."""
        steps = max(0, self._steps - self._orders.warm_up - self._lost_steps)
        turn, done = divmod(steps, self._orders.settle + self._orders.steps)
        if not done or turn >= len(self._turns):
            return
        self._lost_steps += done
        self._seconds.clear()
        self._due = turn
        self._begun_again += 1

    def _probe(self, model: Any) -> None:
        if self._cuda or not isinstance(getattr(model, "reducer", None), GradientReducer):
            why = "the model is on a GPU" if self._cuda else f"no reducer of ours averages this {type(model).__name__}"
            self._write(fixed=f"{why}, and steps are predicted of DistributedDataParallel on CPUs only")
            self._leave()
        self._say_place("measures the link and the kernels")
        self._arrivals = probing.ArrivalTimes(model.reducer, self._orders.steps)
        for line in probing.probe(model.reducer, self._orders.probes, self._transport, model.process_group):
            self._write(**line)
            self._say_place(f"has measured {line.get('probe', 'the link')}")

    def _why_fixed(self, model: Any) -> str:
        """Between one wrapper's steps another's backward may be pending, as in a GAN."""
        if self._begun_again > MOST_BEGUN_AGAIN:
            return "the script wraps one module after another, each for fewer steps than a turn has"
        return "the script wraps several modules" if self._are_several else contestants.why_fixed(model)

    def output(self, model: Any, tensors: Iterable[Tensor]) -> None:
        """Called behind each forward of a wrapper, with what it returns."""
        if self._turns or not torch.is_grad_enabled():
            return
        found = [tensor for tensor in tensors if tensor.grad_fn is not None]
        for tensor in found:
            tensor.register_hook(partial(self._reach, weakref.ref(model)))
        self._watched = bool(found)

    def _reach(self, model: weakref.ref[Any], _: Tensor) -> None:
        if self._lead is None or self._lead() is model():
            self._reached = True

    def before_backward(self) -> None:
        """Called before each outermost backward."""
        self._reached = False
        if self._weights is not None:
            self._weights.look()

    def after_backward(self, roots: Any, gradients: Any) -> None:
        """Called after each outermost backward."""
        if self._watched and not self._reached:  # of a network that is not wrapped, or of another wrapper
            return
        if not self._turns:
            self._roots.append(loss_of(roots, gradients))
        ended, reducer = self._now() if self._armed else 0.0, self._reducer()
        if self._weights is not None:
            self._weights.settle()
        if not self._armed:
            return
        self._armed = False
        self._steps += 1
        self._say_place(f"has ended step {self._steps}")
        if self._turns:
            self._time_step(ended, reducer)
        else:
            self._note_loss()

    def _note_loss(self) -> None:
        """The mean over the ranks of what `backward` was called on since the last step.

        In `join()`, where other ranks may have no step, it is that of rank 0.
        """
        loss = torch.tensor([math.fsum(self._roots) / len(self._roots)], dtype=torch.float64, device="cpu")
        self._roots.clear()
        if not self._in_join:
            self._transport.all_reduce(loss).wait()
            loss /= self._transport.world_size
        now = time.perf_counter() - self._note_errors()
        self._clock = self._clock or now
        self._write(loss=loss.item(), seconds=now - self._clock)
        if self._steps == self._orders.end:
            self._leave()

    def _note_errors(self) -> float:
        """Write what the shadow has found, if it is new; returns the seconds that measuring has taken so far."""
        if self._shadow is None:
            return 0.0
        found = self._shadow.last
        if found is not None and found.step != self._measured:
            self._measured = found.step
            self._write(gradient_errors=found.errors, step=self._steps)
        return self._shadow.seconds

    def _now(self) -> float:
        """When this rank has done what it was given so far, if steps are timed."""
        if self._cuda and self._turns:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _reducer(self) -> Any:
        """What reduces the gradients of the wrapper whose steps are counted."""
        return None if self._lead is None else getattr(self._lead(), "reducer", None)

    def _time_step(self, ended: float, reducer: Any) -> None:
        """A step has ended, whose gradients `reducer` has reduced."""
        place = self._steps - self._orders.warm_up - self._lost_steps
        if self._steps == self._orders.warm_up:
            self._due = 0
        if place <= 0:
            return
        turn, at = divmod(place - 1, self._orders.settle + self._orders.steps)
        if at < self._orders.settle - 1 or turn >= len(self._turns):
            return
        if at == self._orders.settle - 1:
            self._meet()  # all ranks start together
            self._clock = self._now()
            return
        self._seconds.append(ended - self._clock)
        self._clock = self._now()
        if len(self._seconds) == self._orders.steps:
            seconds = [self._seconds] if self._in_join else self._transport.exchange(self._seconds)
            line = {"turn": turn, "contestant": self._turns[turn], "seconds": seconds}
            line["flight"] = self._flight(turn, reducer)
            if self._orders.flights:
                line["flights"] = self._transport.exchange(self._flights(reducer))
            self._write(**line)
            self._seconds, self._begun_again = [], 0
            self._due = turn + 1
            if self._due == len(self._turns):
                self._leave()

    def _flight(self, turn: int, reducer: Any) -> dict[str, Any] | None:
        """A step of this turn, the median, as this rank's flight record has it; None where our reducer did nothing."""
        if not isinstance(reducer, GradientReducer) or self._turns[turn] in contestants.TORCHS:
            return None
        steps = reducer.flight_record().steps[:-1][-self._orders.steps :]
        return asdict(sorted(steps, key=lambda step: step.seconds or 0.0)[len(steps) // 2])

    def _flights(self, reducer: Any) -> list[dict[str, Any]]:
        assert self._arrivals is not None
        return probing.flights(reducer.recorder.last_rows(self._orders.steps - 1), self._arrivals)

    def _say_place(self, text: str) -> None:
        self._place.seek(0)
        self._place.write(text.ljust(200).encode())

    def _say_left(self) -> None:
        if not hasattr(sys, "last_value"):  # else something was raised, of which there is more to say
            self._say_place(f"{LEFT} after step {self._steps}")

    @property
    def _in_join(self) -> bool:
        """Whether other ranks may have no step any more: then nobody waits for them."""
        lead = None if self._lead is None else self._lead()
        return lead is not None and lead._join_config.enable

    def _meet(self) -> None:
        if self._in_join:
            return
        self._transport.all_reduce(torch.zeros(1, device="cpu")).wait()

    def _write(self, **line: Any) -> None:
        if self._transport.rank == 0:
            with open(self._orders.record, "a") as file:
                file.write(json.dumps(line) + "\n")

    def _leave(self) -> None:
        """End the training: everything has been measured; and end what this rank has started, as its exit would.

        At once, since a script may catch what is raised, and torch's own class over gloo aborts now and then in the
        interpreter's end. In `join()`, where rank 0 alone is measured, the others stay until it has left.
        """
        if self._in_join and self._transport.rank:
            return
        self._write(done=True)
        for _ in range(2):  # nobody is gone while another waits for it
            self._meet()
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(ValueError):  # of the main thread alone
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a data loader's would raise
        for child in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGTERM)
        os._exit(0)


def _descendants(process: int) -> list[int]:
    """The processes that one has started, and that these have."""
    found: list[int] = []
    for file in Path("/proc", str(process), "task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, file.read_text().split())
    return found + [grandchild for child in found for grandchild in _descendants(child)]


def _open_place(record: str, rank: int) -> BinaryIO:
    """The file in which this rank says where it is; nowhere, if it runs on another host that does not see the folder.

    Raises:
        SettingError: if that is rank 0, which writes what is measured.
    """
    seen = os.path.isdir(os.path.dirname(record))
    if rank == 0 and not seen:
        raise SettingError(
            f"fastreduce compare: rank 0 runs on {socket.gethostname()}, which does not see {record}: give --out a "
            "folder that it shares with the machine that compare runs on, or start compare where rank 0 is"
        )
    return open(f"{record}.{rank}" if seen else os.devnull, "wb", buffering=0)


def _transport_of(model: Any) -> str:
    if not isinstance(model, TorchDDP):
        return str(model.transport_name)
    return model.reducer.transport.name if isinstance(model, DistributedDataParallel) else ""
