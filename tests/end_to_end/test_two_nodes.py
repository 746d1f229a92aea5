"""Training across two hosts: network namespaces with a cable between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import two_nodes

pytestmark = pytest.mark.long

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "fastreduce launch": ["-c", "from fastreduce.cli import main; main()", "launch"],
}
TRAIN = """
import hashlib, os, sys
import torch, torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fastreduce import DistributedDataParallel as DDP

dist.init_process_group("gloo")
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
torch.manual_seed(0)
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)), compression="int8")
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
losses = []
for inputs, labels in [*loader, *loader]:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(inputs), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())).hexdigest()
print(os.environ["RANK"], os.environ["LOCAL_RANK"], weights, losses[-1] < 0.5 * losses[0])
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    with two_nodes.or_skip(), two_nodes.two_nodes() as names:
        yield names


@pytest.fixture(scope="module")
def trained(nodes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """What both ranks printed, by launcher."""
    script: Path = tmp_path_factory.mktemp("two-nodes") / "train.py"
    script.write_text(TRAIN)
    return {
        name: [out.split() for out in two_nodes.launch(nodes, [*command, "WHERE", script], timeout=150)]
        for name, command in LAUNCHERS.items()
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_train_and_end_with_equal_weights(trained: dict[str, list[list[str]]], launcher: str):
    first, second = trained[launcher]
    assert (first[:2], second[:2]) == (["0", "0"], ["1", "0"])
    assert first[2] == second[2]
    assert first[3] == second[3] == "True"


def test_both_launchers_train_to_the_same_bits(trained: dict[str, list[list[str]]]):
    weights = {rank[2] for ranks in trained.values() for rank in ranks}
    assert len(weights) == 1
