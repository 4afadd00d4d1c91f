"""Model folders that bring code: none of it runs, nobody is asked about it on the terminal. And who
is told of runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTJConfig

import forked
from gspo.io.telemetry import TELEMETRY_OFF
from gspo.model.chat import template_trial
from gspo.model.loading import load, load_outline, save
from gspo.model.settings import HFModel, TinyDense
from gspo.model.tokenizer import character_tokenizer
from gspo.planning.models import config_of
from refusals import refuses

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path) -> Path:
    model, tokenizer = TinyDense(hidden=16, layers=1, heads=2, width=16).make()
    save(model, tokenizer, tmp_path / "model")
    return tmp_path / "model"


def marking(folder: Path) -> str:
    """A statement that leaves a trace."""
    return f"open({str(folder.parent / 'ran')!r}, 'w')"


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder: Path) -> str:
    """Why a folder is not loaded, in a process whose user would say yes to everything."""
    script = f"from gspo.model.loading import load\ntry: load({str(folder)!r})\nexcept ValueError as e: print(e)"
    command = [sys.executable, "-c", script]
    done = forked.run(command, input="y\n" * 9, cwd=ROOT, seconds=120)
    assert not (folder.parent / "ran").exists(), "the folder's code was run"
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_code_of_a_model_is_refused_and_not_asked_about(folder):
    code = f"{marking(folder)}\nfrom transformers import PretrainedConfig as Config, PreTrainedModel as Model"
    (folder / "own.py").write_text(code)
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change(folder / "config.json", model_type="own", auto_map=auto)
    assert "needs code of its own (auto_map), which is never run; choose a model" in refused(folder)


def test_code_that_comes_with_a_known_architecture_and_tokenizer_is_not_run(folder):
    (folder / "own.py").write_text(marking(folder))
    change(
        folder / "config.json",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    load(str(folder))
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("harmless", [True, False])
def test_weights_in_a_pickle_are_never_read(folder, harmless):
    class Runs:
        def __reduce__(self):
            return exec, (marking(folder),)

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights if harmless else {"weights": Runs()}, folder / "pytorch_model.bin")
    with refuses("model.path", problem="convert them to safetensors"):
        load(str(folder))
    assert not (folder.parent / "ran").exists()


def test_a_kernel_from_the_hub_is_refused():
    with refuses("model.attention", "somebody/kernel", "names code on the hub"):
        HFModel(path="x", attention="somebody/kernel")


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]
)
def test_a_kernel_from_the_hub_that_a_configuration_names_is_not_asked_for(folder, key):
    change(folder / "config.json", **{key: "somebody/kernel"})
    model, _ = load(str(folder))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "odd", [{"model_type": [1]}, {"hidden_act": "os"}, {"hidden_size": "x"}, {"vocab_size": -1}]
)
def test_an_odd_configuration_is_refused_in_one_line(folder, odd):
    change(folder / "config.json", **odd)
    with refuses("model.path", str(folder), "cannot be loaded: "):
        load(str(folder))


@pytest.mark.slow
def test_no_library_reports_anything_whatever_the_environment_says():
    script = """
import gspo.cli.train, os
from gspo.io.telemetry import TELEMETRY_OFF
from huggingface_hub import constants
is_off = all(name in os.environ for name in TELEMETRY_OFF)
print(is_off, constants.HF_HUB_DISABLE_TELEMETRY, os.environ["WANDB_ERROR_REPORTING"])
"""
    clean = {name: value for name, value in os.environ.items() if name not in TELEMETRY_OFF}
    command = [sys.executable, "-c", script]
    for told in ({}, {"WANDB_ERROR_REPORTING": "true"}):
        done = subprocess.run(
            command,
            env=clean | told,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == "True True false"


CLAIMS = [
    (
        "config",
        {"num_hidden_layers": 5_000_000},
        r"says num_hidden_layers=5000000, but its weights are \d+ tensors",
    ),
    ("config", {"vocab_size": 60_000_000}, r"says vocab_size=60000000, which no model has"),
    (
        "config",
        {"intermediate_size": 2**40},
        r"says intermediate_size=1099511627776, which no model has",
    ),
    ("config", {"num_labels": 9_999_999}, r"says num_labels=9999999, which no model has"),
    (
        "config",
        {"attention_types": [[["global", "local"], 500_000_000]]},
        r"says attention_types=500000000, which no model has",
    ),
    (
        "config",
        {"vocab_size": 10_000_000},
        r"makes a model of [\d,]+ numbers, but its weights are [\d,]+ bytes",
    ),
    ("config", {"hidden_size": 2**16, "vocab_size": 2**16}, r"makes a model of [\d,]+ numbers"),
    (
        "tokenizer_config",
        {"tokenizer_class": "T5Tokenizer", "extra_ids": 10**8},
        r"says extra_ids=100000000, which no",
    ),
]


@pytest.mark.parametrize(("file", "claim", "message"), CLAIMS)
def test_a_configuration_that_claims_more_than_the_weights_is_refused_at_once(
    folder, file, claim, message
):
    change(folder / f"{file}.json", **claim)
    with pytest.raises(
        ValueError, match=rf"^model\.path={folder}: {file}\.json {message}.*$"
    ) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_a_table_of_all_positions_counts_too(tmp_path):
    """GPT-J makes one, of which the weights have nothing."""
    tokenizer = character_tokenizer()
    config = GPTJConfig(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, rotary_dim=8, n_positions=64
    )
    save(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path)
    load(str(tmp_path))
    change(tmp_path / "config.json", n_positions=2_000_000_000)
    with refuses("model.path", problem="makes a model of 16,000,000,000 numbers"):
        load(str(tmp_path))


def test_qwen2_may_say_that_more_layers_than_it_has_have_no_window(folder):
    change(folder / "config.json", max_window_layers=80)
    model, _ = load(str(folder))
    assert model.config.num_hidden_layers == 1


@pytest.mark.parametrize(
    "read", [load_outline, lambda path, attention: config_of(HFModel(path=path))]
)
def test_sizes_are_checked_wherever_a_configuration_is_read(folder, read):
    change(folder / "config.json", num_hidden_layers=10**9)
    with refuses("model.path", problem="says num_hidden_layers=1000000000"):
        read(str(folder), "sdpa")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "generation_config.json is no JSON object"),
        ("[]", "generation_config.json is no JSON object"),
        ('{"eos_token_id": "2"}', "generation_config.json says eos_token_id='2'"),
        ('{"eos_token_id": [2, 2.5]}', r"generation_config.json says eos_token_id=[2, 2.5]"),
        ('{"eos_token_id": [[2]]}', "generation_config.json says eos_token_id=[[2]]"),
    ],
)
def test_stop_tokens_that_cannot_be_read_are_refused(folder, content, problem):
    (folder / "generation_config.json").write_text(content)
    with refuses("model.path", problem=problem):
        load(str(folder))


def test_sizes_are_those_of_the_bytes_that_are_there_and_read(folder):
    """Not those that a header claims, nor those of a file that transformers does not read."""
    forged = json.dumps(
        {"x": {"dtype": "F32", "shape": [10**11], "data_offsets": [0, 4 * 10**11]}}
    ).encode()
    other = folder / "zz.safetensors"
    other.write_bytes(len(forged).to_bytes(8, "little") + forged)
    with open(other, "r+b") as file:
        file.truncate(2**40)  # a file of holes
    change(folder / "config.json", vocab_size=9_000_000)
    with refuses("model.path", problem="makes a model of"):
        load(str(folder))
    (folder / "model.safetensors").write_bytes(len(forged).to_bytes(8, "little") + forged)
    with pytest.raises(
        ValueError, match=r"model\.safetensors cannot be read .* shorter than its tensors"
    ):
        load(str(folder))


def test_a_folder_without_weights_builds_no_layers(folder):
    (folder / "model.safetensors").unlink()
    for layers, message in (
        (10**9, "says num_hidden_layers=1000000000, which no model has"),
        (2, "cannot be loaded"),
    ):
        change(folder / "config.json", num_hidden_layers=layers)
        with refuses("model.path", str(folder), message):
            load(str(folder))


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: None if "mlp" in name else name, r"lack 3 weights of the model: .*mlp\."),
        (lambda name: f"module.{name}", r"lack \d+ weights of the model: .* and \d+ more"),
    ],
)
def test_a_folder_that_lacks_weights_is_refused(folder, rename, message):
    file = folder / "model.safetensors"
    weights = load_file(file)
    renamed = {rename(name): tensor for name, tensor in weights.items() if rename(name)}
    save_file(renamed, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(str(folder))


def test_a_plan_needs_no_weights(folder):
    """A folder cloned without its large files has pointers in their place."""
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert config_of(HFModel(path=str(folder))).num_hidden_layers == 1
    load_outline(str(folder), "sdpa")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load(str(folder))


def test_damaged_weights_are_named(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (
        b"",
        b"\xff" * 100,
        whole[:20],
        (2**40).to_bytes(8, "little"),
        (9).to_bytes(8, "little") + b"[" * 9,
    ):
        weights.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"model\.safetensors cannot be read as safetensors"
        ) as caught:
            load(str(folder))
        assert "\n" not in str(caught.value)
    weights.write_bytes(whole)
    load(str(folder))


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = [
    LOOP,
    "{% if messages|length > 4 %}" + LOOP + "{% endif %}",
    "{% if tools %}" + LOOP + "{% endif %}",
    "{% if messages[0].content|length > 3 %}" + LOOP + "{% endif %}",
    "{% if not add_generation_prompt %}" + LOOP + "{% endif %}",
    "{{ 'a' * 3000000000 }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
    "{{ 'a'|center(3000000000) }}",
]


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_hangs_or_fills_the_memory_is_refused(folder, template, monkeypatch):
    monkeypatch.setattr(template_trial, "CPU_SECONDS", 1)
    (folder / "chat_template.jinja").write_text(template)
    with refuses("model.path", str(folder), "takes more than 1 s, 1 GB or 1,048,576 characters"):
        load(str(folder))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{{ strftime_now('%Y') }}{{ tools|tojson(indent=2) }}{{ bos_token }}",
    ],
)
def test_templates_that_do_little_are_not_refused(folder, template):
    """Whatever they raise: the run says that itself where it matters."""
    (folder / "chat_template.jinja").write_text(template)
    assert load(str(folder))[1].chat_template == template


def test_an_adapter_in_a_models_folder_is_not_applied_without_a_word(folder):
    change_to = {
        "peft_type": "LORA",
        "base_model_name_or_path": "x",
        "r": 4,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(change_to))
    with refuses("model.path", problem="holds a LoRA adapter"):
        load(str(folder))
