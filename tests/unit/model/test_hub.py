"""A model that is neither in a folder nor on a hub that can be reached: one line, at once."""

import socket

import pytest
from huggingface_hub import constants

from gspo.model import hub
from gspo.model.hub import check_source, nearest_model
from gspo.model.loading import load, save
from gspo.model.settings import StandIn
from refusals import refuses


@pytest.fixture
def no_hub(monkeypatch):
    """The hub at a port of this machine that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    hub.is_reachable.cache_clear()
    yield
    hub.is_reachable.cache_clear()


def model_folder(folder):
    model, tokenizer = StandIn().make()
    save(model, tokenizer, folder)


def test_a_mistyped_folder_is_refused_with_the_one_that_is_meant(no_hub, tmp_path, monkeypatch):
    model_folder(tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    with refuses("model.path", "whol", "there is no such folder here, and"):
        load("whol")
    load("whole")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6", "qwen3"])
def test_a_mistyped_name_is_refused_with_a_public_one(no_hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with refuses("model.path", problem="cannot be reached from this"):
        load(name)


def test_a_model_in_the_cache_is_taken_from_it(no_hub, monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    check_source("Qwen/Qwen3-0.6B")
    assert constants.HF_HUB_OFFLINE


def test_behind_a_proxy_and_where_something_listens_the_hub_is_asked(no_hub, monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.is_reachable()
    hub.is_reachable.cache_clear()
    assert not hub.is_reachable()
    hub.is_reachable.cache_clear()
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert hub.is_reachable()


def test_nothing_is_suggested_where_nothing_is_alike(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nearest_model("zzz") == ""


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    model, _ = StandIn().make()
    model.save_pretrained(tmp_path)
    with refuses("model.path", problem="has no tokenizer (none of"):
        load(str(tmp_path))
    # this alone makes a tokenizer that knows no text
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with refuses("model.path", problem="tokenizer"):
        load(str(tmp_path))
