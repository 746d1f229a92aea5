"""How many cores count as usable, where a container has a quota of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastreduce.environment import cores

HERE = len(os.sched_getaffinity(0))
MANY = HERE + 1.0


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    {
        "none": ("0::/\n", {}, HERE),
        "no file of groups": (None, {"cpu.max": "50000 100000"}, HERE),
        "version 2": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        "half a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        "no quota": ("0::/\n", {"cpu.max": "max 100000\n"}, HERE),
        "more than there are": ("0::/\n", {"cpu.max": f"{MANY * 1e5:.0f} 100000\n"}, HERE),
        "of the group around": ("0::/pods/a\n", {"pods/a/cpu.max": "max 100000", "pods/cpu.max": "120000 100000"}, 1),
        "a group that is not seen here": ("0::/docker/1f\n", {"cpu.max": "100000 100000"}, 1),
        "version 1": (
            "4:memory:/\n1:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        "version 1 without quota": (
            "1:cpu:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            HERE,
        ),
        "something else among the groups": ("\n?\n0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        "a group around all that are seen": ("0::/../a\n", {"cpu.max": "100000 100000\n"}, 1),
        "something else in the file": ("0::/\n", {"cpu.max": "a b\n"}, HERE),
    }.values(),
)
def test_a_quota_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None, files: dict[str, str], usable: int
):
    groups = tmp_path / "cgroup"
    for name, text in files.items():
        groups.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        groups.joinpath(name).write_text(text)
    if own is not None:
        tmp_path.joinpath("own").write_text(own)
    monkeypatch.setattr(cores, "OWN", tmp_path / "own")
    monkeypatch.setattr(cores, "GROUPS", groups)
    assert cores.usable_cores() == usable
