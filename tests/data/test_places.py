"""Errors for missing paths come immediately and without network access."""

import socket

import pytest

from ludic.data import load_data
from ludic.data.sources import is_local
from ludic.errors import ConfigError, DataError
from ludic.models.loading import load_model
from ludic.tasks.judged import load_reward_model

LOCAL = [
    "runs/nosuch",
    "./nosuch",
    "../nosuch",
    "/nosuch",
    "~/nosuch",
    "a/b/c",
    "problems.txt",
    "nosuch.gguf",
    "here/nosuch",
    "afile",
    "a\\b",
]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """A folder with a file and a subfolder, and no network."""
    (tmp_path / "here").mkdir()
    (tmp_path / "afile").write_text("")
    monkeypatch.chdir(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("source", LOCAL)
def test_a_missing_path_counts_as_local(source):
    assert is_local(source)


@pytest.mark.parametrize("source", ["gpt2", "Qwen/Qwen2.5-0.5B", "openai/gsm8k", "stanfordnlp/SHP", "meta-llama/Llama-3.1-8B"])
def test_a_hub_id_does_not_count_as_local(source):
    assert not is_local(source)


@pytest.mark.parametrize("source", ["runs/nosuch", "here/nosuch", "nosuch.gguf"])
def test_missing_models_are_reported_immediately(source):
    for load in (lambda: load_model(source, "float32"), lambda: load_reward_model(source)):
        with pytest.raises(ConfigError, match=rf"{source} does not exist; .*config\.json"):
            load()


def test_the_error_says_when_a_model_path_is_a_file():
    with pytest.raises(ConfigError, match="afile is a file"):
        load_model("afile", "float32")


@pytest.mark.parametrize("source", ["problems.txt", "runs/nosuch", "here/nosuch"])
def test_missing_data_is_reported_immediately(source):
    with pytest.raises(DataError, match=rf"{source} does not exist, seen from .*\.jsonl"):
        load_data(source)
