"""The package: which folder imports which, by which names, and what a fresh clone promises."""

import ast
import functools
import graphlib
import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DISTRIBUTION = "specdec-cpu"
PACKAGE = ROOT / "specdec"
LONGEST_FILE = 600  # lines
# Folders and files of the package, top to bottom, and which of the others each imports. Whatever the order, no two modules import
# each other (`test_no_module_imports_itself_through_others`).
MAY_IMPORT = {
    "__main__": {"cli"},
    "specdec": {"decoder", "engine", "text", "loaders", "model", "sampling", "tokenizer"},
    "cli": {
        "specdec", "ui", "server", "bench", "decoder", "draft", "engine", "text", "verification", "loaders", "model", "config",
        "sampling", "tokenizer", "runtime", "validation",
    },
    "ui": {"bench", "engine", "text", "loaders", "runtime", "validation"},
    "server": {"decoder", "engine", "text", "model", "sampling", "kernels", "tokenizer", "runtime", "validation"},
    "bench": {"decoder", "draft", "engine", "heads", "model", "config", "sampling", "quant", "kernels", "runtime"},
    "decoder": {"draft", "engine", "text", "verification", "loaders", "model", "sampling", "tokenizer", "runtime"},
    "draft": {
        "engine", "text", "verification", "loaders", "heads", "model", "layers", "config", "sampling", "quant", "kernels",
        "tokenizer", "runtime", "validation",
    },
    "engine": {
        "server", "decoder", "draft", "text", "verification", "model", "layers", "sampling", "kernels", "runtime",
        "validation",
    },
    "text": {"engine", "verification", "loaders", "families", "sampling", "tokenizer", "validation"},
    "verification": {"sampling", "runtime"},
    "loaders": {"families", "model", "layers", "config", "quant", "tokenizer", "runtime", "validation"},
    "families": {"heads", "layers", "config"},
    "heads": {"draft", "model", "layers", "config", "quant", "kernels", "runtime", "validation"},
    "model": {"heads", "layers", "config", "kernels", "runtime", "validation"},
    "layers": {"config", "quant", "kernels", "runtime"},
    "config": set(),
    "sampling": {"kernels", "runtime", "validation"},
    "quant": {"runtime"},
    "kernels": {"runtime"},
    "tokenizer": {"validation"},
    "runtime": set(),
    "validation": set(),
}  # fmt: skip
OUTSIDE = {
    "cli": {"typer", "rich"},
    "ui": {"rich"},
    "decoder": {"typing_extensions"},  # mypy's own: nothing imports it at run time
    "server": {"h11", "numpy", "starlette", "uvicorn"},
    "engine": {"numpy"},
    "bench": {"numpy", "rich"},
    "draft": {"numpy"},
    "text": {"jinja2", "llguidance", "numpy", "tokenizers"},
    "loaders": {"numpy", "huggingface_hub"},
    "families": {"numpy"},
    "config": {"numpy"},
    "heads": {"numpy"},
    "model": {"numpy"},
    "layers": {"numpy"},
    "sampling": {"numpy"},
    "kernels": {"numpy"},
    "quant": {"numba", "numpy", "llvmlite"},  # llvmlite comes with numba
    "runtime": {"numba", "numpy", "llvmlite"},
    "validation": {"numpy"},
}


def modules() -> dict[str, Path]:
    """Return the files of the package by module name without "specdec."; a folder's __init__ has the folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        found[name or "specdec"] = path
    return found


MODULES = modules()


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> tuple[set[str], set[str]]:
    """Return the modules of the package and the other packages that a module imports, anywhere in its file."""
    inside, outside = set(), set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            top, _, base = str(node.module).partition(".")
            if top != "specdec":
                outside.add(top)
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}".removeprefix(".")
                inside.add(full if full in MODULES else base or "specdec")
    if "specdec" in outside:
        inside.add("specdec")
    return inside, outside - set(sys.stdlib_module_names) - {"specdec"}


def folder_of(module: str) -> str:
    return module.split(".")[0]


def test_every_module_is_in_a_known_folder() -> None:
    assert set(map(folder_of, MODULES)) == set(MAY_IMPORT)


def test_folders_import_only_what_they_may() -> None:
    used: dict[str, set[str]] = {name: set() for name in MAY_IMPORT}
    for module in MODULES:
        inside, outside = imports(module)
        used[folder_of(module)] |= set(map(folder_of, inside)) - {folder_of(module)}
        assert outside <= OUTSIDE.get(folder_of(module), set()), module
    assert used == MAY_IMPORT


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {name for name in imports(module)[0] if name != "specdec"} - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_nobody_imports_what_no_other_room_may_see() -> None:
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("specdec"):
                private = [alias.name for alias in node.names if alias.name.startswith("_") and not alias.name.startswith("__")]
                assert not private, f"{module} imports {private}"


def test_a_file_is_read_in_a_sitting() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: n for module, n in lengths.items() if n > LONGEST_FILE} == {}


LONGEST_FUNCTION, MOST_PARAMETERS = 60, 8
TOO_LARGE = {
    "decoder.__init__",  # what users name
    "sampling.draw",  # called at every token: numba looks at a record's fields one by one
    "runtime.tile.emit", "runtime.tile.float_body", "quant.grouped.emit", "quant.grouped.group_body",  # LLVM code
}  # fmt: skip


def too_large(tree: ast.Module) -> set[str]:
    """Functions of too many lines, or of too many parameters beside the object that they are of."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            n = len(names) - (names[:1] in (["self"], ["cls"]))
            if n > MOST_PARAMETERS or (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION:
                found.add(node.name)
    return found


def test_a_function_fits_a_screen_and_a_head() -> None:
    found = {f"{module}.{name}" for module in MODULES for name in too_large(tree_of(module))}
    assert found == TOO_LARGE, found ^ TOO_LARGE


def test_a_function_that_is_too_large_is_found() -> None:
    lines, parameters = "    pass\n" * LONGEST_FUNCTION, ", ".join(f"p{i}" for i in range(MOST_PARAMETERS))
    for source, found in (
        (f"def long():\n{lines}", {"long"}), (f"def long():\n{lines[9:]}", set()),
        (f"def wide({parameters}, *, p): ...", {"wide"}), (f"def wide(self, {parameters}): ...", set()),
    ):  # fmt: skip
        assert too_large(ast.parse(source)) == found


def test_the_wheel_holds_the_package_and_the_embedded_models() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"][0] == "specdec" and wheel["sources"] == {"models": "specdec/models"}
    assert all((ROOT / name).exists() for name in wheel["only-include"])


def test_the_distribution_has_a_name_of_its_own_and_brings_the_command_and_the_package() -> None:
    """On PyPI `specdec` is another project's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"] == {"specdec": "specdec.cli.entry:main"}
    assert project["optional-dependencies"]["chat"] == [f"{DISTRIBUTION}[hub]"]
    assert "on no package index: `specdec` on PyPI is another project" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_continuous_integration_types_what_the_readme_says() -> None:
    """.ci/run all of it, in a clone of its own; the workflow, whose systems differ, the last command."""
    mark = "<!-- typed in a fresh clone -->"
    typed = [part.split("```")[1] for part in (ROOT / "README.md").read_text(encoding="utf-8").split(mark)[1:]]
    assert typed[0].startswith("sh\npython3 -m venv .venv && ")
    assert typed[-1].endswith(" pytest\n")
    assert typed[-1].removeprefix("sh\n") in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert mark in (ROOT / ".ci/run").read_text(encoding="utf-8")


# Ways in

AT_EXIT = """
import atexit, json, os, sys
def tell():
    with open(os.environ["TELL"], "w") as file:
        json.dump({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}, file)
atexit.register(tell)
"""
LIBRARY = ["-c", "import specdec; specdec.SpeculativeDecoder; specdec.Transformer"]
WAYS_IN = {
    "script": (["specdec.py", "--help"], True),
    "script by its path": ([str(ROOT / "specdec.py"), "--help"], False),
    "module": (["-m", "specdec", "--help"], True),
    "library": (LIBRARY, True),
    "library by its path": (["-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {LIBRARY[1]}"], False),
    "installed module": (["-m", "specdec", "--help"], False),
    "installed library": (LIBRARY, False),
    "installed command": ([str(Path(sys.executable).with_name("specdec")), "--help"], False),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_agrees_on_the_names_of_the_modules(way: str, tmp_path: Path) -> None:
    arguments, in_checkout = WAYS_IN[way]
    if way.startswith("installed") and not is_installed():
        pytest.skip("specdec is not installed")
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TELL": str(tmp_path / "told")}
    cwd = ROOT if in_checkout else tmp_path
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # an older Typer's of a newer Click
    done = subprocess.run([sys.executable, *warnings, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = json.loads((tmp_path / "told").read_text())
    home = Path(loaded["specdec.decoder"]).parent
    files = {home / path.relative_to(PACKAGE): f"specdec.{name}" for name, path in MODULES.items()} | {
        home / "__init__.py": "specdec"
    }
    ours = {name: files[Path(path)] for name, path in loaded.items() if path and Path(path) in files and name != "__main__"}
    assert [*ours] == [*ours.values()]
    assert {name for name in loaded if name.startswith("specdec.")} < set(ours)
    if "ibrary" in way:
        assert not {"typer", "rich"} & set(loaded)
    else:
        assert "specdec.cli.main" in ours


ONE_COMMANDS = {
    "bench.random_weights",
    "bench.sweep",
    "server.app",
    "ui.chat",
    "ui.race",
    "ui.sweep_report",
    "cli.model_catalog",
}


def test_a_run_loads_nothing_that_others_need(tmp_path: Path) -> None:
    """Once what it needs is compiled: no compiler's knowledge of arrays, no judge of options, no command but its own."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TELL": str(tmp_path / "told")}
    command = [sys.executable, "specdec.py", "Once upon a time", "--plain", "-n", "30", "-t", "0.5"]
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    loaded = set(json.loads((tmp_path / "told").read_text()))
    assert not {"pydantic", "numba.np.arrayobj", "numba.cpython.unicode", "numpy.ma", "rich.markdown"} & loaded
    assert set(MODULES) > ONE_COMMANDS and not {f"specdec.{name}" for name in ONE_COMMANDS} & loaded


COLLECTED = """
import gc, sys
from specdec.cli.entry import main
early = []
gc.collect()
gc.callbacks.append(lambda *_: early.append(not hasattr(sys.modules.get("specdec.cli.main"), "main")))
sys.argv = ["specdec", "--help"]
try:
    main()
finally:
    print(any(early), gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_nothing_is_collected_while_the_command_loads_and_again_behind_it() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1:] == ["False True True"]


def is_installed() -> bool:
    try:
        return metadata.version(DISTRIBUTION) != "" and Path(sys.executable).with_name("specdec").exists()
    except metadata.PackageNotFoundError:
        return False


def test_what_is_installed_keeps_its_machine_code(tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip("specdec is not installed")
    asked = "from specdec.runtime.code_cache import folder; import specdec; print(folder()); print(specdec.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", asked], cwd=tmp_path, env=environment, capture_output=True, text=True)
    folder, package = done.stdout.splitlines()
    assert folder and Path(package).parent != ROOT


def test_an_installation_puts_one_package_on_the_path() -> None:
    """Hugging Face publishes a top-level package `kernels`; nothing of ours may lie where it is looked for."""
    if not is_installed():
        pytest.skip("specdec is not installed")
    files = metadata.files(DISTRIBUTION) or []
    tops = {file.parts[0] for file in files}
    assert {top for top in tops if not top.endswith(".dist-info") and top != ".."} == {"specdec"}


def test_the_library_shows_its_own_names_and_no_others() -> None:
    import specdec

    assert dir(specdec) == sorted(specdec.__all__)
    assert all(getattr(specdec, name).__module__.startswith("specdec.") for name in specdec.__all__)
    assert importlib.util.find_spec("specdec.kernels") is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = specdec.nonsense
