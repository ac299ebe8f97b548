"""`specdec compile`: compiles ahead of time what the other commands run with a model, for images and CI."""

import time
from dataclasses import dataclass, replace

from specdec.cli.common_options import ModelRequest, with_models
from specdec.cli.model_loading import load_models
from specdec.cli.option_fields import argument
from specdec.cli.output_errors import guard_output
from specdec.draft.settings import AUTO
from specdec.runtime import code_cache
from specdec.runtime.code_cache import list_cached_names
from specdec.ui.plain_views import sanitize_line


@dataclass(frozen=True, kw_only=True)
class CompileRequest(ModelRequest):
    """The options of `specdec compile`."""

    names: list[str] | None = argument("MODEL", "Targets: folders, files or hub names, as for -m.")


def run(request: CompileRequest) -> None:
    """Compile the kernels of models now, so that other commands start at once: for images and CI.

    specdec compile compiles those of the included pair; specdec compile MODEL those of a model and its default draft.

    Compiled code is for this CPU and this version of specdec. NUMBA_CACHE_DIR selects the folder.
    """
    if code_cache.IS_PLAIN:
        newest = ".".join(map(str, code_cache.NEWEST_NUMBA))
        raise ValueError(f"compiled code cannot be kept with SPECDEC_PLAIN_NUMBA, or with a numba newer than {newest}")
    if not code_cache.get_cache_dir():
        folders = " or ".join(str(path) for path in code_cache.list_cache_candidates())
        raise ValueError(f"compiled code cannot be kept: {folders} is not writable; set NUMBA_CACHE_DIR to a folder that is")
    for name in request.names or (request.model,):
        begin, known = time.perf_counter(), list_cached_names()
        with load_models(with_models(replace(request, model=name), AUTO)) as models:
            pass  # the warm-up at its end compiles
        n_new = len(list_cached_names() - known)
        with guard_output():
            what = f"compiled {n_new} functions" if n_new else "nothing to compile"
            print(f"{models.request.labels.pair}: {what} ({time.perf_counter() - begin:.1f} s)", flush=True)
        for error in code_cache.write_errors[:1]:
            raise ValueError(f"compiled code cannot be kept in {code_cache.get_cache_dir()}: {error.strerror or error}")
    with guard_output():
        print(f"compiled code for this machine's CPU is in {sanitize_line(code_cache.get_cache_dir())}", flush=True)
