"""The commands of docs/lora.md are valid. Its Python runs in `test_readme.py`."""

import re
import shlex
from pathlib import Path

from ludic.cli.evaluate import resolve
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_sft

PAGE = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_are_parsed() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    found = [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines()]
    adapters, quantised = ["train", "train", "sft", "sft", "eval"], ["sft", "train", "doctor"]
    on_servers = ["train", "train", "serve", "train", "train"]
    assert [arguments[0] for arguments in found] == adapters + quantised + on_servers
    for name, *arguments in found:
        if name == "serve":
            continue
        if name == "eval":
            assert resolve(arguments)[0].model == "runs/NAME/adapter"
            continue
        recipe = (compose_sft if name == "sft" else compose)(arguments)
        assert recipe.lora.rank in (8, 16)
        assert (recipe.quantization.kind is not None) == any(each.startswith("quantization=") for each in arguments)


def test_the_settings_of_the_page_exist_with_these_defaults() -> None:
    lora = compose().lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules, lora.publish) == (0, None, 0.0, None, "auto")
    for given in re.findall(r"`((?:lora|trainer)\.\w+=[^`]+)`", PAGE):
        compose(["lora.rank=2", given])
