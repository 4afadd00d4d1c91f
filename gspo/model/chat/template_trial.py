"""Renders a chat template in a process with little memory and time, before it is rendered in the
run's own.

A template is a program. That of a stranger's model may loop for years, or write gigabytes. This
file is also the process's script. It reads {"templates": [...], "variables": {...}, "seconds": 5}
as JSON, and imports jinja2 alone: transformers takes seconds to import. What a template raises is
no matter here: the run says that itself.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from datetime import datetime
from typing import Any

CPU_SECONDS, MEMORY, CHARACTERS = 5, 1 << 30, 1 << 20
WALL_SECONDS = 60.0  # of a busy machine
TOO_LARGE = 3  # the exit code for a text of more than CHARACTERS
CHATS = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d"},
        {"role": "user", "content": "e"},
    ],
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "a", "parameters": {"type": "object"}},
    }
]


def check_template(
    template: str | dict[str, str] | None, special_tokens: dict[str, Any], path: str
) -> None:
    """Raise ValueError if a tokenizer's chat template takes more time, memory or text for a few
    words than it may.
    """
    if not template:
        return
    templates = list(template.values()) if isinstance(template, dict) else [template]
    texts = {name: value for name, value in special_tokens.items() if isinstance(value, str)}
    asked = json.dumps({"templates": templates, "variables": texts, "seconds": CPU_SECONDS})
    command = [sys.executable, "-P", "-B", __file__]
    try:
        done = subprocess.run(
            command,
            input=asked,
            capture_output=True,
            text=True,
            timeout=WALL_SECONDS,
            check=False,
            encoding="utf-8",
        )
        # ended by a signal, as the limits do it
        too_much = done.returncode == TOO_LARGE or done.returncode < 0
    except subprocess.TimeoutExpired:
        too_much = True
    if too_much:
        raise ValueError(
            f"model.path={path!r}: its chat template takes more than {CPU_SECONDS} s, {MEMORY >> 30} GB or "
            f"{CHARACTERS:,} characters for a chat of a few words: mend or remove chat_template.jinja"
        )


def main() -> None:
    """Render the templates that the standard input holds, within the bounds."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The tag by which templates mark what the model has written; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012, the name and type are jinja2's

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    asked = json.loads(sys.stdin.read())
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, default=str
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for template in asked["templates"]:
        for chat in CHATS:
            for tools in (None, TOOLS):
                render(
                    environment, template, {"messages": chat, "tools": tools, **asked["variables"]}
                )


def render(environment: Any, template: str, variables: dict[str, Any]) -> None:
    """Render a template once. Ends the process if it writes too much."""
    size = 0
    try:
        for piece in environment.from_string(template).generate(
            add_generation_prompt=True, **variables
        ):
            size += len(piece)
            if size > CHARACTERS:
                sys.exit(TOO_LARGE)
    except MemoryError:
        sys.exit(TOO_LARGE)
    except Exception:  # templates raise anything for a chat that they do not expect
        return


if __name__ == "__main__":
    main()
