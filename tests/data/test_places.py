"""What is said of a place that is not there: at once, and without asking a network."""

import socket

import pytest

from ludic.data import load_data
from ludic.data.places import is_local
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
    """A folder with a file and a folder, and no network at all."""
    (tmp_path / "here").mkdir()
    (tmp_path / "afile").write_text("")
    monkeypatch.chdir(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("source", LOCAL)
def test_a_place_that_is_not_there_is_local(source):
    assert is_local(source)


@pytest.mark.parametrize("source", ["gpt2", "Qwen/Qwen2.5-0.5B", "openai/gsm8k", "stanfordnlp/SHP", "meta-llama/Llama-3.1-8B"])
def test_an_id_of_the_hub_is_not(source):
    assert not is_local(source)


@pytest.mark.parametrize("source", ["runs/nosuch", "here/nosuch", "nosuch.gguf"])
def test_models_that_are_not_there_are_missed_at_once(source):
    for load in (lambda: load_model(source, "float32"), lambda: load_reward_model(source)):
        with pytest.raises(ConfigError, match=rf"{source} does not exist; give a folder with config\.json"):
            load()


def test_a_file_in_the_place_of_a_model_is_called_one():
    with pytest.raises(ConfigError, match="afile is a file"):
        load_model("afile", "float32")


@pytest.mark.parametrize("source", ["problems.txt", "runs/nosuch", "here/nosuch"])
def test_data_that_is_not_there_is_missed_at_once(source):
    with pytest.raises(DataError, match=rf"{source} does not exist, seen from .*\.jsonl"):
        load_data(source)
