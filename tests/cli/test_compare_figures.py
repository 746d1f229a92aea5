"""What `fastreduce compare` of a script concludes: equivalence by hand-computed cases, verdicts, what is missing."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fastreduce.cli.compare import results
from fastreduce.cli.compare.curves import STRETCHES
from fastreduce.cli.compare.intervals import Estimate
from fastreduce.cli.compare.script import measure, plot, quality, speed
from fastreduce.cli.compare.script.equivalence import MOST_SEEDS, Equivalence, compare, seeds_needed
from fastreduce.cli.compare.script.plan import AGAIN, BASE, Plan
from fastreduce.cli.compare.script.quality import Outcome
from fastreduce.cli.compare.script.report import Findings, Summary
from fastreduce.cli.compare.script.speed import Speed, Turn
from fastreduce.cli.compare.script.trainings import file_name
from fastreduce.cli.compare.script.verdicts import gain, judge, say_difference
from fastreduce.cli.ending import signals_end_ranks, signals_wait

PLAN = Plan(
    words=("train.py",),
    module=False,
    settings=("none", "int8"),
    ranks=2,
    rounds=6,
    steps=2,
    out=Path("out"),
    trains=True,
    length=0,
    seeds=(0, 1, 2),
    margin=0.01,
    target=None,
    timeout=300.0,
    metric_line=None,
    metric_file=None,
)

# Equivalence


def test_an_interval_is_students_with_the_tables_quantile():
    """Differences of 0.2, 0.4 and 0.6 %: mean 0.4, scatter 0.2, t(0.95, 2) = 2.920: 0.4 ± 2.920 · 0.2 / √3 = 0.337."""
    found = compare([1.002, 1.004, 1.006], [1.0, 1.0, 1.0], margin=0.01)
    assert (found.difference, found.low, found.high) == pytest.approx((0.004, 0.000628, 0.007372), abs=1e-6)
    assert found.verdict == "equal" and found.seeds is None
    assert compare([1.002, 1.004, 1.006], [1.0, 1.0, 1.0], margin=0.007).verdict == "undecided"


def test_differences_are_paired_by_seed_and_relative_to_the_baselines_mean():
    found = compare([2.02, 4.02], [2.0, 4.0], margin=0.01)
    assert (found.difference, found.low, found.high) == pytest.approx((0.02 / 3,) * 3)
    assert found.verdict == "equal"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([1.05, 1.051, 1.049], "higher"),
        ([0.95, 0.951, 0.949], "lower"),
        ([1.009, 1.011, 1.010], "undecided"),
        ([0.99, 1.01, 1.0], "undecided"),
        ([1.0, 1.0, 1.0], "equal"),
        ([1.0, math.nan, 1.0], "higher"),
        ([1.0, 1.0, math.inf], "higher"),
    ],
)
def test_verdicts_of_equivalence(ours: list[float], verdict: str):
    assert compare(ours, [1.0, 1.0, 1.0], margin=0.01).verdict == verdict


def test_one_seed_shows_equality_by_its_bits_only():
    assert compare([1.0], [1.0], margin=0.01).verdict == "equal"
    found = compare([1.0001], [1.0], margin=0.01)
    assert found.verdict == "undecided" and math.isnan(found.low) and found.seeds is None


def test_a_baseline_that_diverges_decides_nothing():
    assert compare([1.0, 1.0], [math.nan, 1.0], margin=0.01).verdict == "undecided"


def test_seeds_needed():
    """By Student's quantiles: (1.812 + 1.372) / √11 = 0.960, (1.833 + 1.383) / √10 = 1.017; the distance is 1."""
    assert seeds_needed(0.0, 0.01, 0.01) == 11
    assert seeds_needed(0.005, 0.01, 0.01) > seeds_needed(0.0, 0.01, 0.01)
    # Beyond the margin one side is open: (1.895 + 0.896) / √8 = 0.987; for n = 7 (1.943 + 0.906) / √7 = 1.077.
    assert seeds_needed(0.02, 0.01, 0.01) == 8
    assert seeds_needed(0.01, 0.01, 0.01) == MOST_SEEDS + 1


def test_risks_are_as_small_as_they_are_said_to_be():
    """At the margin itself, equality and its opposite are each claimed in 5 % of cases: of 2000, 4 sigma are 39."""
    drawn = np.random.default_rng(0).normal(0.01, 0.004, size=(2000, 5))
    verdicts = [compare((1 + sample).tolist(), [1.0] * 5, 0.01).verdict for sample in drawn]
    assert verdicts.count("equal") == pytest.approx(100, abs=39)
    assert verdicts.count("higher") == pytest.approx(100, abs=39)


# Quality


def _outcomes(losses: dict[str, list[float]], metrics: dict[str, list[float]] | None = None) -> list[Outcome]:
    return [
        Outcome(
            name,
            seed,
            [2.0] * 18 + [final] * 2,
            [0.1 * i for i in range(20)],
            (metrics or {}).get(name, [None] * 9)[seed],
        )
        for name, finals in losses.items()
        for seed, final in enumerate(finals)
    ]


def test_the_result_of_a_training_is_its_last_tenth():
    none, int8 = quality.summarise(PLAN, _outcomes({"none": [1.0, 1.1, 1.2], "int8": [1.001, 1.1, 1.199]}))
    assert none.final == pytest.approx(1.1) and none.loss is None
    assert int8.loss is not None and int8.loss.verdict == "equal" and int8.loss.difference == pytest.approx(0, abs=1e-9)


def test_a_target_is_reached_by_the_mean_of_ten_steps():
    outcome = Outcome("none", 0, [2.0] * 10 + [1.0] * 10, [float(i) for i in range(20)])
    assert outcome.reaches(1.5) == (15, 14.0)
    assert outcome.reaches(2.0) == (10, 9.0)
    assert outcome.reaches(0.9) is None
    target = replace(PLAN, target=1.5)
    assert quality.summarise(target, [outcome])[0].target_steps == 15


def test_seeds_that_change_nothing_are_no_seeds():
    plan = replace(PLAN, settings=("none", AGAIN, "int8"))
    same = _outcomes({"none": [1.0] * 3, AGAIN: [1.0] * 3, "int8": [1.001] * 3})
    none, again, int8 = quality.summarise(plan, same)
    assert again.loss is not None and again.loss.verdict == "equal"
    assert int8.loss is None and "pass it {seed}" in int8.note
    (_, verdict) = judge(plan, {}, {BASE: none, AGAIN: again, "int8": int8})
    assert verdict.word == "is undecided" and "all seeds gave none the same loss" in verdict.sentence


def test_whether_seeds_change_anything_is_known_behind_the_second_training_under_none():
    assert quality.are_alike(_outcomes({"none": [1.0] * 2}))
    assert not quality.are_alike(_outcomes({"none": [1.0]}))
    assert not quality.are_alike(_outcomes({"none": [1.0, 1.1], "int8": [1.0] * 2}))


def test_only_seeds_of_both_are_paired():
    found = quality.summarise(PLAN, _outcomes({"none": [1.0, 1.1], "int8": [1.0]}))[1]
    assert found.seeds == [0] and len(found.outcomes) == 1


def _begun(setting: str, seed: int, first: float, steps: int) -> Outcome:
    return Outcome(setting, seed, [first] + [1.0] * (steps - 1), [0.1 * i for i in range(steps)])


@pytest.mark.parametrize(
    ("first", "steps", "said"),
    [
        (2.01, 20, ""),
        (1.5, 20, "with seed 1 it begins at 1.5 and none at 2, though nothing has been reduced by then"),
        (math.nan, 20, ""),
        (2.0, 10, "with seed 1 it took 10 steps, and none 20"),
        (2.1, 20, ""),  # another batch, say, of a training that gains 1
        (2.0, 19, ""),
    ],
)
def test_trainings_that_are_no_pair_are_not_tested(first: float, steps: int, said: str):
    """As where the script goes on from the checkpoint that another training has left."""
    begun = [_begun(BASE, 0, 2.0, 30), _begun("int8", 0, 2.0, 30), _begun(BASE, 1, 2.0, 20)]
    found = quality.summarise(PLAN, [*begun, _begun("int8", 1, first, steps)])
    (verdict,) = judge(PLAN, {}, {each.setting: each for each in found if each.outcomes})
    if said:
        assert found[1].loss is None and said in found[1].note
        assert verdict.sentence.startswith(f"int8 is undecided: loss not tested: {said}")
    else:
        assert verdict.word == "is equal" and found[1].note == f"trainings took {steps} to 30 steps"


def test_losses_that_begin_at_nothing_are_a_pair():
    """As of a policy's gradient: first losses are roundings."""
    begun = [Outcome(n, 0, [first] + [-1.0] * 19, [0.0] * 20) for n, first in ((BASE, 1.1e-9), ("int8", -7e-10))]
    plan = replace(PLAN, margin=0.0)
    assert quality.summarise(plan, begun)[1].note == ""


def test_means_and_curves_are_of_the_seeds_that_all_have():
    none, int8 = quality.summarise(PLAN, _outcomes({"none": [1.0, 9.0], "int8": [1.0]}))
    assert none.final == int8.final == 1.0 and len(none.outcomes) == len(int8.outcomes) == 1


# Speed


def _turns(seconds: dict[str, float], rounds: int = 6) -> list[Turn]:
    """On a machine that slows down; rank 1 is the slower one."""
    return [
        Turn(r, name, [[0.9 * s * (1 + r)] * 2, [s * (1 + r)] * 2])
        for r in range(rounds)
        for name, s in seconds.items()
    ]


def test_ratios_are_paired_by_round_and_take_the_slowest_rank():
    turns = _turns({BASE: 0.1, AGAIN: 0.1, "int8": 0.06, "torch": 0.12})
    none, again, int8, torch = speed.summarise(PLAN.contestants, turns)
    assert [each.contestant for each in (none, again, int8, torch)] == [BASE, AGAIN, "int8", "torch"]
    assert none.step == pytest.approx(350)
    assert (int8.ratio.low, int8.ratio.median, int8.ratio.high) == pytest.approx((0.6,) * 3)
    assert int8.ratio_to_torch is not None and int8.ratio_to_torch.median == pytest.approx(0.5)


def test_rounds_that_are_not_complete_do_not_count():
    lines = [{"turn": i, "contestant": "", "seconds": [[0.1]]} for i in range(2 * 6 + 3)]
    plan = replace(PLAN, settings=("none", "int8"))
    lines.insert(0, {"missing": {"torch:bf16": "of NCCL"}})
    found = speed.read_rotation(plan.contestants, lines)
    assert len(found) == 12 and {turn.round for turn in found} == {0, 1}
    assert {turn.contestant for turn in found} == {"none", AGAIN, "int8", "torch", "torch:fp16", "no reduction"}
    assert [turn.contestant for turn in found[:6]] != [turn.contestant for turn in found[6:]]


def test_a_round_that_has_begun_is_missing_until_all_had_their_turn():
    """As where a training fails of those that alternate."""
    turns = [*_turns({BASE: 0.1, "int8": 0.06}, rounds=2), Turn(2, BASE, [[0.1] * 2] * 2)]
    (found,) = speed.summarise([BASE], turns)
    said = measure._what_is_missing(
        replace(PLAN, trains=False), Findings(turns=turns, apart="the script trains in join()")
    )
    assert (found.rounds, said) == (2, "4 of 6 rounds of speed")


CONTROL = Estimate(1.0, 0.97, 1.02)


@pytest.mark.parametrize(
    ("ratio", "control", "said"),
    [
        ((0.62, 0.58, 0.66), CONTROL, "faster"),
        ((0.97, 0.90, 1.02), CONTROL, "undecided"),
        ((0.97, math.nan, math.nan), CONTROL, "undecided"),
        ((1.00, 0.99, 1.03), CONTROL, "not faster"),
        ((1.20, 1.10, 1.30), CONTROL, "not faster"),
        ((0.95, 0.93, 0.97), CONTROL, "faster"),
        ((0.95, 0.93, 0.97), Estimate(0.96, 0.94, 0.99), "undecided"),  # as far off as the control
        ((0.80, 0.78, 0.82), Estimate(0.96, 0.94, 0.99), "faster"),
        ((1.05, 1.03, 1.07), Estimate(1.05, 1.02, 1.08), "undecided"),
        ((1.20, 1.15, 1.25), Estimate(1.05, 1.02, 1.08), "not faster"),
    ],
)
def test_a_gain_must_be_beyond_the_control(ratio: tuple[float, float, float], control: Estimate, said: str):
    assert gain(Estimate(*ratio), control) == said


# Verdicts

EQUAL = Equivalence(0.001, -0.002, 0.004, "equal")
FAST, SLOW, OPEN = Estimate(0.62, 0.58, 0.66), Estimate(1.2, 1.1, 1.3), Estimate(0.97, 0.9, 1.02)


@pytest.mark.parametrize(
    ("ratio", "loss", "sentence"),
    [
        (FAST, EQUAL, "int8 pays: step 0.62 (0.58–0.66) of none; loss equal within 1 %: +0.10 % (-0.20 to +0.40)."),
        (FAST, None, "int8 is faster: step 0.62 (0.58–0.66) of none; loss not compared, --train does."),
        (
            FAST,
            Equivalence(0.03, 0.02, 0.04, "higher"),
            "int8 does not pay: step 0.62 (0.58–0.66) of none; loss higher by more than 1 %: +3.00 % (+2.00 to +4.00).",
        ),
        (
            FAST,
            Equivalence(0.008, -0.005, 0.021, "undecided", 9),
            "int8 is undecided: step 0.62 (0.58–0.66) of none; "
            "loss +0.80 % (-0.50 to +2.10) against a margin of 1 %: about 9 seeds would decide.",
        ),
        (FAST, Equivalence(-0.03, -0.04, -0.02, "lower"), "int8 pays: step 0.62 (0.58–0.66) of none; loss lower"),
        (SLOW, EQUAL, "int8 does not pay: step 1.20 (1.10–1.30) of none; loss equal within 1 %"),
        (OPEN, EQUAL, "int8 is undecided: step 0.97 (0.90–1.02) of none, which decides nothing: take more --rounds;"),
        (
            OPEN,
            Equivalence(0.03, 0.02, 0.04, "higher"),
            "int8 does not pay: step 0.97 (0.90–1.02) of none; loss higher",
        ),
        (None, EQUAL, "int8 is equal: loss equal within 1 %"),
        (None, Equivalence(0.03, 0.02, 0.04, "higher"), "int8 is worse: loss higher by more than 1 %"),
        (None, Equivalence(math.inf, math.inf, math.inf, "higher"), "int8 is worse: loss not finite."),
        (None, Equivalence(0.0, 0.0, 0.0, "equal"), "int8 is equal: loss equal to the last bit."),
        (
            None,
            Equivalence(0.01, math.nan, math.nan, "undecided"),
            "int8 is undecided: loss +1.00 %: one seed shows no",
        ),
    ],
)
def test_the_sentence(ratio: Estimate | None, loss: Equivalence | None, sentence: str):
    speeds = {} if ratio is None else {"int8": Speed("int8", 10.0, (9.0, 11.0), ratio, None, 6)}
    found = quality.Quality("int8", [0, 1, 2], 1.0, loss)
    (verdict,) = judge(PLAN, speeds, {} if loss is None else {"int8": found})
    assert verdict.sentence.startswith(sentence)
    assert verdict.sentence.startswith(f"int8 {verdict.word}: ")


def test_a_metric_that_differs_leaves_the_judgement_to_the_user():
    speeds = {"int8": Speed("int8", 10.0, (9.0, 11.0), FAST, None, 6)}
    found = quality.Quality("int8", [0], 1.0, EQUAL, 0.9, Equivalence(-0.05, -0.06, -0.04, "lower"))
    (verdict,) = judge(PLAN, speeds, {"int8": found})
    assert verdict.word == "is undecided"
    assert verdict.sentence.endswith(
        "metric lower by more than 1 %: -5.00 % (-6.00 to -4.00), and whether that is better is for you to say."
    )


def test_a_metric_that_is_not_finite_is_not_better():
    found = quality.Quality("int8", [0, 1], 1.0, EQUAL, math.nan, compare([math.nan, 0.9], [0.9, 0.9], 0.01))
    (verdict,) = judge(PLAN, {}, {"int8": found})
    assert verdict.word == "is undecided" and verdict.sentence.endswith("; metric not finite.")


def test_nothing_is_a_percent_of_zero():
    """As of an accuracy that none has not left yet."""
    found = compare([0.1, 0.2], [0.0, 0.0], 0.01)
    assert (found.verdict, found.of_zero, say_difference(found)) == ("undecided", True, "none's is 0")
    (verdict,) = judge(PLAN, {}, {"int8": quality.Quality("int8", [0, 1], 1.0, EQUAL, 0.15, found)})
    why = "metric not tested: none's mean is 0, so that a margin of 1 % of it has no meaning."
    assert verdict.word == "is undecided" and verdict.sentence.endswith(why)
    axes = Figure().subplots()
    plot._draw_differences(axes, [quality.Quality("int8", [0, 1], 1.0, found)], 1.0)
    assert [text.get_text() for text in axes.texts] == ["none's is 0"]


def test_torchs_own_are_faster_or_not_and_no_setting_that_pays():
    speeds = {
        name: Speed(name, 10.0, (9.0, 11.0), ratio, None, 6)
        for name, ratio in {
            BASE: CONTROL,
            AGAIN: CONTROL,
            "torch": SLOW,
            "torch:fp16": FAST,
            "no reduction": FAST,
        }.items()
    }
    said = [verdict.sentence for verdict in judge(PLAN, speeds, {})]
    assert said == [
        "torch is not faster: step 1.20 (1.10–1.30) of none.",
        "torch:fp16 is faster: step 0.62 (0.58–0.66) of none.",
    ]


def test_a_metric_file_lies_in_a_folder_with_a_colon(tmp_path: Path):
    plan = replace(PLAN, out=tmp_path / "10:30", metric_file="{out}/{setting}-{seed}.json:seed {seed}")
    plan.out.mkdir()
    (plan.out / "none-0.json").write_text('{"seed 0": 0.5}')
    training = quality.trainings(plan)[0]
    assert quality.stamp_metric(plan, training) is not None
    assert quality.read_outcome(plan, training, [{"loss": 1.0, "seconds": 0.0}]).metric == 0.5


def test_where_trainings_alternate_rounds_are_not_asked_for():
    """They have six, whatever --rounds says."""
    speeds = {"int8": Speed("int8", 10.0, (9.0, 11.0), Estimate(0.97, 0.9, 1.02), None, 6)}
    (turns,), (apart,) = judge(PLAN, speeds, {}), judge(PLAN, speeds, {}, "the script wraps several modules")
    decides_nothing = "int8 is undecided: step 0.97 (0.90–1.02) of none, which decides nothing: take "
    assert turns.sentence == f"{decides_nothing}more --rounds."
    assert apart.sentence == f"{decides_nothing}a machine that does nothing else."


@pytest.mark.filterwarnings("error")
def test_losses_that_are_never_finite_are_drawn_as_nothing(tmp_path: Path):
    """As those of a training that is NaN from its first step on."""
    outcomes = [quality.Outcome(name, 0, [math.nan] * 4, [0.0, 1.0, 2.0, 3.0]) for name in (BASE, "int8")]
    found = {each.setting: each for each in quality.summarise(PLAN, outcomes) if each.outcomes}
    plot.draw(tmp_path / "compare.png", Summary({}, found, []), 0.01, "NaN")
    assert (tmp_path / "compare.png").stat().st_size > 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["日 $\\frac{$.py", "caf\udce9.py"])
def test_a_script_may_have_any_name(name: str, tmp_path: Path):
    outcomes = [quality.Outcome(name, 0, [4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]) for name in (BASE, "int8")]
    found = {each.setting: each for each in quality.summarise(PLAN, outcomes) if each.outcomes}
    plot.draw(tmp_path / "compare.png", Summary({}, found, []), 0.01, name)
    assert (tmp_path / "compare.png").stat().st_size > 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["; ".join(f"encoder.{i}.attention.*: int8" for i in range(12)), "a$\\frac{$: int8"])
def test_a_policy_of_any_length_leaves_room_for_curves(name: str, tmp_path: Path):
    plan = replace(PLAN, settings=(BASE, name))
    outcomes = [
        quality.Outcome(each, seed, [4.0, 3.0, 2.0], [0.0, 1.0, 2.0]) for each in (BASE, name) for seed in (0, 1)
    ]
    found = {each.setting: each for each in quality.summarise(plan, outcomes)}
    speeds = {each: Speed(each, 10.0, (9.0, 11.0), FAST, None, 6) for each in (BASE, name)}
    plot.draw(tmp_path / "compare.png", Summary(speeds, found, []), 0.01, "x" * 300)
    assert (tmp_path / "compare.png").stat().st_size > 0


@pytest.mark.parametrize("steps", [39, 60, 100, 119, 1000])
def test_curves_are_of_stretches_of_one_length_all_along(steps: int):
    """Else where they grow shorter noise seems to begin."""
    outcomes = [quality.Outcome(BASE, 0, [1.0] * steps, [*map(float, range(steps))])]
    axes = Figure().subplots()
    plot._draw_losses(axes, quality.summarise(replace(PLAN, settings=(BASE,)), outcomes))
    places = np.asarray(axes.get_lines()[0].get_xdata(), dtype=float)
    assert min(steps, STRETCHES) <= len(places) < 2 * STRETCHES
    assert np.diff(places).max() < 1.4 * np.diff(places).min()


def test_two_seeds_that_differ_by_the_same_tell_nothing_of_chance():
    assert compare([0.95, 0.95], [0.96, 0.96], 0.01).verdict == "undecided"


def test_settings_have_files_of_their_own():
    few, many = "ndim<2: fp16; *: int8", "ndim>2: fp16; *: int8"
    assert file_name(few) != file_name(many)
    assert len(file_name("; ".join(f"layer{i}.*: int8" for i in range(50)))) < 100
    assert file_name("int8:block=64,error_feedback") == "int8-block=64-error_feedback"


def test_a_closed_terminal_ends_no_comparison_that_ignores_it():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_end_ranks(), signals_wait():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_results_are_written_whole_or_not(tmp_path: Path):
    path = tmp_path / "results.json"
    results.write(path, {"loss": [1.0, math.nan]})
    before = path.read_text()
    with pytest.raises(TypeError):
        results.write(path, {"loss": object()})
    assert path.read_text() == before and os.listdir(tmp_path) == [path.name]
