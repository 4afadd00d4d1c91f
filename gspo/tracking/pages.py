"""Fills the templates of HTML pages.

They are the pages of a run (run_report.py), of a recorded step (step_page.py) and of a study
(analysis/blocks.py).

A page is one file that opens from disk without a network. All data in a page is escaped. Characters
that would act on a terminal or deceive a reader are shown as codes. Browsers fetch nothing for a
page. They run no script, except our own script of the page of a recorded step.
"""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gspo.io.escaping import escape

TEMPLATES = Path(__file__).parent / "templates"


def fill(
    template: Path, title: str, values: Mapping[str, object], *, script: str = "", style: str = ""
) -> str:
    """Return the page of a template that extends base.html.j2, with this title and these values.

    `script` is the file of the page's script, and `style` that of rules beside style.css. Both
    files lie in TEMPLATES. The page allows the browser only the script and the style with the
    digests that it names."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, TEMPLATES]),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rules = _read("style.css")
    if style:
        rules += _read(style)
    base = {"title": title, "style": Markup(rules), "style_digest": _digest(rules), "script": ""}
    if script:
        program = _read(script)
        base |= {"script": Markup(program), "script_digest": _digest(program)}
    return environment.get_template(template.name).render(base | dict(values)) + "\n"


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the digest of a script or style as a Content-Security-Policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
