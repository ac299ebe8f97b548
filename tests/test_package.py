"""Structure of the package: allowed imports, sizes of files and functions, entry points, and the distribution."""

import ast
import functools
import graphlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.tools.package import MODULES, PACKAGE, ROOT, get_folder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DISTRIBUTION = "specdec-cpu"
MAX_FILE_LINES = 700
# Folders and files of the package from top to bottom, and the others that each imports: only those below it
MAY_IMPORT = {
    "__main__": {"cli"},
    "cli": {
        "specdec", "ui", "server", "bench", "speculative_decoder", "engine", "draft", "text", "protocols", "verification",
        "events", "loaders", "model", "sampling", "tokenizer", "runtime", "argument_checks",
    },
    "ui": {"bench", "text", "events", "loaders", "runtime", "argument_checks"},
    "server": {
        "specdec", "speculative_decoder", "engine", "draft", "text", "protocols", "events", "loaders", "model", "sampling",
        "kernels", "tokenizer", "runtime", "argument_checks",
    },
    "bench": {"speculative_decoder", "draft", "events", "model", "model_config", "sampling", "quant", "kernels", "runtime"},
    "speculative_decoder": {
        "engine", "draft", "text", "protocols", "verification", "events", "loaders", "model", "sampling", "tokenizer",
        "runtime",
    },
    "engine": {
        "draft", "speculative", "text", "protocols", "verification", "events", "loaders", "model", "layers", "sampling",
        "kernels", "tokenizer", "runtime", "argument_checks",
    },
    "draft": {
        "text", "protocols", "verification", "loaders", "heads", "model", "layers", "model_config", "sampling", "quant",
        "kernels", "tokenizer", "runtime", "argument_checks",
    },
    "speculative": {"logprobs", "protocols", "verification", "events", "runtime"},
    "logprobs": {"verification", "events", "runtime"},
    "text": {"protocols", "verification", "events", "loaders", "families", "sampling", "tokenizer", "argument_checks"},
    "protocols": {"verification", "runtime"},
    "verification": {"sampling", "runtime"},
    "events": set(),
    "loaders": {
        "families", "heads", "model", "layers", "model_config", "head_config", "quant", "tokenizer", "runtime",
        "argument_checks",
    },
    "families": {"layers", "model_config", "mixer_config", "head_config", "argument_checks"},
    "heads": {"model", "layers", "model_config", "head_config", "kernels", "runtime", "argument_checks"},
    "model": {"layers", "model_config", "mixer_config", "kernels", "runtime", "argument_checks"},
    "layers": {"model_config", "mixer_config", "quant", "kernels", "runtime"},
    "model_config": {"mixer_config", "head_config", "runtime", "argument_checks"},
    "mixer_config": {"argument_checks"},
    "head_config": {"runtime", "argument_checks"},
    "sampling": {"kernels", "runtime", "argument_checks"},
    "kernels": {"quant", "runtime"},
    "quant": {"runtime"},
    "tokenizer": {"argument_checks"},
    "runtime": set(),
    "argument_checks": set(),
    "specdec": set(),
}  # fmt: skip
OUTSIDE = {
    "cli": {"typer", "rich"},
    "ui": {"rich"},
    "server": {"h11", "numpy", "starlette", "uvicorn"},
    "bench": {"numpy", "rich"},
    "engine": {"numpy"},
    "draft": {"numpy"},
    "text": {"jinja2", "llguidance", "numpy", "tokenizers"},
    "loaders": {"numpy", "huggingface_hub"},
    "families": {"numpy"},
    "model_config": {"numpy"},
    "heads": {"numpy"},
    "model": {"numpy"},
    "layers": {"numpy"},
    "sampling": {"numpy"},
    "logprobs": {"numpy"},
    "kernels": {"numpy"},
    "quant": {"numba", "numpy"},
    "runtime": {"numba", "numpy", "llvmlite"},  # llvmlite comes with numba
    "argument_checks": {"numpy"},
}


@functools.cache
def parse_module(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def find_named_modules(text: str) -> set[str]:
    """Return the modules that a string names in full, or the folder if it is the beginning of an f-string: "specdec.a.{name}"."""
    parts = text.removeprefix("specdec.").partition(":")[0].split(".") if text.startswith("specdec.") else []
    paths = {".".join(parts[:n]) for n in (len(parts), len(parts) - 1) if n}
    return set() if " " in text else paths & MODULES.keys()


def test_a_module_named_in_a_string_is_found() -> None:
    for text, found in (
        ("specdec.heads.mtp:MTP", {"heads", "heads.mtp"}), ("specdec.heads.", {"heads"}), ("specdec.layers", {"layers"}),
        ("specdec.each_byte", set()), ("heads.mtp", set()), ("specdec.heads of a model", set()), ("specdec", set()),
    ):  # fmt: skip
        assert find_named_modules(text) == found


@functools.cache
def imports(module: str) -> tuple[set[str], set[str]]:
    """Return the modules of the package and the other packages that a module imports anywhere in its file, except for types.

    A string that names a module counts as an import, except in the package's own file, which names the public classes.
    """
    inside, outside = set(), set()
    only_types = {
        id(each)
        for node in parse_module(module).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in ast.walk(node)
    }
    for node in ast.walk(parse_module(module)):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and module != "specdec":
            inside |= find_named_modules(node.value)
        elif isinstance(node, ast.Import):
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


def test_folders_import_only_what_they_may_and_only_folders_below_them() -> None:
    order = [*MAY_IMPORT]
    for i, (folder, others) in enumerate(MAY_IMPORT.items()):
        assert others <= set(order[i + 1 :]), folder
    used: dict[str, set[str]] = {name: set() for name in MAY_IMPORT}
    for module in MODULES:
        inside, outside = imports(module)
        used[get_folder(module)] |= set(map(get_folder, inside)) - {get_folder(module)}
        assert outside <= OUTSIDE.get(get_folder(module), set()), module
    assert used == MAY_IMPORT


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {name for name in imports(module)[0] if name != "specdec"} - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_two_modules_write_llvm_code() -> None:
    nodes = ((module, node) for module in MODULES for node in ast.walk(parse_module(module)))
    imported = ((module, ast.unparse(node)) for module, node in nodes if isinstance(node, ast.ImportFrom))
    assert {module for module, text in imported if text == "from llvmlite import ir"} == {"runtime.simd", "runtime.tile_simd"}


def test_private_names_are_not_imported() -> None:
    for module in MODULES:
        for node in ast.walk(parse_module(module)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("specdec"):
                private = [alias.name for alias in node.names if alias.name.startswith("_") and not alias.name.startswith("__")]
                assert not private, f"{module} imports {private}"


def test_files_are_short() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: n for module, n in lengths.items() if n > MAX_FILE_LINES} == {}


MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 8
TOO_LARGE = {
    "speculative_decoder.__init__",  # the public options
    "sampling.draw",  # called at every token; numba unpacks a record's fields one by one
}  # fmt: skip


def find_too_large(tree: ast.Module) -> set[str]:
    """Return the functions with too many lines, docstrings not counted, or too many parameters besides self or cls."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            n = len(names) - (names[:1] in (["self"], ["cls"]))
            n_doc_lines = len(ast.get_docstring(node, clean=False).splitlines()) if ast.get_docstring(node) else 0
            if n > MAX_PARAMETERS or (node.end_lineno or 0) - node.lineno - n_doc_lines >= MAX_FUNCTION_LINES:
                found.add(node.name)
    return found


def test_functions_are_short_with_few_parameters() -> None:
    found = {f"{module}.{name}" for module in MODULES for name in find_too_large(parse_module(module))}
    assert found == TOO_LARGE, found ^ TOO_LARGE


def test_too_large_function_is_found() -> None:
    lines, parameters = "    pass\n" * MAX_FUNCTION_LINES, ", ".join(f"p{i}" for i in range(MAX_PARAMETERS))
    for source, found in (
        (f"def long():\n{lines}", {"long"}), (f"def long():\n{lines[9:]}", set()),
        (f"def wide({parameters}, *, p): ...", {"wide"}), (f"def wide(self, {parameters}): ...", set()),
    ):  # fmt: skip
        assert find_too_large(ast.parse(source)) == found


def test_built_wheel_has_no_other_files(tmp_path: Path) -> None:
    """Examples, documentation and tests stay in the repository."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="the extra [test] is not installed").WheelBuilder
    (wheel,) = builder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    models = {f"specdec/models/{name}" for name in ("README.md", "stories6M.bin", "stories650K.bin", "tok1024.bin")}
    assert names == files | models


def test_distribution_name_command_and_package() -> None:
    """The name `specdec` on PyPI belongs to another project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"] == {"specdec": "specdec.cli.bootstrap:main"}
    assert project["optional-dependencies"]["chat"] == [f"{DISTRIBUTION}[hub]"]
    assert "on no package index; PyPI's `specdec` is another project" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_badges_have_the_declared_versions_and_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [
        line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language :: Python :: 3.")
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, label, value in (
        ("python", "Python ", f"{versions[0]} to {versions[-1]}"),
        ("licence", "Licence: ", project["license"]),
    ):
        assert f"![{label}{value}](docs/badges/{name}.svg)" in readme
        assert f">{value}</text>" in (ROOT / f"docs/badges/{name}.svg").read_text(encoding="utf-8")


def test_ci_runs_commands_of_readme() -> None:
    """.ci/run runs all of them in a fresh clone; the workflow, on other systems, the last one."""
    mark = "<!-- typed in a fresh clone -->"
    typed = [part.split("```")[1] for part in (ROOT / "README.md").read_text(encoding="utf-8").split(mark)[1:]]
    assert typed[0].startswith("sh\npython3 -m venv .venv && ")
    assert typed[-1].endswith(" pytest\n")
    assert typed[-1].removeprefix("sh\n") in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert mark in (ROOT / ".ci/run").read_text(encoding="utf-8")


# Entry points

DUMP_MODULES = """
import atexit, json, os, sys
def dump():
    with open(os.environ["DUMP_PATH"], "w") as file:
        json.dump({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}, file)
atexit.register(dump)
"""


def run_and_list_modules(tmp_path: Path, arguments: list[str], cwd: Path = ROOT) -> tuple[dict[str, str | None], str]:
    """Run Python, which must succeed, and return the file of each module that it loaded, and its stderr."""
    (tmp_path / "sitecustomize.py").write_text(DUMP_MODULES)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "DUMP_PATH": str(tmp_path / "modules.json")}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "modules.json").read_text()), done.stderr


LIBRARY = ["-c", "import specdec; specdec.SpeculativeDecoder; specdec.Model"]
ENTRY_POINTS = {
    "script": (["specdec.py", "--help"], True),
    "script by its path": ([str(ROOT / "specdec.py"), "--help"], False),
    "module": (["-m", "specdec", "--help"], True),
    "library": (LIBRARY, True),
    "library by its path": (["-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {LIBRARY[1]}"], False),
    "installed module": (["-m", "specdec", "--help"], False),
    "installed library": (LIBRARY, False),
    "installed command": ([str(Path(sys.executable).with_name("specdec")), "--help"], False),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_entry_point_uses_same_module_names(entry_point: str, tmp_path: Path) -> None:
    arguments, in_checkout = ENTRY_POINTS[entry_point]
    if entry_point.startswith("installed") and not is_installed():
        pytest.skip("specdec is not installed")
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # by older Typers with a newer Click
    loaded, stderr = run_and_list_modules(tmp_path, [*warnings, *arguments], ROOT if in_checkout else tmp_path)
    assert stderr == ""
    home = Path(loaded["specdec.speculative_decoder"]).parent
    files = {home / path.relative_to(PACKAGE): f"specdec.{name}" for name, path in MODULES.items()} | {
        home / "__init__.py": "specdec"
    }
    ours = {name: files[Path(path)] for name, path in loaded.items() if path and Path(path) in files and name != "__main__"}
    assert [*ours] == [*ours.values()]
    assert {name for name in loaded if name.startswith("specdec.")} < set(ours)
    if "ibrary" in entry_point:
        assert not {"typer", "rich"} & set(loaded)
    else:
        assert "specdec.cli.app" in ours


SINGLE_COMMAND_MODULES = {
    "bench.pass_speed",
    "bench.sweep",
    "server.app",
    "ui.chat",
    "ui.race",
    "ui.sweep_report",
    "draft.installed_models",
}


def test_run_loads_no_modules_of_other_commands(tmp_path: Path) -> None:
    """After the first run has compiled: no numba typing of arrays, no pydantic, and no modules of other commands."""
    for _ in range(2):
        modules, _ = run_and_list_modules(tmp_path, ["specdec.py", "Once upon a time", "--plain", "-n", "30", "-t", "0.5"])
    loaded = set(modules)
    assert not {"pydantic", "numba.np.arrayobj", "numba.cpython.unicode", "numpy.ma", "rich.markdown"} & loaded
    assert set(MODULES) > SINGLE_COMMAND_MODULES and not {f"specdec.{name}" for name in SINGLE_COMMAND_MODULES} & loaded


MAX_CORE_FILES = 76  # that `SpeculativeDecoder` imports, with those that they import
MAX_LOADED_MODULES = 85  # of a run with a llama2.c pair, whose formats and layers are imported by name
OPTIONAL_FOLDERS = ("server", "bench", "heads", "ui")
GENERATE = """
from specdec import SpeculativeDecoder
SpeculativeDecoder("stories650K.bin", "stories650K.bin").generate("Once upon a time", max_tokens=4)
"""
CORE_TESTS = (
    "test_speculative.py", "engine/test_prefix_cache.py", "engine/test_constrained_decoding.py", "engine/test_prefill_chunks.py",
    "draft/test_staged.py", "draft/test_tree.py", "model/test_token_trees.py",
)  # fmt: skip
TESTS_WITHOUT = {  # by masked folder: tests of the others
    "server": ("heads/test_mtp.py", "ui/test_panel.py", "bench/test_sweep.py"),
    "bench": ("heads/test_mtp.py", "server/test_engine_thread.py"),
    "heads": ("server/tool_parsers/test_formats.py", "ui/test_panel.py", "bench/test_race.py"),
    "ui": ("heads/test_mtp.py", "server/test_engine_thread.py"),
}


def list_imports_at_load(module: str) -> set[str]:
    """Return the modules of the package that are imported with a module, also the packages that contain them."""
    body = [node for node in parse_module(module).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {f"{node.module}.{each.name}" for node in body if isinstance(node, ast.ImportFrom) for each in node.names}
    parts = [name.split(".")[1:] for name in names if name.startswith("specdec.")]
    return {".".join(each[:n]) for each in parts for n in range(1, len(each) + 1)} & MODULES.keys()


def test_core_is_few_files_and_names_no_optional_folder() -> None:
    core, new = set[str](), {"specdec", "speculative_decoder"}
    while new:
        core |= new
        new = set[str]().union(*map(list_imports_at_load, new)) - core
    assert not {*OPTIONAL_FOLDERS, "cli"} & set(map(get_folder, core))
    assert len(core) <= MAX_CORE_FILES, sorted(core)


def test_a_llama2c_pair_loads_only_the_core(tmp_path: Path) -> None:
    modules, _ = run_and_list_modules(tmp_path, ["-c", GENERATE])
    loaded = [name for name in modules if name.partition(".")[0] == "specdec"]
    assert not {*OPTIONAL_FOLDERS, "cli"} & {name.split(".")[1] for name in loaded if "." in name}
    assert len(loaded) <= MAX_LOADED_MODULES, sorted(loaded)


@pytest.mark.campaign
@pytest.mark.parametrize("folder", OPTIONAL_FOLDERS)
def test_other_tests_pass_without_an_optional_folder(folder: str) -> None:
    files = [f"tests/{name}" for name in (*CORE_TESTS, *TESTS_WITHOUT[folder])]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.tools.masked_folder", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MASKED_FOLDER": folder})
    assert done.returncode == 0, done.stdout[-3000:]


CHECK_GC = """
import gc, sys
from specdec.cli.bootstrap import main
early = []
gc.collect()
gc.callbacks.append(lambda *_: early.append(not hasattr(sys.modules.get("specdec.cli.app"), "main")))
sys.argv = ["specdec", "--help"]
try:
    main()
finally:
    print(any(early), gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_garbage_collection_is_off_while_command_loads() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK_GC], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1:] == ["False True True"]


def is_installed() -> bool:
    try:
        return metadata.version(DISTRIBUTION) != "" and Path(sys.executable).with_name("specdec").exists()
    except metadata.PackageNotFoundError:
        return False


def test_installed_package_caches_machine_code(tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip("specdec is not installed")
    code = "from specdec.runtime.code_cache import get_cache_dir; import specdec; print(get_cache_dir()); print(specdec.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    folder, package = done.stdout.splitlines()
    assert folder and Path(package).parent != ROOT


def test_installation_adds_one_top_level_package() -> None:
    """Hugging Face publishes a top-level package `kernels`, which our files must not shadow."""
    if not is_installed():
        pytest.skip("specdec is not installed")
    files = metadata.files(DISTRIBUTION) or []
    tops = {file.parts[0] for file in files}
    package = {top for top in tops if not top.endswith(".dist-info") and top != ".."}
    assert package in ({"specdec"}, {"_specdec_cpu.pth"})  # the second is an editable installation


def test_library_exposes_only_its_public_names() -> None:
    import specdec

    assert dir(specdec) == sorted(specdec.__all__)
    assert all(getattr(specdec, name).__module__.startswith("specdec.") for name in specdec.__all__)
    assert importlib.util.find_spec("specdec.kernels") is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = specdec.nonsense


def test_no_test_file_imports_another() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).rpartition(".")[2].startswith("test_")
    ]
    assert found == [], "move what they share to tests/tools or a conftest.py"
