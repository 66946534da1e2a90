from __future__ import annotations

from scripts.options_page import PAGE, page


def test_the_page_of_options_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m scripts.options_page"
