"""Bad input: every mistake is one clear error on every rank, or the documented behaviour; nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fastreduce
from fastreduce import BackendUnavailableError, Compression, SettingError, TensorError, all_reduce_gradients
from tests.support.each_setting import EACH_SETTING
from tests.support.models import Grads, assert_same_bits, batch, grads_of, wrap
from tests.support.ranks import RankPool


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _error(build: Callable[[], Any]) -> str:
    """What building says, after which the group must still serve."""
    try:
        build()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "no error"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return message


# Ranks that differ


def _layers(**change: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Conv2d(3, 4, 3), nn.BatchNorm1d(5))


def _shape(body: Any, options: dict[str, Any]) -> None:
    body[0] = nn.Linear(4, 6)


def _dtype(body: Any, options: dict[str, Any]) -> None:
    body[0].double()


def _name(body: Any, options: dict[str, Any]) -> None:
    body._modules = {{"1": "other"}.get(name, name): child for name, child in body._modules.items()}


def _more(body: Any, options: dict[str, Any]) -> None:
    body.append(nn.Linear(2, 2))


def _frozen(body: Any, options: dict[str, Any]) -> None:
    body[0].bias.requires_grad_(False)


def _memory_format(body: Any, options: dict[str, Any]) -> None:
    body[1].to(memory_format=torch.channels_last)


def _buffer_shape(body: Any, options: dict[str, Any]) -> None:
    body[2].running_mean = torch.zeros(7)


def _buffer_dtype(body: Any, options: dict[str, Any]) -> None:
    body[2].running_mean = body[2].running_mean.double()


def _order(body: Any, options: dict[str, Any]) -> None:
    weight = body[0].weight
    del body[0].weight
    body[0].weight = weight


def _ignored(body: Any, options: dict[str, Any]) -> None:
    fastreduce.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(body, ["0.weight"])


def _option(**change: Any) -> Callable[[Any, dict[str, Any]], None]:
    def apply(body: Any, options: dict[str, Any]) -> None:
        options.update(change)

    return apply


DIFFERENCES: dict[str, tuple[Callable[[Any, dict[str, Any]], None], list[str]]] = {
    "shape": (_shape, ["'0.weight'", "(5, 4)", "(6, 4)"]),
    "dtype": (_dtype, ["'0.weight'", "float32", "float64"]),
    "name": (_name, ["'1.weight'", "nothing"]),
    "number": (_more, ["'3.weight'", "nothing", "(2, 2)"]),
    "requires_grad": (_frozen, ["'0.bias'", "requires grad", "requires no grad"]),
    "memory format": (_memory_format, ["'1.weight'", "strides"]),
    "buffer shape": (_buffer_shape, ["'2.running_mean'", "(5,)", "(7,)"]),
    "buffer dtype": (_buffer_dtype, ["'2.running_mean'", "float32", "float64"]),
    "order": (_order, ["0.weight", "0.bias"]),
    "ignored parameters": (_ignored, ["'0.weight'", "nothing"]),
    "compression": (_option(compression="int8:block=64"), ["compression", "none", "int8:block=64"]),
    "accumulate": (_option(compression="none:accumulate=fp32"), ["compression", "none:accumulate=fp32"]),
    "bucket cap": (_option(bucket_cap_mb=13), ["bucket_cap_mb", "13"]),
    "views": (_option(gradient_as_bucket_view=True), ["gradient_as_bucket_view", "True", "False"]),
    "broadcast_buffers": (_option(broadcast_buffers=False), ["broadcast_buffers", "False"]),
    "init_sync": (_option(init_sync=False), ["init_sync", "True", "False"]),
}


def _differing(rank: int, world_size: int, case: str, odd: int) -> str:
    body, options = _layers(), {"compression": "none"}
    if rank == odd:
        DIFFERENCES[case][0](body, options)
    return _error(lambda: wrap("ours", body, **options))


@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_differ_get_the_same_error_that_names_the_first_difference(ranks: RankPool, case: str):
    odd = ranks.world_size - 1
    messages = ranks.run(_differing, case, odd)
    assert len(set(messages)) == 1, messages
    assert messages[0].startswith("MismatchError: "), messages[0]
    for piece in [*DIFFERENCES[case][1], "rank 0", f"rank {odd}"]:
        assert piece in messages[0], messages[0]


def test_rank_0_may_be_the_odd_one(ranks3: RankPool):
    messages = ranks3.run(_differing, "shape", 0)
    assert len(set(messages)) == 1 and "rank 1" in messages[0] and "(6, 4)" in messages[0]


def test_the_environment_of_one_rank_is_compared_too(ranks2: RankPool):
    messages = ranks2.run(_environment)
    assert len(set(messages)) == 1 and "compression" in messages[0] and "bf16" in messages[0]


def _environment(rank: int, world_size: int) -> str:
    if rank == 1:
        os.environ["FASTREDUCE_COMPRESSION"] = "bf16"
    return _error(lambda: wrap("ours", nn.Linear(2, 2)))


def _other_kernels(rank: int, world_size: int) -> list[str]:
    if rank == 1:
        os.environ["FASTREDUCE_KERNELS"] = "reference"
    gradient = torch.ones(300)
    return [
        _error(lambda: wrap("ours", nn.Linear(2, 2), compression="int8", transport="shm")),
        _error(lambda: all_reduce_gradients([gradient], compression="int8")),
        _error(lambda: wrap("ours", nn.Linear(2, 2), compression="int8", transport="gloo")),
    ]


def test_ranks_that_share_memory_are_to_have_the_same_kernels(ranks2: RankPool):
    """Pieces would meet wires: as sockets carry wires alone, their ranks may differ."""
    expected = (
        "MismatchError: ranks differ in the kernels that work in shared memory (FASTREDUCE_KERNELS): "
        "rank 0 has numba_cpu, rank 1 has reference. "
    )
    for *in_memory, over_sockets in ranks2.run(_other_kernels):
        assert all(text.startswith(expected) for text in in_memory), in_memory
        assert over_sockets == "no error"


def test_arguments_that_mean_the_same_agree(ranks2: RankPool):
    assert ranks2.run(_same) == ["no error"] * 2


def _same(rank: int, world_size: int) -> str:
    options = [{}, {"compression": "int8:block=128", "init_sync": True, "static_graph": False}][rank]
    return _error(lambda: wrap("ours", _layers(), **{"compression": "int8", **options}))


# One rank that cannot go on


def _bad_setting(body: Any, options: dict[str, Any]) -> None:
    options["compression"] = "int9"


def _bad_backend(body: Any, options: dict[str, Any]) -> None:
    os.environ["FASTREDUCE_KERNELS"] = "numpy"


def _no_backend(body: Any, options: dict[str, Any]) -> None:
    os.environ["FASTREDUCE_KERNELS"] = "triton"
    os.environ.pop("TRITON_INTERPRET", None)


def _integers(body: Any, options: dict[str, Any]) -> None:
    body[0].weight = nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn))


def _nothing_trainable(body: Any, options: dict[str, Any]) -> None:
    body.requires_grad_(False)


LONE: dict[str, tuple[Callable[[Any, dict[str, Any]], None], str, str]] = {
    "unknown setting": (_bad_setting, "SettingError", "'int9'"),
    "unknown backend": (_bad_backend, "SettingError", "'numpy'; allowed: "),
    "backend that cannot run": (_no_backend, "BackendUnavailableError", "TRITON_INTERPRET"),
    "dtype": (_integers, "TensorError", "float8_e4m3fn"),
}


def _lone(rank: int, world_size: int, case: str) -> str:
    body, options = nn.Sequential(nn.Linear(2, 2)), {"compression": "fp16"}
    if rank == world_size - 1:
        LONE[case][0](body, options)
    return _error(lambda: wrap("ours", body, **options))


@pytest.mark.parametrize("case", LONE)
def test_one_rank_that_cannot_be_set_up_is_an_error_on_every_rank(ranks: RankPool, case: str):
    *others, own = ranks.run(_lone, case)
    _, kind, piece = LONE[case]
    assert own.startswith(f"{kind}: ") and piece in own, own
    for other in others:
        assert other.startswith(f"MismatchError: rank {ranks.world_size - 1} could not be set up"), other
        assert kind in other and piece in other, other


def test_one_rank_without_trainable_parameters_is_an_error_on_every_rank(ranks: RankPool):
    messages = ranks.run(_lone_frozen)
    assert all("Error: " in message for message in messages), messages
    assert all("grad" in message for message in messages), messages


def _lone_frozen(rank: int, world_size: int) -> str:
    body = nn.Sequential(nn.Linear(2, 2))
    if rank == 0:
        body.requires_grad_(False)
    return _error(lambda: wrap("ours", body))


# The same mistake everywhere


def test_a_model_without_trainable_parameters_is_torchs_error(alone: None):
    for kind in ("torch", "ours"):
        with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
            wrap(kind, nn.Linear(2, 2).requires_grad_(False))
        with pytest.raises(RuntimeError, match="any parameter that requires a gradient"):
            wrap(kind, nn.ReLU())


def test_a_bad_setting_is_a_setting_error(alone: None):
    for setting in ("int9", 16, "fp16:accumulate=fp64"):
        with pytest.raises(SettingError):
            wrap("ours", nn.Linear(2, 2), compression=setting)


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(ValueError, match="init_process_group"):
        wrap("ours", nn.Linear(2, 2))


def test_an_unknown_argument_is_a_type_error(alone: None):
    with pytest.raises(TypeError, match="compresion"):
        wrap("ours", nn.Linear(2, 2), compresion="fp16")


def test_an_unknown_kernel_backend_is_an_error_that_lists_the_known(alone: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_KERNELS", "cuda")
    with pytest.raises(SettingError, match=r"'cuda'.*reference, numba_cpu, triton"):
        wrap("ours", nn.Linear(2, 2))


def test_triton_without_its_interpreter_is_unavailable_with_the_reason(alone: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"FASTREDUCE_KERNELS=triton.*(TRITON_INTERPRET=1|pip install)"):
        wrap("ours", nn.Linear(2, 2))


def test_a_parameter_that_is_made_of_other_tensors_is_refused_by_name(alone: None):
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(TensorError, match=r"'weight' is a TwoTensor.*plain tensors"):
        wrap("ours", layer)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TensorError, match=r"is a TwoTensor.*plain tensors"):
        all_reduce_gradients(layer.parameters())
    layer.weight.requires_grad_(False)  # a quantized base, say
    wrap("ours", layer, init_sync=False)


def test_a_lazy_module_is_refused(alone: None):
    with pytest.raises(RuntimeError, match=r"[Uu]ninitialized"):
        wrap("ours", nn.LazyLinear(3))


def _cast_after_wrapping(rank: int, world_size: int, whole: bool) -> str:
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = wrap("ours", body)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    (body if whole else body[1]).double()
    body[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    return _error(lambda: model(torch.ones(1, 2, dtype=torch.float64 if whole else None)).sum().backward())


@pytest.mark.parametrize("whole", [False, True])
def test_a_module_that_is_cast_after_wrapping_is_an_error_that_names_the_parameter(ranks: RankPool, whole: bool):
    for message in ranks.run(_cast_after_wrapping, whole):
        assert message.startswith("TensorError: ") and "was torch.float32 on cpu when it was wrapped" in message, (
            message
        )


def test_a_sparse_gradient_that_no_module_announced_is_refused(alone: None):
    layer = nn.Linear(2, 2)
    model = wrap("ours", layer, compression="fp16")  # alone and uncompressed, nothing is looked at
    layer.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_sparse()))  # type: ignore[union-attr]
    with pytest.raises(TensorError, match=r"'weight'.*sparse"):
        model(torch.ones(1, 2)).sum().backward()


# NaN and inf


def _non_finite(rank: int, world_size: int, setting: str, bad: float, views: bool) -> tuple[list[Grads], Grads]:
    """A step with one bad element on one rank in `a`, then a good one."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.zeros(n)) for n in (300, 40, 500))

        def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
            return sum((p * g).sum() for p, g in zip((self.a, self.b, self.c), gradients, strict=True))  # type: ignore[return-value]

    model = wrap("ours", Three(), compression=setting, gradient_as_bucket_view=views)
    seen = []
    for step in range(5):
        model.zero_grad()
        gradients = [batch(rank, 10 * step + i, n) for i, n in enumerate((300, 40, 500))]
        if step in (0, 3) and rank == world_size - 1:
            gradients[0][170] = bad
        model(gradients).backward()
        seen.append(grads_of(model.module))
    return [seen[0], seen[3]], seen[4]


@pytest.mark.parametrize(
    "bad", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.long), -torch.inf], ids=["nan", "inf", "minus inf"]
)
@pytest.mark.parametrize("setting", EACH_SETTING)
def test_a_non_finite_gradient_on_one_rank_is_non_finite_on_all_and_nothing_else_is(
    ranks: RankPool, setting: str, bad: float
):
    results = ranks.run(_non_finite, setting, bad, ranks.world_size == 3)
    for bad_steps, good_step in results:
        assert_same_bits((bad_steps, good_step), results[0])
        for grads in bad_steps:
            finite = {name: g.isfinite() for name, g in grads.items()}  # type: ignore[union-attr]
            assert finite["b"].all() and finite["c"].all()
            block = Compression.parse(setting).block or 1
            start, end = 170 // block * block, 170 // block * block + block
            assert not finite["a"][start:end].any(), "the element, or its whole block, arrives as non-finite"
            assert finite["a"][:start].all() and finite["a"][end:].all()
            if bad == bad and block == 1:
                assert grads["a"][170] == bad  # type: ignore[index]
        assert all(g.isfinite().all() for g in good_step.values())  # type: ignore[union-attr]


def _too_large(rank: int, world_size: int, setting: str) -> torch.Tensor:
    layer = nn.Linear(4, 1, bias=False)
    model = wrap("ours", layer, compression=setting)
    model(torch.tensor([[1e5, -1e5, 1.0, 65504.0]])).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.clone()


def test_what_fp16_alone_cannot_hold_arrives_to_its_eleven_digits(ranks2: RankPool):
    wanted = torch.tensor([[1e5, -1e5, 1.0, 65504.0]])
    for setting in ("fp16", "fp16:accumulate=wire"):
        for grad in ranks2.run(_too_large, setting):
            # Rounded by each rank and once more; the other summands of a wire's sum round too.
            torch.testing.assert_close(grad, wanted, rtol=3 * 2**-11, atol=0.0)
    for grad in ranks2.run(_too_large, "bf16"):
        assert grad.isfinite().all()
