"""Tests of the server, which need its extra packages."""

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")
pytest.importorskip("jinja2", reason="the extra [chat] is not installed")
pytest.importorskip("tokenizers", reason="the extra [hub] is not installed")
