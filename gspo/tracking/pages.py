"""Fills the templates of HTML pages: of a run (run_report.py) and of a study (analysis/blocks.py).

A page is one file that opens from disk without a network. All data in a page is escaped. Characters
that would act on a terminal or deceive a reader are shown as codes. Browsers run no script of a
page and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gspo.io.escaping import escape

TEMPLATES = Path(__file__).parent / "templates"


def fill(template: Path, title: str, values: Mapping[str, object]) -> str:
    """Return the page of a template that extends base.html.j2, with this title and these values."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, TEMPLATES]),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    # the page allows the browser only the style with this digest
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    base = {"title": title, "style": Markup(style), "style_digest": digest}
    return environment.get_template(template.name).render(base | dict(values)) + "\n"
