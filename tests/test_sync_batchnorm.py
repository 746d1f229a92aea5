"""SyncBatchNorm on CPU ranks gives what one process gives over the batches of all ranks."""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastreduce import MismatchError, SettingError, SyncBatchNorm, TensorError, TransportError
from fastreduce.sync_batchnorm import FIRST_CHANNELS
from tests.support import tolerances
from tests.support.models import Shared, assert_same_bits, batch, grads_of, wrap
from tests.support.ranks import RankPool, run_ranks

Seen = dict[str, Any]

# Sizes of the ranks' batches, for two and three ranks.
SIZES = {"even": (4, 4, 4), "uneven": (7, 2, 5), "empty": (5, 0, 3), "one value": (1, 1, 1)}
SHAPES = {"2-D": (), "3-D": (5,), "4-D": (3, 4), "5-D": (2, 3, 2)}
CHANNELS = 6


def _layers(options: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """One process's layer and ours, with the same random parameters and statistics."""
    torch.manual_seed(3)
    half = dtype in (torch.float16, torch.bfloat16)
    reference = nn.BatchNorm1d(CHANNELS, dtype=torch.float32 if half else dtype, **options)
    reference._check_input_dim = lambda input: None  # type: ignore[method-assign]
    for tensor in [*reference.parameters(), *reference.buffers()]:
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5)
    ours = SyncBatchNorm(CHANNELS, **options)
    ours = ours.to(reference.weight.dtype if reference.affine else dtype)
    ours.load_state_dict(reference.state_dict())
    return reference, ours.to(dtype) if half and options.get("affine", True) else ours


def _inputs(world_size: int, sizes: str, shape: str, step: int, dtype: torch.dtype, last: bool) -> list[Tensor]:
    inputs = []
    for rank in range(world_size):
        x = batch(rank, step, SIZES[sizes][rank], CHANNELS, *SHAPES[shape]) * 2 + torch.arange(CHANNELS).view(
            -1, *[1] * len(SHAPES[shape])
        )
        if last and x.dim() in (4, 5):
            x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        inputs.append(x.to(dtype).requires_grad_())
    return inputs


def _seen(layer: nn.Module, output: Tensor, grad: Tensor) -> Seen:
    return {
        "output": output.detach(),
        "grad": grad,
        **{f"grad of {n}": g.clone() for n, g in grads_of(layer).items()},
        **{n: b.clone() for n, b in layer.named_buffers()},
    }


def _loss(output: Tensor) -> Tensor:
    return (output.float().sin() * torch.linspace(-1, 2, CHANNELS).view(-1, *[1] * (output.dim() - 2))).sum()


def _train(
    rank: int, world_size: int, options: Any, sizes: str, shape: str, dtype: torch.dtype, last: bool
) -> list[Seen]:
    _, layer = _layers(options, dtype)
    seen = []
    for step in range(2):
        x = _inputs(world_size, sizes, shape, step, dtype, last)[rank]
        layer.zero_grad()
        output = layer(x)
        _loss(output).backward()
        assert output.stride() == x.stride() or not x.numel()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
        seen.append(_seen(layer, output, x.grad))
    layer.eval()
    x = _inputs(world_size, sizes, shape, 2, dtype, last)[rank]
    seen.append({"output": layer(x).detach()} if layer.track_running_stats else {})
    return seen


def _reference(
    world_size: int, options: Any, sizes: str, shape: str, dtype: torch.dtype, last: bool
) -> list[list[Seen]]:
    """What every rank should see, computed in one process: FP64, but for the last rounding."""
    layer, _ = _layers(options, dtype)
    layer = layer.double()
    seen: list[list[Seen]] = [[] for _ in range(world_size)]
    for step in range(2):
        inputs = [x.detach().double() for x in _inputs(world_size, sizes, shape, step, dtype, last)]
        whole = torch.cat(inputs).requires_grad_()
        layer.zero_grad()
        output = layer(whole)
        _loss(output if dtype is torch.float64 else output.to(dtype)).backward()
        lengths = [len(x) for x in inputs]
        for rank, (y, g) in enumerate(zip(output.split(lengths), whole.grad.split(lengths), strict=True)):
            seen[rank].append(_seen(layer, y, g))
    layer.eval()
    for rank, x in enumerate(_inputs(world_size, sizes, shape, 2, dtype, last)):
        seen[rank].append({"output": layer(x.detach().double()).detach()} if layer.track_running_stats else {})
    return seen


def _close(found: Any, expected: Any, dtype: torch.dtype, where: str) -> None:
    assert list(found) == list(expected), where
    half = dtype in (torch.float16, torch.bfloat16)
    for name, value in expected.items():
        if not value.is_floating_point() or not value.numel():
            assert torch.equal(found[name], value.to(found[name].dtype)), f"{where} {name}"
            continue
        largest = float(value.abs().max())
        bound = tolerances.SYNC_BATCH_NORM * tolerances.U[torch.float32 if half else dtype] * max(largest, 1.0)
        if half:  # the output rounds, and with it the gradient that comes back; parameters' gradients add these up
            bound += tolerances.SYNC_BATCH_NORM_HALF * tolerances.U[dtype] * max(largest, 1.0)
        error = float((found[name].double() - value).abs().max())
        assert error <= bound, f"{where} {name}: {error} > {bound}"


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "cumulative average": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
    "no parameters": {"affine": False},
    "large eps": {"eps": 0.1, "momentum": 0.5},
}
CASES = [
    *[("default", sizes, "2-D", torch.float32, False) for sizes in SIZES],
    *[("default", "uneven", shape, torch.float32, last) for shape in SHAPES for last in (False, True)],
    *[(options, "uneven", "4-D", torch.float32, False) for options in OPTIONS],
    *[("default", "uneven", "3-D", dtype, False) for dtype in (torch.float64, torch.float16, torch.bfloat16)],
    ("default", "empty", "4-D", torch.bfloat16, True),
    ("cumulative average", "empty", "5-D", torch.float64, True),
]


def _train_each(rank: int, world_size: int) -> list[list[Seen]]:
    return [_train(rank, world_size, OPTIONS[options], *case) for options, *case in dict.fromkeys(CASES)]


def test_outputs_gradients_and_statistics_are_those_of_one_process(ranks: RankPool):
    of_ranks = ranks.run(_train_each)
    for (options, *case), *found in zip(dict.fromkeys(CASES), *of_ranks, strict=True):
        expected = _reference(ranks.world_size, OPTIONS[options], *case)
        for rank in range(ranks.world_size):
            for step, (mine, theirs) in enumerate(zip(found[rank], expected[rank], strict=True)):
                _close(mine, theirs, case[2], f"{options}, {case}: rank {rank}, step {step}")
            for name, value in found[0][1].items():
                if name.startswith(("running", "num")):
                    assert_same_bits(found[rank][1][name], value, name)


def test_whole_numbers_give_the_bits_of_one_process(ranks2: RankPool):
    """Sixteen values per channel with dyadic statistics: nothing rounds before the scale, which one kernel computes."""
    found = ranks2.run(_whole)
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    whole = torch.cat([_whole_input(rank) for rank in range(2)]).requires_grad_()
    output = layer(whole)
    for rank, (mine, *buffers) in enumerate(found):
        assert_same_bits(mine, output.detach()[4 * rank : 4 * rank + 4])
        assert_same_bits(buffers, [layer.running_mean, layer.running_var, layer.num_batches_tracked])


def _whole_input(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (4, 3, 2, 1), generator=generator).float()


def _whole(rank: int, world_size: int) -> list[Tensor]:
    layer = SyncBatchNorm(3)
    output = layer(_whole_input(rank).requires_grad_())
    return [output.detach(), *layer.buffers()]


def test_gradcheck(ranks2: RankPool):
    assert ranks2.run(_gradcheck) == [True, True]


def _gradcheck(rank: int, world_size: int) -> bool:
    """The sum over ranks of each rank's outputs, as a function of both ranks' inputs."""
    layer = SyncBatchNorm(3, dtype=torch.float64, track_running_stats=False)
    sizes, start = [3, 2], [0, 3]
    factors = batch(0, 9, 5, 3, 2, dtype=torch.float64)

    def function(whole: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        part = slice(start[rank], start[rank] + sizes[rank])
        output = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (whole[part],))
        return _SumOfRanks.apply((output * factors[part]).sum())

    tensors = [batch(0, 0, 5, 3, 2), batch(0, 1, 3), batch(0, 2, 3)]
    return torch.autograd.gradcheck(
        lambda *given: function(*[Shared.apply(t) for t in given]), [t.double().requires_grad_() for t in tensors]
    )


class _SumOfRanks(torch.autograd.Function):
    """The sum over ranks, known to all; each rank backpropagates through its own summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


# In wrappers


def _net() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    return net.append(nn.BatchNorm1d(5)).double()


def _images(rank: int, step: int) -> Tensor:
    return batch(rank, step, (5, 2)[rank], 2, 4, 4, dtype=torch.float64)


def _steps(model: nn.Module, inputs: Any, ranks: int, accumulate: Any = None) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        if accumulate is not None:
            with accumulate():
                (model(inputs(step + 10)).square().sum() * ranks).backward()
        (model(inputs(step)).square().sum() * ranks).backward()  # a wrapper divides by their number
        optimizer.step()
    return [t.detach().clone() for t in model.state_dict().values()]


@pytest.mark.parametrize("accumulate", [False, True], ids=["every step", "no_sync"])
def test_training_in_a_wrapper_is_training_over_the_whole_batch(ranks2: RankPool, accumulate: bool):
    model = _net()

    def whole(step: int) -> Tensor:
        return torch.cat([_images(rank, step) for rank in range(2)])

    expected = _steps(model, whole, 1, contextlib.nullcontext if accumulate else None)
    for of_kinds in ranks2.run(_wrapped, accumulate):
        for kind, found in of_kinds.items():
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=kind)


def _wrapped(rank: int, world_size: int, accumulate: bool) -> dict[str, list[Tensor]]:
    seen = {}
    for kind in ("torch", "ours"):
        model = wrap(kind, SyncBatchNorm.convert_sync_batchnorm(_net()))
        seen[kind] = _steps(model, lambda step: _images(rank, step), world_size, model.no_sync if accumulate else None)
    return seen


def test_our_wrapper_knows_the_layer_and_names_it_where_torchs_is_refused(ranks2: RankPool):
    assert ranks2.run(_known) == [(1, True)] * 2


def _known(rank: int, world_size: int) -> tuple[int, bool]:
    model = wrap("ours", SyncBatchNorm.convert_sync_batchnorm(_net()))
    try:
        wrap("ours", nn.SyncBatchNorm.convert_sync_batchnorm(_net()))
    except ValueError as error:
        return model._get_ddp_logging_data()["has_sync_bn"], "fastreduce.SyncBatchNorm.convert" in str(error)
    return model._get_ddp_logging_data()["has_sync_bn"], False


def test_compiled_it_gives_the_same_bits(ranks2: RankPool):
    for plain, compiled in ranks2.run(_compiled):
        assert_same_bits(compiled, plain)


def _compiled(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    plain, other = (SyncBatchNorm.convert_sync_batchnorm(_net()) for _ in range(2))
    compiled = torch.compile(other, backend="eager")
    return _steps(plain, lambda step: _images(rank, step), 1), _steps(compiled, lambda step: _images(rank, step), 1)


def test_under_autocast(ranks2: RankPool):
    """A convolution's BF16 output is normalised with FP32 statistics; the gradient arrives."""
    assert ranks2.run(_autocast) == [(torch.bfloat16, torch.float32, True)] * 2


def _autocast(rank: int, world_size: int) -> tuple[torch.dtype, torch.dtype, bool]:
    norm = SyncBatchNorm(4)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(batch(rank, 0, 3, 2, 5, 5))
    output.float().square().sum().backward()
    return output.dtype, norm.running_mean.dtype, bool(net[0].weight.grad.isfinite().all())


# The class


def test_conversion_keeps_everything_and_a_shared_layer_shared():
    norm = nn.BatchNorm2d(3, eps=0.1, momentum=None)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 1), norm, norm, nn.Sequential(nn.BatchNorm3d(2, affine=False)), nn.Sequential(norm)
    )
    net.append(nn.SyncBatchNorm(4)).append(nn.BatchNorm1d(2, track_running_stats=False)).append(nn.InstanceNorm1d(2))
    net[1].eval()
    parameters, state = list(net.parameters()), copy.deepcopy(net.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(net)
    assert converted is net
    assert [type(net[i]) for i in (1, 2, 5, 6, 7)] == [SyncBatchNorm] * 4 + [nn.InstanceNorm1d]
    assert type(net[3][0]) is SyncBatchNorm and net[1] is net[2] and net[1] is net[4][0]
    assert (net[1].eps, net[1].momentum, net[1].training, net[3][0].training) == (0.1, None, False, True)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert_same_bits(dict(net.state_dict()), dict(state))
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)), SyncBatchNorm)
    assert isinstance(net[1], _BatchNorm), "what libraries look for"
    assert type(nn.SyncBatchNorm.convert_sync_batchnorm(net)[1]) is nn.SyncBatchNorm, "and back"


def test_it_is_copied_and_pickled_and_works_in_one_process():
    layer = SyncBatchNorm(3)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    reference, x = nn.BatchNorm1d(3), batch(0, 0, 4, 3)
    for each in (layer, copy.deepcopy(layer), torch.load(file, weights_only=False)):
        expected = copy.deepcopy(reference)
        assert_same_bits(each(x), expected(x))
        assert_same_bits(dict(each.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize(
    ("missing", "momentum"),
    [
        pytest.param(("num_batches_tracked",), 0.1, marks=pytest.mark.long),
        (("num_batches_tracked",), None),
        (("running_mean", "running_var"), 0.1),
        pytest.param(("running_mean", "running_var"), None, marks=pytest.mark.long),
    ],
)
def test_what_a_layer_does_not_track_is_none_as_in_torchs(
    ranks2: RankPool, missing: Sequence[str], momentum: float | None
):
    torchs = _untracked(nn.BatchNorm1d(3, momentum=momentum), missing)
    outputs = torchs(torch.cat([batch(rank, 0, 4, 3) for rank in range(2)])).split(4)
    for (output, state), expected in zip(ranks2.run(_normalized, missing, momentum), outputs, strict=True):
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(state, dict(torchs.state_dict()))


def _untracked(layer: Any, missing: Sequence[str]) -> Any:
    for name in missing:
        setattr(layer, name, None)
    return layer


def _normalized(
    rank: int, world_size: int, missing: Sequence[str], momentum: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    layer = _untracked(SyncBatchNorm(3, momentum=momentum), missing)
    return layer(batch(rank, 0, 4, 3)).detach(), dict(layer.state_dict())


def test_a_group_of_some_ranks(ranks3: RankPool):
    means = ranks3.run(_in_groups)
    assert means[0] == means[2] == pytest.approx(0.1)
    assert means[1] == pytest.approx(0.1)


def _in_groups(rank: int, world_size: int) -> float:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    layer = SyncBatchNorm(1, process_group=groups[rank % 2])
    layer(torch.full((2, 1), float(rank)))
    layer(torch.zeros(0, 1)).sum().backward()  # a batch that is empty on all leaves statistics alone
    assert layer.weight.grad == 0
    return float(layer.running_mean)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "one dimension": (lambda: SyncBatchNorm(3)(torch.zeros(3)), TensorError, r"\[N, C, …\].*\[3\]"),
    "no channels": (lambda: SyncBatchNorm(0)(torch.zeros(3, 0)), TensorError, "C > 0"),
    "one value in all": (
        _one_value := lambda: SyncBatchNorm(3)(torch.zeros(dist.get_rank(), 3)),
        ValueError,
        "more than 1",
    ),
    "channels": (lambda: SyncBatchNorm(3)(torch.zeros(4, 5)), TensorError, r"of 3 channels takes .*; got \[4, 5\]"),
    "lazy": (lambda: SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d()), SettingError, "run a forward first"),
    "backward twice": (lambda: _twice(), RuntimeError, "once_differentiable"),
}


def _twice() -> None:
    x = batch(0, 0, 4, 3).requires_grad_()
    (grad,) = torch.autograd.grad(SyncBatchNorm(3)(x).square().sum(), x, create_graph=True)
    grad.sum().backward()


def test_bad_input_is_an_error_on_every_rank(ranks2: RankPool):
    for case, *of_ranks in zip(BAD, *ranks2.run(_bad_each), strict=True):
        _, error, message = BAD[case]
        for found, text in of_ranks:
            assert found == error.__name__, f"{case}: {found}: {text}"
            with pytest.raises(error, match=message):
                raise error(text)


def _bad_each(rank: int, world_size: int) -> list[tuple[str, str]]:
    return [_bad(rank, world_size, case) for case in BAD]


def _bad(rank: int, world_size: int, case: str) -> tuple[str, str]:
    try:
        BAD[case][0]()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.long
def test_a_rank_that_leaves_the_layer_out_makes_the_others_wait_until_the_timeout():
    (text,) = filter(None, run_ranks(_left_out, 2, check_exit=False))
    assert "all_gather of a SyncBatchNorm over 3 channels failed" in text and "rank 0" in text


def _left_out(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(TransportError) as caught:
            SyncBatchNorm(3, process_group=group)(torch.zeros(2, 3))
    dist.barrier()
    return str(caught.value) if rank == 0 else ""


def test_channels_of_one_rank_that_are_not_the_layers_end_no_other_process():
    """gloo ends the process that receives a message of another size than it waits for."""
    waited, refused = run_ranks(_other_channels, 2, check_exit=False)
    assert waited.startswith("TransportError: rank 0: all_gather of a SyncBatchNorm over 3 channels failed")
    assert refused == "TensorError: SyncBatchNorm of 3 channels takes input [N, 3, …]; got [4, 5]"


def _other_channels(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    with pytest.raises((TensorError, TransportError)) as caught:
        SyncBatchNorm(3, process_group=group)(torch.zeros(4, 5 if rank else 3))
    dist.barrier()
    return f"{caught.type.__name__}: {caught.value}"


def test_layers_of_other_sizes_in_another_order_are_an_error_on_every_rank():
    """gloo ends a process that receives a longer message than it waits for."""
    few, more, many = 3, 5, FIRST_CHANNELS + 1
    each = ((few, more), (more, few), (few, many), (many, few), (many, many + 1))
    for sizes, *texts in zip(each, *run_ranks(_other_orders, 2, each), strict=True):
        for text in texts:
            assert text.startswith("ranks differ in the SyncBatchNorm that they run: "), f"{sizes}: {text}"
            assert f"rank 0 has one of {sizes[0]} channels, rank 1 one of {sizes[1]}" in text


def _other_orders(rank: int, world_size: int, each: tuple[tuple[int, int], ...]) -> list[str]:
    return [_other_order(rank, world_size, sizes) for sizes in each]


def _other_order(rank: int, world_size: int, sizes: tuple[int, int]) -> str:
    with pytest.raises(MismatchError) as caught:
        SyncBatchNorm(sizes[rank])(torch.zeros(2, sizes[rank]))
    return str(caught.value)


def test_a_layer_with_more_channels_than_the_first_message_takes(ranks2: RankPool):
    each = (FIRST_CHANNELS, FIRST_CHANNELS + 1, 3 * FIRST_CHANNELS)
    for channels, *of_ranks in zip(each, *ranks2.run(_many_channels_each, each), strict=True):
        whole = nn.BatchNorm1d(channels, dtype=torch.float64)
        expected = whole(torch.cat([batch(rank, 0, 4, channels).double() for rank in range(2)]))
        for rank, (output, mean) in enumerate(of_ranks):
            assert torch.allclose(output, expected[4 * rank : 4 * rank + 4], rtol=1e-12, atol=1e-12), channels
            assert torch.allclose(mean, whole.running_mean, rtol=1e-12, atol=1e-12), channels


def _many_channels_each(rank: int, world_size: int, each: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [_many_channels(rank, world_size, channels) for channels in each]


def _many_channels(rank: int, world_size: int, channels: int) -> tuple[Tensor, Tensor]:
    layer = SyncBatchNorm(channels, dtype=torch.float64)
    output = layer(batch(rank, 0, 4, channels).double())
    assert layer.running_mean is not None
    return output.detach(), layer.running_mean
