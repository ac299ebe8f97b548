"""`specdec batch`: files of results, which a second start continues."""

import json
from pathlib import Path

import pytest

from specdec.loaders import optional_dependencies
from tests.conftest import Pair
from tests.tools.command_runs import Run, assert_rejected, run  # noqa: F401  (a fixture)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    bodies = [{"prompt": "Once", "max_tokens": 5 + i % 3} for i in range(7)]
    lines = [json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body}) for i, body in enumerate(bodies)]
    path.write_text("\ufeff" + "\n".join([*lines, "nonsense"]), encoding="utf-8")
    return path


def test_a_second_start_continues_where_the_first_was_cut_off(run: Run, pair: Pair, job: Path, tmp_path: Path) -> None:
    out, models = tmp_path / "out.jsonl", ("-m", pair.target, "-d", pair.draft, "-z", pair.tokenizer)
    code, stdout, err = run("batch", job, out, *models)
    lines = out.read_bytes().splitlines(keepends=True)
    assert (code, stdout, len(lines)) == (0, "", 8) and "8 results, 1 of them errors" in err and "accepted" in err
    for kept in (0, 1, 4, 7):
        out.write_bytes(b"".join(lines[:kept]) + lines[-1][: 40 * (kept > 0)])  # a write that was killed
        code, _, err = run("batch", job, out, *models)
        assert code == 0 and f"{8 - kept} results" in err
        assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)
    failed = json.loads(lines[2])
    failed["response"]["status_code"] = 503
    out.write_bytes(b"".join(lines[:2]) + json.dumps(failed).encode() + b"\n" + b"".join(lines[3:]))
    assert run("batch", job, out, *models)[0] == 0 and sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert "nothing is left" in run("batch", job, out, *models)[2]
    for shard in range(1, 4):
        assert run("batch", job, tmp_path / f"{shard}.jsonl", "--shard", f"{shard}/3", *models)[0] == 0
    parts = [(tmp_path / f"{shard}.jsonl").read_bytes().splitlines(keepends=True) for shard in range(1, 4)]
    assert [len(part) for part in parts] == [3, 3, 2] and sorted(line for part in parts for line in part) == sorted(lines)


@pytest.mark.parametrize("text", ['{"id": "batch_req_00000001", "custom_id": "other"}\n', "notes\n", "[]\n"])
def test_a_file_of_other_results_is_not_touched(run: Run, pair: Pair, job: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    assert_rejected(run("batch", job, out, "-m", pair.target), "line 1", out)
    assert out.read_text() == text


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "x/2", "1/0"])
def test_a_shard_is_one_of_n(run: Run, job: Path, tmp_path: Path, shard: str) -> None:
    assert_rejected(run("batch", job, tmp_path / "out", "--shard", shard), "--shard", "1/4")


def test_missing_files_and_packages_are_named_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_rejected(run("batch", tmp_path / "gone.jsonl", tmp_path / "out"), "gone.jsonl")
    assert_rejected(run("batch", "one"), "two files")
    path, messages = tmp_path / "in.jsonl", [{"role": "user", "content": "Hi"}]
    path.write_text(json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": messages}}))
    monkeypatch.setattr(optional_dependencies, "is_installed", lambda package: False)
    error = assert_rejected(run("batch", path, tmp_path / "out", "-m", "no/such"), "jinja2", "pip install")
    assert "starlette" not in error and "uvicorn" not in error
