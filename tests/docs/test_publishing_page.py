"""The code of docs/servers.md that publishes weights runs against a stub, and the options that it
names exist."""

import copy
import inspect
import re
from pathlib import Path

import torch
from stub_sglang import StubSGLang
from stub_weight_server import StubWeightServer, same, weights
from tiny_policy import make_tiny_policy

from ludic.distributed import create_vllm_publisher
from ludic.inference.vllm.launch import WeightBackend
from ludic.models.lora import LoraSettings, apply_lora

SERVERS = (Path(__file__).parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")
PAGE = SERVERS.partition("## Publish weights to running servers")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_runs(tmp_path):
    pushing, adapters, sglang = BLOCKS
    model = apply_lora(copy.deepcopy(make_tiny_policy()), LoraSettings(rank=2))
    with StubWeightServer(tmp_path / "server") as server:
        names = {"urls": [server.url], "tokenizer": None, "weights": weights(1), "model": model}
        exec(pushing, names)
        assert same(server.served, weights(1))
        exec(adapters.replace("/shared", str(tmp_path)), names)
        names["publisher"].publish({}, version=2)
        assert names["client"].served_names == {"policy": "first@2"}
    (tmp_path / "server" / "config.json").write_text("{}")
    with StubSGLang(tmp_path / "server") as server:
        code = sglang.replace("http://127.0.0.1:30000", server.url).replace("/shared/base-model", str(tmp_path / "server"))
        names = {"tokenizer": None}
        exec(code.replace("/shared", str(tmp_path)), names)
        names["publisher"].publish({name: tensor.to(torch.float32) for name, tensor in weights(3).items()}, version=3)
        assert same(server.served, weights(3))


def test_the_options_of_the_page_exist():
    known = inspect.signature(create_vllm_publisher).parameters
    named = set(re.findall(r"`(\w+)=", PAGE)) - {"publisher"}
    assert named == {"directory", "partial", "allow_unchanged", "tolerate_lost_servers", "master_address"}
    assert named <= set(known)
    backends = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(backends) == sorted(WeightBackend.__args__)
