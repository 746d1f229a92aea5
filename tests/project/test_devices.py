"""Every call that makes a tensor says on which device: others' default device is no place for what we send."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.commands import ROOT

# Those of torch that follow `torch.set_default_device`; `*_like` and `new_*` follow a tensor.
FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_bsc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "sparse_csc_tensor",
    "sparse_csr_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
FILES = [*(ROOT / "fastreduce").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]  # rglob leaves symlinks out


def _without_device(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if of_torch and node.func.attr in FACTORIES and all(each.arg != "device" for each in node.keywords):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_is_made_on_a_device_of_our_choice():
    assert len(FILES) > 200
    assert not [f"{file.relative_to(ROOT)}:{call}" for file in FILES for call in _without_device(file.read_text())]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3)", ["1: torch.zeros(3)"]),
        ("x = f(torch.tensor([1], dtype=torch.int64))", ["1: torch.tensor([1], dtype=torch.int64)"]),
        ("torch.zeros(3, device='cpu'); torch.zeros_like(x); x.new_zeros(3); np.zeros(3); torch.cat([x])", []),
    ],
)
def test_what_it_finds(source: str, found: list[str]):
    assert list(_without_device(source)) == found
