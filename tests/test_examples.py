"""The examples run as their docstrings say, without a network."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from tests.fakes.terminal import TIMEOUT_S, run_process
from tests.tools.documentation import find_broken_links
from tests.tools.model_folders import SMOLLM2_TEMPLATE, TOOL_TEMPLATE_PREFIX, make_chat_folder
from tests.tools.package import ROOT
from tests.tools.waiting import wait_until

EXAMPLES = ROOT / "examples"
MAX_LINES = 50
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
MODELS = ("stories6M.bin", "stories650K.bin")
UNUSED_URL = "http://127.0.0.1:1"


def run_example(name: str, *arguments: object, stdin: str = "", env: dict[str, str] = ENVIRONMENT) -> Any:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.run(command, input=stdin, env=env, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)


def get_output(process: Any) -> str:
    assert (process.returncode, process.stderr) == (0, "")
    return str(process.stdout)


@contextmanager
def run_server(arguments: Sequence[object]) -> Iterator[str]:
    """Start `specdec serve` on a free port and yield its URL."""
    with run_process(["serve", *arguments, "--port", 0, "-j", 1]) as process:
        deadline = Timer(TIMEOUT_S, process.kill)
        deadline.start()
        try:
            yield process.stdout.readline().decode().split()[0]
        finally:
            deadline.cancel()


def test_stream_prints_the_story_of_the_target_alone() -> None:
    output = get_output(run_example("stream.py", "Tom had a red ball"))
    story, _, summary = output.strip().rpartition("\n\n")
    alone = SpeculativeDecoder("stories6M.bin", None).generate("Tom had a red ball", 100, temperature=0.8, seed=7)
    assert story == alone.text.rstrip()
    assert summary.startswith("100 tokens in ") and int(summary.split()[3]) < 60


def test_chat_answers_each_line() -> None:
    answers = get_output(run_example("chat.py", stdin="Hi!\nWho are you?\n"))
    assert len(answers) > 100
    assert get_output(run_example("chat.py", stdin="")) == ""


def test_schema_prints_a_person() -> None:
    pytest.importorskip("llguidance", reason="the extra [schema] is not installed")
    person = json.loads(get_output(run_example("schema.py")))
    assert [*person] == ["name", "age", "friends"] and 0 <= person["age"] <= 120


def test_schema_names_the_missing_package(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['llguidance'] = None")
    done = run_example("schema.py", env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert done.returncode == 1 and "pip install llguidance" in done.stderr and "Traceback" not in done.stderr


def test_batch_completes_all_prompts() -> None:
    pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")
    with run_server(["-m", "stories6M.bin"]) as url:
        output = get_output(run_example("batch.py", url))
    assert all(prompt in output for prompt in ("Once upon a time, there was", "Tom had a red ball", "The little robin"))
    assert "240 tokens, " in output


def test_workers_of_ray_give_the_results_of_one_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="the extra [ray] is not installed")
    lines = [
        json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": f"Tom had {i}", "max_tokens": 6}})
        for i in range(6)
    ]
    source, results = tmp_path / "in.jsonl", [tmp_path / name for name in ("ray", "alone")]
    source.write_text("\n".join(lines))
    done = run_example("batch_ray.py", source, results[0], "stories6M.bin", "2", env=ENVIRONMENT | {"RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 0, done.stderr
    with run_process(["batch", source, results[1], "-m", "stories6M.bin", "-j", 1]) as process:
        assert process.wait(TIMEOUT_S) == 0
    assert len({tuple(sorted(path.read_text().splitlines())) for path in results}) == 1


@pytest.mark.skipif(not shutil.which("caddy"), reason="Caddy is not installed")
def test_a_balancer_keeps_sessions_together_and_loses_no_request_when_a_server_ends() -> None:
    def ask(url: str, session: str) -> str:
        body, headers = b'{"prompt": "Tom", "max_tokens": 3, "seed": 1}', {"x-session-id": session}
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return str(json.load(response)["model"])

    with socket.socket() as free, ExitStack() as stack:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        servers = [stack.enter_context(run_process(["serve", "-m", name, "--port", 0, "-j", 1])) for name in MODELS]
        addresses = [server.stdout.readline().decode().split()[0].removeprefix("http://") for server in servers]
        variables = {"ADDRESS": url, "SERVERS": " ".join(addresses)}
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(EXAMPLES / "Caddyfile")]
        caddy = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
        stack.callback(caddy.wait)
        stack.callback(caddy.terminate)
        wait_until(lambda: is_listening(url))
        by_session = {str(i): ask(url, str(i)) for i in range(12)}
        assert len({*by_session.values()}) == 2, "each server has sessions"
        assert {session: ask(url, session) for session in by_session} == by_session
        servers[0].terminate()
        left = {ask(url, session) for _ in range(3) for session in by_session}
        assert servers[0].wait(TIMEOUT_S) == 0 and left <= {*by_session.values()}
        assert {ask(url, session) for session in by_session} == {MODELS[1]}


def is_listening(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_tools_runs_the_function_that_the_model_calls(tmp_path: Path) -> None:
    """The model has random weights: the grammar of the tool alone makes its call valid."""
    for package in ("jinja2", "llguidance", "tokenizers", "uvicorn"):
        pytest.importorskip(package, reason="an extra is not installed")
    folder = make_chat_folder(tmp_path / "talker", TOOL_TEMPLATE_PREFIX + SMOLLM2_TEMPLATE, positions=2000)
    with run_server(["-m", folder]) as url:
        output = get_output(run_example("tools.py", url))
    assert output.startswith(("get_temperature('Oslo') = 4\n", "get_temperature('Rome') = 18\n"))


@pytest.mark.parametrize("name", ["batch.py", "tools.py"])
def test_without_a_server_an_example_shows_how_to_start_one(name: str) -> None:
    done = run_example(name, UNUSED_URL)
    assert done.returncode == 1 and "; start a server with: specdec serve -m " in done.stderr and "Traceback" not in done.stderr


def test_notebook_runs_and_has_no_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    output = capsys.readouterr().out
    assert output.startswith("Once upon a time, there was") and " passes of the target\n" in output


def test_examples_are_short_and_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    paths = [path for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}]
    assert [path.name for path in paths if f"]({path.name})" not in page] == []
    assert find_broken_links(EXAMPLES / "README.md") == []
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in paths if path.suffix == ".py"}
    assert {name: n for name, n in lengths.items() if n >= MAX_LINES} == {}
