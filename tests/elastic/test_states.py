"""The state of a training on its way to those who come: what arrives, and how much memory it takes on each rank."""

from __future__ import annotations

import io
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce.elastic import state
from fastreduce.transports import GlooTransport, Transport, local_ranks
from tests.support.memory import bytes_of
from tests.support.ranks import RankPool


class Part:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _sent(value: Any) -> Any:
    """What arrives of it."""
    parts = Part(value), Part()

    def send(transport: Transport) -> None:
        part = parts[transport.rank]
        state.send({"part": part}, 7, transport, 0, taken=None if transport.rank == 0 else [].append)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(send, local_ranks(2)))
    return parts[1].value


def _bytes(tensor: Tensor) -> list[int]:
    plain = tensor.detach().to_dense().resolve_conj().resolve_neg()
    found: list[int] = plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()
    return found


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex128)


@pytest.mark.parametrize("size", [2, 7, 64, 16 << 20])
def test_a_state_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch, size: int):
    """Whatever pieces of which tensors are in a wire."""
    monkeypatch.setattr(state, "WIRE_BYTES", size)
    torch.manual_seed(0)
    flat = torch.randn(64)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    value = {
        **{str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES},
        "module": module.state_dict(),
        "in containers": [
            (torch.tensor(3.0), [torch.ones(2, 1, 3)]),
            OrderedDict(a={0: torch.arange(4)}),
            "text",
            None,
        ],
        "transposed": torch.randn(3, 4).t(),
        "with gaps": torch.randn(9)[1::3],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "last channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": [torch.empty(0), torch.empty(2, 0, 3), flat[64:]],
        "views": [flat, flat[3:19].view(4, 4), flat[40:].view(torch.int32)],
        "parameter": nn.Parameter(torch.randn(3)),
        "of gradients": torch.randn(3, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "meta": torch.empty(2, 3, device="meta"),
    }
    found = _sent(value)

    def compare(there: Any, here: Any, path: str) -> None:
        assert type(here) is type(there), path
        if isinstance(there, Tensor):
            told = [
                (x.dtype, x.shape, x.device, x.layout, x.requires_grad, x.is_conj(), x.is_neg()) for x in (there, here)
            ]
            assert told[0] == told[1], path
            assert there.is_sparse or there.stride() == here.stride(), path
            if not there.is_meta:
                assert _bytes(here) == _bytes(there), path
        elif isinstance(there, dict):
            assert [*there] == [*here], path
            for key, each in there.items():
                compare(each, here[key], f"{path}[{key!r}]")
        elif isinstance(there, (list, tuple)):
            assert len(there) == len(here), path
            for i, each in enumerate(there):
                compare(each, here[i], f"{path}[{i}]")
        else:
            assert there == here, path

    compare(value, found, "value")
    assert vars(found["module"]) == vars(module.state_dict())  # versions of its layers
    first, *views = found["views"]
    first.fill_(7.0)
    assert (views[0] == 7.0).all() and (views[1].view(torch.float32) == 7.0).all(), "of one memory, as they were"


@pytest.mark.parametrize("shorter_first", [False, True])
def test_arrays_that_begin_at_one_address_arrive_whole(shorter_first: bool):
    """Each has a storage of its own, and a slice of an array has a shorter one."""
    array = torch.arange(1000.0).numpy()
    value = [torch.from_numpy(array), torch.from_numpy(array[:2])]
    found = _sent(value[::-1] if shorter_first else value)
    shorter, whole = sorted(found, key=len)
    assert torch.equal(shorter, torch.arange(2.0)) and torch.equal(whole, torch.arange(1000.0))


def test_what_is_there_twice_arrives_once():
    tensor, within = torch.ones(3), list[Any]()
    within += [torch.ones(2), within]
    tree: Any = [torch.ones(1)]
    for _ in range(60):  # 2 to the 60th paths
        tree = [tree, tree]
    pair = {"a": tensor}
    found = _sent([tensor, tensor, within, pair, pair, tree])
    assert found[0] is found[1] and found[3] is found[4] and found[3]["a"] is found[0]
    assert found[2][1] is found[2] and found[5][0] is found[5][1]


def test_a_nested_tensor_arrives():
    value = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    if torch.serialization.get_unsafe_globals_in_checkpoint(file):
        pytest.skip("this torch loads none with weights_only=True")
    found = _sent(value)
    assert [each.tolist() for each in found.unbind()] == [[1.0] * 2, [1.0] * 3]


@pytest.mark.parametrize("value", [None, torch.empty(2, 0)])
def test_a_state_without_bytes_arrives(value: Any):
    found = _sent(["text", value])
    assert found[0] == "text" and type(found[1]) is type(value)


def _peak(rank: int, world_size: int) -> float:
    """Rank 0 sends a state to rank 1, and rank 2 has one: of how many states each needs the memory meanwhile."""
    part = Part({f"weight {i}": torch.ones(1 << 22) for i in range(8)} if rank != 1 else None)
    assert dist.group.WORLD is not None
    transport = GlooTransport(dist.group.WORLD)
    transport.exchange(rank)
    before = bytes_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # peaks begin anew
    state.send({"part": part}, 7, transport, 0, [].append if rank == 1 else None)
    peak = bytes_of("VmHWM") - before
    transport.close()
    assert part.value["weight 7"].eq(1).all()
    return peak / (8 << 24)


def test_a_state_takes_no_other_memory_than_that_of_the_one_who_comes(ranks3: RankPool):
    source, comes, other = ranks3.run(_peak)
    assert source < 0.5 and other < 0.5, "wires, not the state"
    assert comes < 1.5
