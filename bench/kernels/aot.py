"""`python -m bench.kernels.aot`: what GPU kernels cost each element, read from machine code for one GPU, without one.

Numba's and Triton's kernels are compiled as in tests/kernels/test_aot.py, assembled by Triton's ptxas and disassembled.
A thread's main path is the shortest way from the first instruction to an end with all 16-byte accesses of a full,
aligned tile of finite numbers; loops are gone through once, which is what two ranks take.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[2]


def compiled(backend: str, folder: Path, *how: str) -> list[dict[str, Any]]:
    """A backend's kernels: name, PTX, the compiler's log, and the bytes of each thread's accesses of 16 and more.

    `how` is the target of `numba_cuda`; of `triton`, which compiles for all, `quick` is a sixth of it.
    """
    simulated = ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM")
    environment = {key: value for key, value in os.environ.items() if key not in simulated}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    file = folder / f"{backend}.json"
    command = [sys.executable, "-m", f"tests.kernels.aot_{backend}", str(file), *how]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    kernels: list[dict[str, Any]] = json.loads(file.read_text())
    return kernels


def disassembled(ptx: str, folder: Path) -> tuple[str, int]:
    """Machine code as text, and registers."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    assemble = [tools / "ptxas-blackwell", f"-arch={target[1]}", "-v", source, "-o", cubin]
    log = subprocess.run(assemble, capture_output=True, text=True, check=False).stderr
    if not cubin.exists():
        raise RuntimeError(log)
    text = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None
    return text, int(registers[1])


def main_path(code: str, wide: int) -> int:
    """How many instructions the shortest way through machine code has, of those with so many 16-byte accesses."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_x?_?\w+):", line.strip()):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            lines.append(instruction[1])

    sys.setrecursionlimit(100_000)

    @cache
    def shortest(at: int) -> dict[int, int]:
        """From instruction `at` to an end, by the number of 16-byte accesses; empty if it only leads back."""
        if at >= len(lines):
            return {}
        line = lines[at]
        words = line.split()
        predicated = words[0].startswith("@")
        name = words[1] if predicated else words[0]
        ends: list[dict[int, int]] = []
        if name.startswith(("EXIT", "RET")):
            ends.append({0: 0})
        if name.startswith("BRA"):
            target = re.search(r"\((\.L\w+)\)", line)
            assert target is not None, line
            if labels[target[1]] > at:
                ends.append(shortest(labels[target[1]]))
        if predicated or not name.startswith(("EXIT", "RET", "BRA")):
            ends.append(shortest(at + 1))
        access, instruction = int(bool(re.match(r"(LDG|STG)\..*128", name))), int(name != "NOP")
        found: dict[int, int] = {}
        for end in ends:
            for accesses, instructions in end.items():
                better = min(instructions + instruction, found.get(accesses + access, sys.maxsize))
                found[accesses + access] = better
        return found

    paths = shortest(0)
    assert wide in paths, f"no way has {wide} accesses of 16 bytes, but {sorted(paths)}"
    return paths[wide]


def main(target: Annotated[int, typer.Option(help="Compute capability, as in sm_90.")] = 90) -> None:
    """Print the table as Markdown."""
    print(
        f"| sm_{target} | backend | registers | 16-byte accesses | instructions | elements | instructions / element |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for backend, *how in (["triton"], ["numba_cuda", str(target)]):
            for kernel in compiled(backend, folder, *how):
                what, _, compiled_for = kernel["name"].rpartition(", sm_")
                if compiled_for != str(target) or kernel["wide"] is None:
                    continue
                code, registers = disassembled(kernel["ptx"], folder)
                wide, elements = (sum(kernel["wide"]) - kernel["again"]) // 16, kernel["elements"]
                instructions = main_path(code, wide)
                cells = [what, backend, registers, wide, instructions, elements]
                print("|", *(f"{cell} |" for cell in cells), f"{instructions / elements:.1f} |")


if __name__ == "__main__":
    typer.run(main)
