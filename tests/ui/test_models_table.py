"""The table of `specdec models` in terminals of any width."""

import pytest

from specdec.ui.models_table import OPTIONAL_COLUMNS, make_table
from specdec.ui.text_layout import cell_width

ROW = {"model": "a-very-long-name-of-a-model.gguf", "shape": "llama 2 x 8", "file": "1 MB", "drafts that fit": "日本.bin, b.bin"}


@pytest.mark.parametrize("width", [None, 200, 80, 60, 45, 20, 5])
def test_narrow_table_has_one_row_for_each_model_and_whole_names(width: int | None) -> None:
    names = [*dict.fromkeys((*ROW, *OPTIONAL_COLUMNS))]
    rows = [dict.fromkeys(names, "1.5 GB") | ROW, dict.fromkeys(names, "x")]
    heading, first, second, *note = make_table(rows, width)
    assert heading.startswith("model") and first.startswith(ROW["model"]) and second.startswith("x")
    assert ("KV/token" in heading) == (width is None or width == 200) == (not note)
    assert ("日本.bin, b.bin" in first) == (width is None or width >= 60)
    if width and width >= 45:
        assert max(map(cell_width, (heading, first, second))) <= width
    assert make_table([], width) == []
