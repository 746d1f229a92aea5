"""Policies: which rule a parameter gets, what strings mean, and who takes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastreduce import FP16, INT4, INT8, Compression, NoCompression, Policy, SettingError, all_reduce_gradients
from fastreduce.hooks import CompressState
from fastreduce.reduction.schedule import Schedule
from fastreduce.transports import LocalTransport
from tests.test_compression import settings

NAMES = ["embed.weight", "norm.weight", "out.weight", "out.bias"]
PARAMETERS = [torch.zeros(100, 64), torch.zeros(64), torch.zeros(10, 64), torch.zeros(10)]
NONE, INT4_EF = NoCompression(), INT4(error_feedback=True)

keys = st.lists(
    st.sampled_from(["*.bias", "norm?", "a.[bc]", "ndim<2", "numel>=4096", "ndim = 3", "x y"]), min_size=1, max_size=3
).map("|".join)


@given(st.lists(st.tuples(keys, settings), min_size=1, max_size=4))
def test_what_a_policy_prints_it_reads_back(rules: list[tuple[str, Compression]]):
    policy = Policy(tuple(rules))
    assert Policy.of(str(policy)) == policy
    assert Policy.of(dict(rules)) == Policy(tuple(dict(rules).items()))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"*": "int8"}, [INT8()] * 4),
        ({"*.bias": "none", "*": INT8()}, [INT8(), INT8(), INT8(), NONE]),
        ({"*.bias|*norm*": "none", "embed*": "fp16", "*": "int4:error_feedback"}, [FP16(), NONE, INT4_EF, NONE]),
        ({"out.*": "fp16", "*.bias|*": "int8"}, [INT8(), INT8(), FP16(), FP16()]),
        ({"ndim<2": "none", "*": "int8"}, [INT8(), NONE, INT8(), NONE]),
        ({"ndim=2|norm.weight": "int8", "numel<=10": "none"}, [INT8(), INT8(), INT8(), NONE]),
        ({"numel >= 640": "int8", "*": "none"}, [INT8(), NONE, INT8(), NONE]),
        ({"out.weight": "int8", "[en]*": "none", "*": "fp16"}, [NONE, NONE, INT8(), FP16()]),
        (" *.bias : none ;*:int8:block=64, error_feedback; ", [INT8(64, True)] * 3 + [NONE]),
        ("auto4", [INT4_EF, FP16(), FP16(), FP16()]),
        (" auto4 ", [INT4_EF, FP16(), FP16(), FP16()]),
    ],
)
def test_the_first_key_that_matches_holds(rules: Any, expected: list[Compression]):
    policy = Policy.of(rules)
    assert isinstance(policy, Policy) and policy.assign(NAMES, PARAMETERS) == expected


def test_a_key_of_one_of_ours_may_match_no_parameter():
    policy = Policy.of("auto4")
    assert isinstance(policy, Policy)
    assert policy.assign(["large alone"], [torch.zeros(100, 64)]) == [INT4_EF]
    assert policy.assign(["small alone"], [torch.zeros(64)]) == [FP16()]


def test_blanks_around_a_key_tell_nothing_and_digits_are_ascii():
    assert Policy.of({" ndim<2 ": "none", "* ": "int8"}) == Policy.of("ndim<2: none; *: int8")
    with pytest.raises(SettingError, match="is no condition"):
        Policy.of("numel>\N{ARABIC-INDIC DIGIT TWO}: none; *: int8")


def test_who_writes_a_setting_wrongly_is_told_of_settings_and_of_policies_where_one_may_be_meant():
    for spec, told in [("int8:blok=64", False), ("int9", True), ("AUTO4", True)]:
        with pytest.raises(SettingError) as raised:
            Policy.of(spec)
        assert ("or a policy, auto4" in str(raised.value)) == told
    assert "did you mean 'auto4'?" in str(raised.value)


def test_a_function_chooses_and_its_errors_name_the_parameter():
    policy = Policy.of(lambda name, parameter: "int8" if parameter.dim() == 2 else FP16())
    assert isinstance(policy, Policy) and policy.assign(NAMES, PARAMETERS) == [INT8(), FP16(), INT8(), FP16()]
    for function, text in [
        (lambda name, parameter: 1 // 0, "of 'embed.weight': ZeroDivisionError"),
        (lambda name, parameter: "int9", "of 'embed.weight': unknown compression 'int9'"),
        (lambda name, parameter: None, "of 'embed.weight': None is no setting"),
    ]:
        with pytest.raises(SettingError, match=text):
            Policy.of(function).assign(NAMES, PARAMETERS)  # type: ignore[union-attr]


def test_what_is_called_may_have_no_hash():
    class Chooser(dict[str, str]):
        def __call__(self, name: str, parameter: torch.Tensor) -> str:
            return self[name]

    policy = Policy(chooser=Chooser(w="int8"))
    assert policy in {policy} and policy.assign(["w"], [torch.zeros(3)]) == [INT8()]


@pytest.mark.parametrize("setting", [FP16, torch.float16, True])
def test_what_is_no_setting_is_an_error_with_all_that_may_be_one(setting: Any):
    with pytest.raises(SettingError, match=r"a Compression such as FP16\(\), a dict of rules or a function, got .*: "):
        Schedule.of(setting)


def test_the_environment_may_hold_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_COMPRESSION", "*.bias: none; *: int8")
    assert str(Policy.of(None)) == "*.bias: none; *: int8"
    monkeypatch.setenv("FASTREDUCE_COMPRESSION", "*.bias: none; *: int9")
    with pytest.raises(SettingError, match="FASTREDUCE_COMPRESSION: the rule '\\*': unknown compression 'int9'"):
        Policy.of(None)


@pytest.mark.parametrize("setting", ["auto4", "*: int8", {"*": "int8"}, "int8:warm_up=3"])
def test_what_knows_no_names_or_steps_refuses_it(setting: Any):
    calls = {
        "all_reduce_gradients": lambda: all_reduce_gradients([torch.zeros(3)], setting, transport=LocalTransport()),
        "CompressState": lambda: CompressState(setting),
    }
    for name, call in calls.items():
        with pytest.raises(SettingError, match=f"{name} |spec string or a Compression, got dict"):
            call()
