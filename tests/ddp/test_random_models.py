"""Property tests: random models, trained a few steps in random ways, end up as under torch's class.

A fixed set of programs is run. To hunt with others, which are shrunk when they fail:
`pytest tests/ddp/test_random_models.py --hypothesis-profile=long --timeout=0`. A failing program is shown as an
expression; `@example(program=…)` keeps it.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings

from tests.support.random_models import Program, check
from tests.support.random_programs import programs
from tests.support.ranks import RankPool


def _examples(count: int) -> settings:
    """`count` fixed examples; under the profile `long` as many as it says, drawn anew and shrunk."""
    if settings.get_current_profile_name() == "long":
        return settings(report_multiple_bugs=False)
    return settings(max_examples=count, derandomize=True, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.long)], ids=["2 ranks", "3 ranks"], scope="session")
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool


def _check(ranks: RankPool, program: Program, setting: str = "none") -> None:
    problems = [problem for of_rank in ranks.run(check, program, setting) for problem in of_rank]
    assert not problems, "\n".join(problems[:12])


@given(program=programs())
@_examples(10)
def test_random_programs_train_as_with_torch(ranks: RankPool, program: Program):
    _check(ranks, program)


@pytest.mark.long
@given(program=programs())
@_examples(40)
def test_more_random_programs_train_as_with_torch(ranks: RankPool, program: Program):
    _check(ranks, program)


@pytest.mark.parametrize(
    "setting", ["int8:error_feedback", *(pytest.param(s, marks=pytest.mark.long) for s in ("fp16", "bf16", "int8"))]
)
@given(program=programs())
@_examples(5)
def test_random_programs_keep_torchs_structure_and_the_formats_bound(ranks: RankPool, setting: str, program: Program):
    _check(ranks, program, setting)


@pytest.mark.long
@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
@given(program=programs())
@_examples(4)
def test_random_programs_train_in_two_levels(ranks21: RankPool, setting: str, program: Program):
    _check(ranks21, program, setting)
