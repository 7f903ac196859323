"""Markdown that shows any text as it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gradmm.outputs.markdown import escape_markdown, markdown_table
from tests.conftest import examples


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=40))
@examples(300)
def test_escaped_text_renders_as_itself_in_a_table_cell(text: str) -> None:
    table = markdown_table(["a", "b"], [(f"x{escape_markdown(text)}x", "y")])
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(table)
    cells = [token for token in tokens if token.type == "inline"]
    assert len(cells) == 4
    children = cells[2].children or []
    assert {child.type for child in children} <= {"text", "text_special"}
    assert "".join(child.content for child in children) == f"x{' '.join(text.split())}x"
