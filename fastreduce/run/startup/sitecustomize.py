"""What Python imports first in every process of `fastreduce run`: our hook, then the sitecustomize that was meant.

This folder stands first on PYTHONPATH and leaves `sys.path` here. Any Python that a script starts reads this file, so
it is written for the oldest; the hook is for the interpreter of the run alone.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_HOOK = os.path.join(os.path.dirname(_FOLDER), "replacement.py")
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]

if sys.version_info >= (3, 10) and os.path.isfile(_HOOK) and "fastreduce.run.replacement" not in sys.modules:
    from importlib.util import module_from_spec, spec_from_file_location

    _spec = spec_from_file_location("fastreduce.run.replacement", _HOOK)
    if _spec is not None and _spec.loader is not None:
        _hook = sys.modules[_spec.name] = module_from_spec(_spec)
        _spec.loader.exec_module(_hook)
        _hook.join_run()

_this = sys.modules.pop(__name__)
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  the next one on sys.path
except ImportError as _error:
    if getattr(_error, "name", __name__) != __name__:
        raise
    sys.modules[__name__] = _this
