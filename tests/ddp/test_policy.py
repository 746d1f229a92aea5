"""A policy: buckets by setting, and everything that a wrapper does with one setting, with several."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastreduce import FastreduceError, load_checkpoint, save_checkpoint
from tests.support.commands import ROOT
from tests.support.models import Grads, assert_same_bits, batch, grads_of, mlp, wrap
from tests.support.ranks import RankPool
from tests.support.snapshots import Training, switch_and_resume

BY_NAME = {"*.bias": "none:accumulate=fp32", "0.*|2.*": "bf16", "*": "int8"}
FEEDBACK = "ndim<2: fp16; 0.weight: int4:error_feedback; *: int8:error_feedback"


def _choose(name: str, parameter: Tensor) -> str:
    return "none:accumulate=fp32" if name.endswith("bias") else "bf16" if name[:2] in ("0.", "2.") else "int8"


def _backward(ddp: Any, rank: int, step: int) -> Grads:
    ddp.zero_grad()
    ddp(batch(rank, step, 4, 20)).square().mean().backward()
    return grads_of(ddp.module)


def _of(rank: int, world_size: int, setting: Any, options: dict[str, Any]) -> tuple[list[Grads], dict[str, str], str]:
    torch.manual_seed(0)
    ddp = wrap("ours", mlp(), compression=setting, **options)
    found = [_backward(ddp, rank, step) for step in range(3)]
    assert [len({ddp.compression_by_parameter()[s.name] for s in b.slots}) for b in ddp.reducer.plan.buckets] == [
        1 for _ in ddp.reducer.plan.buckets
    ]
    return found, ddp.compression_by_parameter(), ddp._get_ddp_logging_data()["compression_by_parameter"]


def _of_each(rank: int, world_size: int, ways: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    return [_of(rank, world_size, setting, options) for setting, options in ways]


def test_each_parameter_has_the_bits_of_its_setting(ranks: RankPool):
    alone = ("none:accumulate=fp32", "bf16", "int8")
    policies = (BY_NAME, _choose, "*.bias: none:accumulate=fp32; 0.*|2.*: bf16; *: int8")
    ways = list(itertools.product(policies, ({}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True})))
    for found in ranks.run(_of_each, [*((setting, {}) for setting in alone), *ways]):
        expected = dict(zip(alone, found, strict=False))
        for (given, options), (grads, settings, text) in zip(ways, found[len(alone) :], strict=True):
            assert set(settings.values()) == set(alone)
            for step, of in enumerate(grads):
                for name, grad in of.items():
                    assert settings[name] == _choose(name, torch.zeros(()))
                    where = f"{given}, {options}: {name}, step {step}"
                    assert_same_bits(grad, expected[settings[name]][0][step][name], where)
            assert "bf16: " in text and "0.weight" in text


def _differing(rank: int, world_size: int, given: Any, later: bool) -> str:
    try:
        ddp = wrap("ours", mlp(), compression="none" if later else given[rank])
        if later:
            ddp.set_compression(given[rank])
    except FastreduceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("later", [False, True], ids=["wrapped", "set"])
def test_ranks_that_differ_are_told_of_the_first_difference(ranks2: RankPool, later: bool):
    given = [{"0.weight": "none", "*": "int8"}, {"0.bias": "none", "*": "int8"}]
    for text in ranks2.run(_differing, given, later):
        assert text.startswith("MismatchError: ranks differ in compression: rank 0 has 0.weight: none"), text
    for text in ranks2.run(_differing, [_by_rank, _by_rank], later):
        assert text.startswith("MismatchError: ranks differ in compression of '2.weight': rank 0 has int8"), text


@pytest.mark.parametrize("later", [False, True], ids=["wrapped", "set"])
def test_a_policy_that_fits_on_one_rank_only_is_an_error_on_both(ranks2: RankPool, later: bool):
    first, second = ranks2.run(_differing, ["int8", {"0.*": "int8"}], later)
    assert first.startswith("MismatchError: rank 1 could not be set up: SettingError: parameter '2.weight'"), first
    assert second.startswith("SettingError: parameter '2.weight' matches no key"), second


def _by_rank(name: str, parameter: Tensor) -> str:
    return "int8" if name != "2.weight" or torch.distributed.get_rank() == 0 else "bf16"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"0.*": "int8", "other*": "bf16", "*": "none"},
            "the key 'other*' of the policy, for 'bf16', matches no param",
        ),
        ({"0.*": "int8"}, "parameter '2.weight' matches no key: '0.*'; '*' matches all"),
        ({"*": "int9"}, "the rule '*': unknown compression 'int9'"),
        ({"*": "int8:warm_up=3"}, "warm_up in a policy's rule 'int8:warm_up=3'"),
        pytest.param(
            {"ndim<two": "int8"}, "'ndim<two' in the key 'ndim<two' of a policy is no condition", marks=pytest.mark.long
        ),
        ("ndims<2: none; *: int8", "'ndims<2' in the key 'ndims<2' of a policy is no condition"),
        pytest.param(
            {"other*": "bf16", "*": "none"}, "matches no parameter; there are: 0.weight, ", marks=pytest.mark.long
        ),
        ("auto", "or a policy, auto4 or 'key: setting; key: setting', did you mean 'auto4'?"),
        ({"": "int8"}, "the key '' of a policy"),
        ({"*": 3}, "the rule '*': 3 is no setting"),
        ("*: int8; none", "'none' in '*: int8; none' is no rule"),
        pytest.param(
            "int8,warm_up=2",
            "'int8,warm_up=2': options stand behind a colon, 'int8:warm_up=2'; allowed: ",
            marks=pytest.mark.long,
        ),
        ("int8 , block=64:error_feedback", "options stand behind a colon, 'int8:block=64'; allowed: "),
        ("auto4,warm_up=100", "auto4 is a policy, and takes no arguments"),
        pytest.param("auto4:error_feedback", "auto4 is a policy, and takes no arguments", marks=pytest.mark.long),
    ],
)
def test_a_policy_that_does_not_fit_says_where(ranks2: RankPool, given: Any, text: str):
    for of_rank in ranks2.run(_misfit, given):
        for found in of_rank:
            assert found.startswith("SettingError") and text in found, found


def _misfit(rank: int, world_size: int, given: Any) -> list[str]:
    """What is raised where it is given to a new wrapper, and to one that has another setting."""
    return [_differing(rank, world_size, [given, given], later) for later in (False, True)]


# With everything else


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(FEEDBACK, FEEDBACK, marks=pytest.mark.long),
        ("int8:error_feedback", FEEDBACK),
        pytest.param(FEEDBACK, "none", marks=pytest.mark.long),
        (FEEDBACK, "0.weight: none; *: int4:error_feedback"),
    ],
)
def test_checkpoints_clipping_and_switches_work_with_policies(ranks: RankPool, old: str, new: str, tmp_path: Path):
    for switched, resumed in ranks.run(switch_and_resume, old, new, 3, tmp_path / "s.pt"):
        assert_same_bits(resumed, switched)


def _elsewhere(rank: int, world_size: int, path: Path, saves: bool) -> dict[str, Tensor]:
    training = Training(FEEDBACK)
    if saves:
        training.steps(3)
        save_checkpoint(path, **training.parts())
    else:
        load_checkpoint(path, **training.parts())
    found: dict[str, Tensor] = training.model.reducer.state_dict()["residuals"]
    training.steps(1)
    return found


def test_residuals_are_loaded_at_another_world_size(ranks2: RankPool, ranks3: RankPool, tmp_path: Path):
    old = ranks3.run(_elsewhere, tmp_path / "s.pt", True)
    for kept in ranks2.run(_elsewhere, tmp_path / "s.pt", False):
        assert kept.keys() == old[0].keys() and all(value.any() for value in kept.values())


# auto4


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.out = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.block(self.embed(tokens)))


def _sent(rank: int, world_size: int, setting: str) -> tuple[int, dict[str, str]]:
    ddp = wrap("ours", _Transformer(), compression=setting)
    ddp(torch.arange(64).view(4, 16)).square().mean().backward()
    return ddp.reducer.sent_bytes, ddp.compression_by_parameter()


def test_auto4_sends_less_than_int8_and_keeps_small_ones_in_16_bits(ranks2: RankPool):
    sent, settings = ranks2.run(_sent, "auto4")[0]
    assert 1.3 * sent <= ranks2.run(_sent, "int8")[0][0]
    assert settings["block.norm1.weight"] == settings["out.bias"] == "fp16"
    assert settings["embed.weight"] == settings["block.linear1.weight"] == "int4:error_feedback"
    assert set(ranks2.run(_tiny)[0].values()) == {"fp16"}, "though a rule matches nothing"


def _tiny(rank: int, world_size: int) -> dict[str, str]:
    found: dict[str, str] = wrap("ours", nn.Linear(3, 3), compression="auto4").compression_by_parameter()
    return found


# The documentation


def _code(rank: int, world_size: int, code: str) -> str:
    names: dict[str, Any] = {}
    exec(compile(code, "which-setting.md", "exec"), names)
    return str(names["ddp"].compression)


def test_the_code_in_the_documentation_runs(ranks2: RankPool):
    text = (
        (ROOT / "docs" / "which-setting.md").read_text().replace('torch.distributed.init_process_group("gloo")\n', "")
    )
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "ddp" in block]
    policy = "*.bias|ndim<2: none; 0.*: bf16; *: int4:error_feedback"
    assert [ranks2.run(_code, block)[0] for block in blocks] == [policy, "none"]


def _infinite_elsewhere(rank: int, world_size: int) -> None:
    """A bucket without error feedback is not finite in a step that nobody is known to have applied."""
    ddp, kept = wrap("ours", mlp(), compression={"0.*": "int8", "*": "int8:error_feedback"}), []
    for step in range(3):  # behind the first one buckets are laid out anew
        if step == 2 and rank == 0:
            ddp.module[0].bias.register_hook(lambda grad: grad * torch.inf)
        _backward(ddp, rank, step)
        kept.append([feedback.settled()[:2] for feedback in ddp.reducer.buckets.feedbacks])
    assert_same_bits(kept[2], kept[1])


def test_a_step_that_is_not_finite_counts_for_no_bucket_whatever_its_setting(ranks2: RankPool):
    ranks2.run(_infinite_elsewhere)
