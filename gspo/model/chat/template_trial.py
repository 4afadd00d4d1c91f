"""Renders a chat template in a process with little memory and time, as a trial before the run.

A template is a program. The template of an untrusted model may loop for years, or write gigabytes.
This file is also the script of that process. It reads {"templates": [...], "variables": {...},
"seconds": 5} as JSON. It imports only jinja2, because transformers takes seconds to import. Errors
that a template raises are ignored here: the run reports them itself.
"""

import json
import resource
import subprocess
import sys
from datetime import datetime
from typing import Any

from gspo.io.errors import SettingError

CPU_SECONDS = 5
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARS = 1 << 20
# enough for a busy machine
WALL_SECONDS = 60.0
# the exit code for a text of more than MAX_CHARS
TOO_LARGE = 3
# words that stand for the texts of turns; no template changes a plain word
ANSWER = "zqanswerqz"
SYSTEM = "zqsystemqz"
QUESTION = "zquserqz"
SENTENCE = "The sum of 12 and 30 is 42, said the engineer."
CHATS = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
    [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
    [{"role": "user", "content": f"{SENTENCE}\n" * 20}],
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
    """Raise ValueError if a chat template exceeds the limits of time, memory or text in a trial."""
    if not template:
        return
    templates = list(template.values()) if isinstance(template, dict) else [template]
    variables = {name: value for name, value in special_tokens.items() if isinstance(value, str)}
    request = {"templates": templates, "variables": variables, "seconds": CPU_SECONDS}
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-B", __file__],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=WALL_SECONDS,
            check=False,
            encoding="utf-8",
        )
        # The process limits end it with a signal, which is a negative code.
        exceeds_limits = process.returncode == TOO_LARGE or process.returncode < 0
    except subprocess.TimeoutExpired:
        exceeds_limits = True
    if exceeds_limits:
        raise SettingError(
            "model.path",
            path,
            f"its chat template takes more than {CPU_SECONDS} s, {MAX_MEMORY_BYTES >> 30} "
            f"GB or {MAX_CHARS:,} characters for a chat of a few words",
            remedy="fix or remove chat_template.jinja",
        )


def main() -> None:
    """Render the templates of the standard input within the limits."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The tag by which templates mark the model's text. Here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012, the name and type are jinja2's

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    request = json.loads(sys.stdin.read())
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, default=str
    )
    # jinja2's annotation allows its own functions only
    functions: dict[str, Any] = environment.globals
    functions["raise_exception"] = refuse
    functions["strftime_now"] = lambda form: datetime.now().strftime(form)
    resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"], request["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for text in request["templates"]:
        try:
            template = environment.from_string(text)
        # jinja2 computes constant expressions while it compiles
        except MemoryError:
            sys.exit(TOO_LARGE)
        # any other error: the run reports it itself
        except Exception:
            continue
        for chat in CHATS:
            for tools in (None, TOOLS):
                for adds_prompt in (True, False):
                    variables = {"messages": chat, "tools": tools, **request["variables"]}
                    variables["add_generation_prompt"] = adds_prompt
                    render(template, variables)


def render(template: Any, variables: dict[str, Any]) -> None:
    """Render a template once. End the process if it writes too much."""
    size = 0
    try:
        for piece in template.generate(**variables):
            size += len(piece)
            if size > MAX_CHARS:
                sys.exit(TOO_LARGE)
    except MemoryError:
        sys.exit(TOO_LARGE)
    # templates raise any exception for a chat that they do not expect
    except Exception:
        return


if __name__ == "__main__":
    main()
