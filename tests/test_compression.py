"""Compression settings: what strings mean, print and refuse, and where they come from."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

from fastreduce import BF16, FP8, FP16, INT4, INT8, Compression, NoCompression, PowerSGD, SettingError, TopK

plain = st.one_of(
    st.builds(NoCompression, accumulate=st.sampled_from(["fp32", "wire"])),
    st.builds(FP16, accumulate=st.sampled_from(["fp32", "wire"])),
    st.builds(BF16, accumulate=st.sampled_from(["fp32", "wire"])),
)
feedback = st.sampled_from([False, True, "8bit", "bf16"])
int8 = st.builds(INT8, block=st.integers(1, 256).map(lambda n: 16 * n), error_feedback=feedback)
int4 = st.builds(INT4, block=st.integers(1, 128).map(lambda n: 32 * n), error_feedback=feedback)
fp8 = st.builds(FP8, block=st.integers(1, 256).map(lambda n: 16 * n), error_feedback=feedback)
seeds = st.integers(0, 2**32 - 1)
stochastic = st.builds(
    lambda kind, seed: kind(rounding="stochastic", seed=seed), st.sampled_from([BF16, INT8, INT4, FP8]), seeds
)
powersgd = st.builds(PowerSGD, rank=st.integers(1, 64), min_compression_rate=st.integers(1, 9))
topk = st.builds(TopK, ratio=st.floats(0, 0.5, exclude_min=True, exclude_max=True), min_numel=st.integers(1, 2**20))
settings = st.one_of(plain, int8, int4, fp8, stochastic, powersgd, topk)


@given(settings)
def test_what_a_setting_prints_it_parses_back(setting: Compression):
    assert Compression.parse(str(setting)) == setting
    assert Compression.resolve(setting) is setting
    assert Compression.resolve(str(setting)) == setting


@pytest.mark.parametrize(
    ("spec", "setting", "prints"),
    [
        ("none", NoCompression(), "none"),
        ("none:accumulate=fp32", NoCompression(accumulate="fp32"), "none:accumulate=fp32"),
        ("none:accumulate=wire", NoCompression(), "none"),
        ("fp16", FP16(), "fp16"),
        ("fp16:accumulate=fp32", FP16(), "fp16"),
        (" bf16 : accumulate=wire ".replace(" :", ":"), BF16(accumulate="wire"), "bf16:accumulate=wire"),
        ("int8", INT8(), "int8"),
        ("int8:block=128,error_feedback", INT8(error_feedback=True), "int8:error_feedback"),
        ("int8:error_feedback=true, block=64", INT8(64, True), "int8:block=64,error_feedback"),
        ("int8:error_feedback=0", INT8(), "int8"),
        ("int8:error_feedback=8bit", INT8(error_feedback="8bit"), "int8:error_feedback=8bit"),
        ("int4:error_feedback=bf16,block=64", INT4(64, "bf16"), "int4:block=64,error_feedback=bf16"),
        ("int4:block=32", INT4(), "int4"),
        ("fp8:error_feedback", FP8(error_feedback=True), "fp8:error_feedback"),
        ("int4:block=64,error_feedback", INT4(64, True), "int4:block=64,error_feedback"),
        ("int8:rounding=nearest", INT8(), "int8"),
        ("powersgd:rank=4", PowerSGD(), "powersgd"),
        ("powersgd:min_compression_rate=1,rank=2", PowerSGD(2, 1), "powersgd:rank=2,min_compression_rate=1"),
        ("topk:ratio=0.01", TopK(), "topk"),
        ("topk:min_numel=1,ratio=1e-3", TopK(0.001, 1), "topk:ratio=0.001,min_numel=1"),
        ("bf16:rounding=stochastic", BF16(rounding="stochastic"), "bf16:rounding=stochastic"),
        ("int4:seed=7,rounding=stochastic", INT4(rounding="stochastic", seed=7), "int4:rounding=stochastic,seed=7"),
        (
            "int8:warm_up=3,rounding=stochastic,block=64",
            INT8(64, rounding="stochastic", warm_up=3),
            "int8:block=64,rounding=stochastic,warm_up=3",
        ),
    ],
)
def test_specs_mean_what_they_say(spec: str, setting: Compression, prints: str):
    assert Compression.parse(spec) == setting
    assert str(setting) == prints


@pytest.mark.parametrize(
    ("spec", "names", "allowed"),
    [
        ("", "''", "none, fp16, bf16, int8, fp8, int4"),
        ("fp32", "'fp32'", "none, fp16, bf16, int8, fp8, int4"),
        ("FP16", "'FP16'", "none, fp16, bf16, int8, fp8, int4"),
        ("fp16:", "''", "accumulate"),
        ("fp16:block=64", "'block=64'", "accumulate"),
        ("int8:accumulate=wire", "'accumulate=wire'", "block, error_feedback"),
        ("int8:blok=64", "'blok=64'", "block, error_feedback"),
        ("fp16:accumulate=fp64", "'fp64'", "fp32, wire"),
        ("fp16:accumulate", "'accumulate'", "accumulate="),
        ("fp16:accumulate=", "''", "fp32, wire"),
        ("int8:block", "'block'", "block="),
        ("int8:block=", "'block='", "whole number"),
        ("int8:block=1e2", "'block=1e2'", "whole number"),
        ("int8:block=-16", "'block=-16'", "whole number"),
        ("int8:block=²", "'block=²'", "whole number"),
        ("int8:block=0", "0", "multiples of 16 from 16 to 4096"),
        ("int8:block=100", "100", "multiples of 16 from 16 to 4096"),
        ("int4:block=48", "48", "multiples of 32 from 32 to 4096"),
        ("int4:accumulate=wire", "'accumulate=wire'", "block, error_feedback"),
        ("int8:block=8192", "8192", "multiples of 16 from 16 to 4096"),
        ("int8:block=64,block=128", "'block'", "twice"),
        ("int8:error_feedback=perhaps", "'error_feedback=perhaps'", "=true or =false"),
        ("int8:error_feedback=16bit", "'error_feedback=16bit'", "=8bit, =bf16, =true or =false"),
        ("fp8:rounding=stochastic,error_feedback=8bit", "error_feedback", "take one of them"),
        ("int8:block=64,,error_feedback", "''", "block, error_feedback"),
        ("int8:block=64;error_feedback", "'block=64;error_feedback'", "whole number"),
        ("int8:rounding=up", "'up'", "nearest, stochastic"),
        ("fp16:rounding=stochastic", "'rounding=stochastic'", "accumulate, warm_up"),
        ("none:rounding=stochastic", "'rounding=stochastic'", "accumulate, warm_up"),
        ("int8:rounding=stochastic,seed=4294967296", "seed=4294967296", "below 2^32"),
        ("int8:seed=3", "seed=3", "without rounding=stochastic"),
        ("int8:rounding=stochastic,error_feedback", "error_feedback", "take one of them"),
        ("powersgd:rank=0", "rank=0", "whole numbers from 1 on"),
        ("powersgd:min_compression_rate=0", "min_compression_rate=0", "whole numbers from 1 on"),
        ("powersgd:error_feedback", "'error_feedback'", "powersgd takes: rank, min_compression_rate, warm_up"),
        ("topk:ratio=0", "ratio=0.0", "above 0 and below 0.5"),
        ("topk:ratio=1", "ratio=1.0", "above 0 and below 0.5"),
        ("topk:ratio=1e999", "ratio=inf", "above 0 and below 0.5"),
        ("topk:ratio=nan", "'ratio=nan'", "needs a number"),
        ("topk:ratio=1%", "'ratio=1%'", "needs a number"),
        ("topk:ratio", "'ratio'", "needs a value"),
        ("topk:min_numel=0", "min_numel=0", "whole numbers from 1 on"),
        ("topk:error_feedback", "'error_feedback'", "topk takes: ratio, min_numel, warm_up"),
        ("bf16:rounding=stochastic,accumulate=wire", "accumulate=wire", "accumulate=fp32"),
        ("FP16", "'FP16', did you mean 'fp16'?", "none, fp16"),
        ("top-k:ratio=0.1", "'top-k' in 'top-k:ratio=0.1', did you mean 'topk'?", "none, fp16"),
        ("int8,error_feedback", "options stand behind a colon, 'int8:error_feedback'", "none, fp16"),
        ("none,fp16", "a list of settings where one is asked for", "none, fp16"),
        ("int8:block=64:error_feedback", "two colons", "'int8:block=64,error_feedback'"),
        ("int8:" + ":" * 9000, "two colons", "commas"),
    ],
)
def test_a_bad_spec_names_the_piece_and_what_is_allowed(spec: str, names: str, allowed: str):
    with pytest.raises(SettingError) as caught:
        Compression.parse(spec)
    assert names in str(caught.value) and allowed in str(caught.value)


LONG = ["int8:block=" + "1" * 4300, "int8:block=" + "1" * 4301, "int8:block=" + "0" * 5000 + "64", "x" * 9000]
LONG += [f"{name}:{key}={'y' * 9000}" for name in ("fp16", "int8") for key in ("accumulate", "error_feedback", "block")]
LONG += ["topk:ratio=" + "1" * 5000, "topk:ratio=0." + "0" * 5000, "topk:ratio=" + "9" * 5000 + "x"]


@pytest.mark.parametrize("spec", LONG, ids=lambda spec: f"{spec[:20]}, {len(spec)}")
def test_an_endless_spec_is_a_setting_error_of_readable_length(spec: str):
    with pytest.raises(SettingError) as caught:
        Compression.parse(spec)
    assert len(str(caught.value)) < 400


def test_an_endless_number_is_a_setting_error_of_readable_length():
    for block in (10**4000, 10**5000):
        with pytest.raises(SettingError, match="multiples of 16") as caught:
            INT8(block=block)
        assert len(str(caught.value)) < 400


_pieces = st.sampled_from(
    ["fp16", "int8", ":", ",", "=", "block", "accumulate", "error_feedback", "rounding", "seed", "stochastic", "64"]
)


@given(st.one_of(st.text(max_size=30), st.lists(st.one_of(_pieces, st.text(max_size=3)), max_size=9).map("".join)))
@example("int8:block=٣٢")
@example("int8:\x00")
@example("int8:block=" + "1" * 5000)
def test_any_text_parses_or_is_a_setting_error(text: str):
    try:
        setting = Compression.parse(text)
    except SettingError:
        return
    assert Compression.parse(str(setting)) == setting


@given(
    st.sampled_from(["none", "fp16", "bf16", "int8", "fp8", "int4"]),
    st.lists(
        st.tuples(
            st.sampled_from(["block", "accumulate", "error_feedback", "rounding", "seed"]),
            st.one_of(
                st.sampled_from(["", "=", "=fp32", "=wire", "=64", "=true", "=8bit", "=stochastic"]),
                st.text(max_size=5),
            ),
        ),
        max_size=3,
    ),
)
def test_any_options_parse_or_are_a_setting_error(name: str, options: list[tuple[str, str]]):
    try:
        setting = Compression.parse(name + ":" + ",".join(key + value for key, value in options))
    except SettingError:
        return
    assert Compression.parse(str(setting)) == setting


def test_a_matrix_travels_as_factors_where_torchs_hook_sends_them():
    for rows, columns, rank, rate in itertools.product(range(1, 9), range(1, 9), (1, 2), (1, 2)):
        torchs, _, _ = _should_compress(rows, columns, rank, rate)
        assert PowerSGD(rank, rate).compresses(rows, columns) == torchs, (rows, columns, rank, rate)


def test_top_k_takes_what_was_written_of_a_gradient_or_all_of_it():
    assert [TopK(0.07, 1).count(numel) for numel in (100, 101, 14, 1, 0)] == [7, 8, 1, 0, 0]
    assert [TopK().count(numel) for numel in (1023, 1024, 2**31)] == [0, 11, 21474837]
    assert TopK(0.49, 1).count(100) == 49 and TopK(0.49, 1).count(10) == 0, "smaller without places"


@pytest.mark.parametrize("make", [lambda: INT8(block=100), lambda: INT8(block=64.0), lambda: INT8(block=True)])  # type: ignore[arg-type]
def test_dataclasses_refuse_what_specs_refuse(make: Any):
    with pytest.raises(SettingError, match="multiples of 16"):
        make()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: INT8(warm_up=True), "warm_up=True in 'int8'"),
        (lambda: BF16(rounding="stochastic", seed=True), "seed=True in 'bf16'"),
        (lambda: PowerSGD(rank=True), "rank=True in 'powersgd'"),
        (lambda: TopK(min_numel=True), "min_numel=True in 'topk'"),
        (lambda: INT8(flat="no"), "flat='no' in 'int8'; allowed: True, False"),  # type: ignore[arg-type]
        (lambda: NoCompression(flat=1), "flat=1 in 'none'; allowed: True, False"),  # type: ignore[arg-type]
    ],
)
def test_dataclasses_refuse_values_whose_text_would_not_be_read_back(make: Any, named: str):
    with pytest.raises(SettingError, match=re.escape(named)):
        make()


def test_dataclasses_refuse_an_unknown_accumulator():
    with pytest.raises(SettingError, match="fp32, wire"):
        FP16(accumulate="fp64")


@pytest.mark.parametrize("kept", ["fp32", 8, torch.bfloat16, ["8bit"]])
def test_dataclasses_refuse_what_residuals_cannot_be_kept_in(kept: Any):
    with pytest.raises(SettingError, match="allowed: True, False, '8bit', 'bf16'"):
        INT8(error_feedback=kept)


def test_settings_are_values():
    assert INT8() == INT8() and hash(INT8()) == hash(INT8()) and INT8() != INT8(64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        INT8().block = 64  # type: ignore[misc]


def test_without_a_setting_the_environment_decides_and_else_nothing_is_compressed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FASTREDUCE_COMPRESSION", raising=False)
    assert Compression.resolve(None) == NoCompression()
    monkeypatch.setenv("FASTREDUCE_COMPRESSION", "")
    assert Compression.resolve(None) == NoCompression()
    monkeypatch.setenv("FASTREDUCE_COMPRESSION", "int8:block=64")
    assert Compression.resolve(None) == INT8(64)
    assert Compression.resolve("fp16") == FP16(), "an argument comes first"
    monkeypatch.setenv("FASTREDUCE_COMPRESSION", "int9")
    with pytest.raises(SettingError, match="int9"):
        Compression.resolve(None)


@pytest.mark.parametrize("value", [16, b"fp16", FP16, ["fp16"], True])
def test_what_is_neither_text_nor_a_setting_is_refused(value: Any):
    with pytest.raises(SettingError, match=type(value).__name__):
        Compression.resolve(value)


@given(settings, st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
def test_what_a_setting_tells_the_pipeline_fits_together(setting: Compression, dtype: torch.dtype):
    wire = setting.wire_dtype(dtype)
    assert (wire is torch.uint8) == (setting.block > 0 or (setting.name == "fp16" and dtype is not torch.float16))
    assert setting.alignment % max(setting.block, 1) == 0 and setting.alignment >= 8
    assert setting.two_shot or not setting.block, "a transport cannot sum quantized wires"
    assert not setting.error_feedback or setting.two_shot or isinstance(setting, (PowerSGD, TopK))
