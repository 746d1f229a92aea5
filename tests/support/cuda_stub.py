"""Launch Triton kernels through Triton's real compiler and launcher on a machine without a GPU: nothing runs.

A stub of `libcuda.so.1` answers every driver call with success; kernels are compiled for sm_90 and "launched". That
shows that a kernel compiles, that its launcher is called with arguments that fit, and what the host pays for a launch.

    library = cuda_stub.activate()                  # before triton is imported; needs gcc
    from fastreduce.kernels import triton_cast      # TRITON_INTERPRET must not be set at this point

CPU tensors stand for CUDA tensors: their addresses are passed as they are.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

ANSWERS = {
    "cuPointerGetAttribute": "(void*d,int a,unsigned long p){*(unsigned long*)d=p;return 0;}",
    "cuPointerGetAttributes": "(unsigned n,int*a,void**d,unsigned long p)"
    "{for(unsigned i=0;i<n;i++){if(a[i]==3)*(unsigned long*)d[i]=p;else *(int*)d[i]=0;}return 0;}",
    "cuCtxGetCurrent": "(void**p){*p=(void*)1;return 0;}",
    "cuDeviceGetCount": "(int*p){*p=1;return 0;}",
    "cuDeviceGet": "(int*p,int i){*p=0;return 0;}",
    # 75, 76: compute capability 9.0; 97, 8: shared memory; 16: multiprocessors
    "cuDeviceGetAttribute": "(int*p,int a,int d){*p=a==75?9:a==76?0:(a==97||a==8)?232448:a==16?132:1024;return 0;}",
    "cuFuncGetAttribute": "(int*p,int a,void*f){*p=a==0?1024:a==4?32:0;return 0;}",
    "cuModuleGetFunction": "(void**f,void*m,const char*n){*f=(void*)2;return 0;}",
    "cuModuleLoadData": "(void**m,const void*i){*m=(void*)3;return 0;}",
    "cuGetErrorString": '(int e,const char**s){*s="stub";return 0;}',
    "cuStreamIsCapturing": "(void*s,int*p){*p=0;return 0;}",
    "cuDriverGetVersion": "(int*v){*v=13000;return 0;}",
    # Programs, and the low halves of the first four arguments: more there may be, and these there are.
    "cuLaunchKernelEx": "(unsigned*c,void*f,void**p,void**e){fastreduce_launches++;fastreduce_last[0]=c[0];"
    "for(int i=0;i<4;i++)fastreduce_last[i+1]=*(unsigned*)p[i];return 0;}",
    "cuInit": "(unsigned f){return 0;}",
}


def build(folder: Path) -> ctypes.CDLL:
    """Compile the stub into `folder` and load it."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise SystemExit("triton is not installed")
    nvidia = Path(spec.origin).parent / "backends/nvidia"
    text = "".join((nvidia / name).read_text() for name in ("driver.c", "driver.py"))
    names = set(re.findall(r"\b(cu[A-Z][A-Za-z0-9]*)\b", text)) - {"cuLaunchKernelExHandle"} | set(ANSWERS)
    source = [
        "long fastreduce_launches=0;unsigned fastreduce_last[5];",
        *(f"int {n}{ANSWERS.get(n, '(){return 0;}')}" for n in sorted(names)),
    ]
    (folder / "stub.c").write_text("\n".join(source))
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1", "-o", library, folder / "stub.c"], check=True
    )
    (folder / "libcuda.so").symlink_to(library)  # Triton up to 3.5 links with it
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def activate() -> ctypes.CDLL:
    """Build the stub and make it Triton's driver; returns the library, whose `fastreduce_launches` counts launches."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_stub_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    library = build(folder)
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    class Stub(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda index: 0
            self.set_current_device = lambda index: None
            self.get_device_capability = lambda index=0: (9, 0)

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        @staticmethod
        def is_active() -> bool:
            return True

    driver.set_active(Stub())
    return library
