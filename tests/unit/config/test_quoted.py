"""Words of the command line that Hydra's grammar cannot read as they are typed."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gspo.cli.option_files import composed_settings, quoted

VALUES = [
    "checkpoints/epoch=9-step=1",
    "模型/新加卷2",
    "a#b",
    "~/models/x",
    "a[1]",
    "it's",
    "a{b}",
    "a\\'b",
    "x&y",
    "<s>",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_what_was_typed(value):
    override = OverridesParser.create().parse_override(quoted(f"model.path={value}"))
    assert override.value() == value and not override.is_sweep_override()


READABLE = """seed=1
seed=1,2
rollout.stop=['a','b']
advantage=glob([gae])
seed=range(1,4)
study=
-m
steps
--config-dir=a=b
+task@tasks.x=y
model.path='a=b'
hydra.sweeper.params={a: 1}
p%r=1"""


@pytest.mark.parametrize("word", READABLE.splitlines())
def test_what_the_grammar_reads_stays_as_it_is(word):
    assert quoted(word) == word


def test_the_end_of_a_line_from_windows_is_dropped():
    assert quoted("study=abc\r") == "study=abc"
    assert composed_settings(["task=math", "study=abc\r"]).study == "abc"


def test_settings_have_the_path():
    words = ["model=hf", "model.path=checkpoints/epoch=9", "task=math", "cold_start.steps=0"]
    assert composed_settings(words).model.path == "checkpoints/epoch=9"


def test_a_glob_of_benchmarks_is_read_as_hydra_reads_it():
    from gspo.cli.evaluate import with_benchmarks

    words = with_benchmarks(["benchmark=glob([aime*,gsm8k])", "k=2"])
    assert words[0] == "benchmark=[aime24,aime25,gsm8k]" and "+task@tasks.aime25=aime25" in words
    assert with_benchmarks(["benchmark=[gsm8k]"]) == [
        "benchmark=[gsm8k]",
        "+task@tasks.gsm8k=gsm8k",
    ]
