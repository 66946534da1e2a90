"""The documentation site: `make docs` writes it to build/docs. Strict: a broken link fails."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from typing import Any

project = "celery-relock"
author = "celery-relock contributors"
copyright = author  # noqa: A001  # Sphinx's name for it
release = version_of("celery-relock")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"celery-relock {version}"
html_show_sphinx = False
html_static_path = ["pictures", "site.css"]
html_css_files = ["site.css"]
# Furo's own fonts and scripts; nothing is fetched when a page is read.
html_theme_options = {"navigation_with_keys": True}

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

default_role = "code"  # `x` in a docstring
smartquotes = False  # a message and an option on a page are as they are printed

nitpicky = True
# Types of other libraries, which have no pages here.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(celery|kombu|redis|django|sqlalchemy|rich|click|opentelemetry|prometheus_client)\..*",
    ),
    (
        r"py:.*",
        r"(Client|Redis|Task|Signal|Celery|TracebackType|Callable|Mapping|Sequence|Iterator|Share|Engine|_Locks|Token|CoroutineLock)",
    ),
    (r"py:.*", r"(collections\.abc|contextlib)\..*"),
]


def examples(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Mark as code what stands indented in a docstring, after an empty line."""
    text = re.sub(r"^(\S.*\n)\n(?=    )", r"\1\n::\n\n", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", examples, priority=400)  # before napoleon
