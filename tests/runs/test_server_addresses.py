"""Where servers are, and the secret that they share."""

import stat

import pytest

from ludic.errors import ConfigError
from ludic.inference.vllm.in_server.secret import HEADER, VARIABLE
from ludic.runs.servers import ServerAddresses


@pytest.fixture
def addresses(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    return ServerAddresses(tmp_path / "servers")


def test_an_address_is_there_while_the_server_is_ready(addresses):
    assert addresses.read("server0") is None
    addresses.forget("server0")
    addresses.write("server0", "http://127.0.0.1:8000")
    addresses.write("server0", "http://127.0.0.1:8001")
    assert ServerAddresses(addresses._folder).read("server0") == "http://127.0.0.1:8001"
    assert addresses.read("server1") is None
    addresses.forget("server0")
    assert addresses.read("server0") is None


def test_all_servers_have_the_secret_of_the_first_which_only_the_user_can_read(addresses):
    with pytest.raises(ConfigError, match="no server of the run has started"):
        addresses.secret_headers()
    secret = addresses.make_secret()
    assert len(secret) >= 32
    assert ServerAddresses(addresses._folder).make_secret() == secret
    assert addresses.secret_headers() == {HEADER: secret}
    (file,) = addresses._folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_secret_of_the_user_is_not_written(addresses, monkeypatch):
    monkeypatch.setenv(VARIABLE, "given by the user")
    assert addresses.make_secret() == "given by the user"
    assert addresses.secret_headers() == {HEADER: "given by the user"}
    assert not addresses._folder.exists()
