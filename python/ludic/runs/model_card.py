"""The model card of what a run saves: README.md with metadata for the Hugging Face hub, what
trained the model, its held-out results, and how to load it.

It names files and folders of this machine by their last part alone. Names that come from users or
data are escaped in Markdown, and the metadata is written by a YAML library.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ludic.data.sources import is_local
from ludic.eval.statistics import wilson_interval
from ludic.models.saving import CARD_MARK
from ludic.recipes.named_sources import list_sources
from ludic.runs.directory import DONE, Progress
from ludic.runs.held_out import Evaluation
from ludic.runs.report.summary import find_algorithm

logger = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
DIGEST_LIMIT = 1 << 30
"""Larger files have no digest in the card."""
_SETTINGS = (
    *("task.kind", "reward", "tools", "reward_model", "epochs", "batch_size"),
    *("rollout.prompts", "rollout.group_size", "rollout.temperature"),
    *("loss.loss_type", "loss.beta", "trainer.lr", "trainer.weight_decay", "trainer.lr_scheduler_type", "trainer.max_seq_len"),
    *("lora.rank", "lora.alpha", "lora.dropout", "quantization.kind", "quantization.double", "dtype", "seed"),
)
"""Settings that are listed, where the command has them."""
_MEASURED = {
    "loss": "held-out loss, nats a token",
    "perplexity": "held-out perplexity",
    "eval_pairwise_accuracy": "held-out pairwise accuracy",
    "eval_ece": "held-out calibration error",
    "eval_rewards/accuracies": "held-out accuracy of the implicit rewards",
    "eval_rewards/margins": "held-out margin of the implicit rewards",
}
_SHARES = {"eval_pairwise_accuracy": "eval_num_pairs", "eval_rewards/accuracies": "eval_num_pairs"}
"""Shares of this number of pairs, which have an interval."""


def make_card(name: str, progress: Progress, *, is_adapter: bool) -> str:
    """The card of a run called `name`; of its adapters, or of its whole model."""
    recipe = progress.recipe or {}
    title = f"{name}, adapters" if is_adapter else name
    results = list(_list_results(progress))
    sections = [
        _write_metadata(recipe, progress, is_adapter=is_adapter),
        f"{CARD_MARK}\n\n# {escape(title)}\n\n{_describe(recipe, progress, is_adapter=is_adapter)}",
        "## Training\n\n" + _table(("setting", "value"), _list_training(recipe, progress)),
        "## Held-out results\n\n" + _table(("measured", "before", "after", "95 % interval after"), results) if results else "",
        explain_loading(
            progress.command,
            recipe,
            base=recipe["model"] if is_on_hub(recipe.get("model"), progress) else None,
            is_adapter=is_adapter,
            sees_images=progress.images is not None,
        ),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def try_card(name: str, progress: Progress, *, is_adapter: bool) -> str | None:
    """`make_card`; None, with a warning, where that fails: what was trained is worth more."""
    try:
        return make_card(name, progress, is_adapter=is_adapter)
    except Exception as error:  # of paths and values that users gave
        logger.warning("no model card is written: %s: %s", type(error).__name__, error)
        return None


def escape(value: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    line = " ".join(str(value).split())
    return re.sub(r"([\\`*_{}\[\]()#|!~$])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def is_on_hub(source: Any, progress: Progress) -> bool:
    """Whether it can be an id of the hub: it is no path of this machine, nor was one where the run
    began."""
    return isinstance(source, str) and _HUB_ID.fullmatch(source) is not None and not _is_local(source, progress)


def _is_local(source: str, progress: Progress) -> bool:
    return source in progress.local_sources or is_local(source)


def _name_of(source: str, progress: Progress) -> str:
    """The last part of a path of this machine; a hub id as it is. Of a run's `model` the run."""
    if not _is_local(source, progress):
        return source
    parts = [part for part in Path(source).expanduser().parts if part not in ("/", "model", "adapter", "..", ".", "~")]
    return parts[-1] if parts else "a local folder"


def _write_metadata(recipe: Mapping[str, Any], progress: Progress, *, is_adapter: bool) -> str:
    from huggingface_hub import ModelCardData

    base, algorithm = recipe.get("model"), find_algorithm(progress)
    has_adapters, is_quantized = (recipe.get("lora") or {}).get("rank"), _quantization(recipe).get("kind")
    method = ("qlora" if is_quantized else "lora") if has_adapters else None
    has_base, written = is_on_hub(base, progress), "text-generation" if progress.images is None else "image-text-to-text"
    metadata = ModelCardData(
        base_model=base if has_base else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if progress.command == "train-rm" else written,
        tags=["ludic", *(tag for tag in (progress.command, algorithm, method) if tag)],
        datasets=[source for source in list_sources(recipe.get("data")) if is_on_hub(source, progress)] or None,
        **({"base_model_relation": "adapter" if is_adapter else "finetune"} if has_base else {}),
    )
    return f"---\n{metadata.to_yaml()}\n---"


def _describe(recipe: Mapping[str, Any], progress: Progress, *, is_adapter: bool) -> str:
    base = recipe.get("model")
    kind = "reward model" if progress.command == "train-rm" else "language model"
    of = f"from {escape(_name_of(base, progress))}" if isinstance(base, str) else "from weights that were drawn at random"
    state = "" if progress.phase == DONE else " The training had not ended when this was saved."
    version = escape((progress.versions or {}).get("ludic", ""))
    what = f"Adapters (LoRA) of a {kind}" if is_adapter else f"A {kind}"
    return f"{what}, trained {of} with `ludic {progress.command}` of ludic {version}.{state}"


def _list_training(recipe: Mapping[str, Any], progress: Progress) -> Iterator[tuple[str, str]]:
    yield "algorithm", escape(find_algorithm(progress))
    yield "steps", f"{progress.steps:,}"
    for source in list_sources(recipe.get("data")):
        yield "data", escape(_name_of(source, progress)) + _digest(Path(source).expanduser())
    has_adapters = (recipe.get("lora") or {}).get("rank")
    for setting in _SETTINGS:
        value: Any = recipe
        for part in setting.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        is_used = has_adapters or not setting.startswith("lora.")
        if is_used and value is not None and value is not False:
            yield setting, _show(value, progress)
    for package, version in (progress.versions or {}).items():
        yield f"version of {escape(package)}", escape(version)


def _show(value: Any, progress: Progress) -> str:
    """The value of a setting, without the folders of a path."""
    if isinstance(value, list | tuple):
        return ", ".join(_show(each, progress) for each in value)
    return escape(_name_of(value, progress) if isinstance(value, str) and ("/" in value or "\\" in value) else value)


def _digest(path: Path) -> str:
    if not path.is_file() or (state := path.stat()).st_size > DIGEST_LIMIT:
        return ""
    return f" (SHA-256 {_hash_file(path, state.st_size, state.st_mtime_ns)})"


@lru_cache(maxsize=16)
def _hash_file(path: Path, _size: int, _changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_results(progress: Progress) -> Iterator[tuple[str, ...]]:
    """(what, before, after, interval)."""
    before, after = progress.before or {}, progress.after or {}
    if "sampled_reward" in after:
        measured, earlier = Evaluation.from_dict(after), Evaluation.from_dict(before) if before else None
        for name, value in measured.rates().items():
            interval, was = measured.interval(name), None if earlier is None else earlier.rates().get(name)
            yield (
                escape(name.replace("_", " ")),
                _number(was),
                _number(value),
                "" if interval is None else _span(interval.low, interval.high),
            )
        return
    for key, words in _MEASURED.items():
        if isinstance(after.get(key), int | float):
            trials = after.get(_SHARES.get(key, ""))
            span = _span(*wilson_interval(after[key] * trials, trials)) if trials else ""
            yield words, _number(before.get(key)), _number(after[key]), span


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _span(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def _table(titles: tuple[str, ...], rows: Any) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def explain_loading(
    command: str, recipe: Mapping[str, Any], *, base: str | None, is_adapter: bool, sees_images: bool = False
) -> str:
    """`base`: the hub id of the model that was trained. None if it has none. Adapters over
    quantised weights are loaded over the same weights: 4 bits by transformers, which stores them as
    the run did, and int8 by ludic, since LLM.int8() is another form."""
    written = "AutoModelForImageTextToText" if sees_images else "AutoModelForCausalLM"
    auto = "AutoModelForSequenceClassification" if command == "train-rm" else written
    reader = "processor" if sees_images else "tokenizer"
    classes = f"{auto}, Auto{reader.capitalize()}"
    serve = "--runner pooling " if command == "train-rm" else ""
    where = ["`FOLDER` is this folder or repository."]
    named = base or "BASE"
    if not is_adapter:
        imports, code = f"from transformers import {classes}", f'model = {auto}.from_pretrained("FOLDER")'
        served = f"vllm serve FOLDER {serve}".strip()
    else:
        if base is None:
            where = ["`FOLDER` is this folder or repository, and `BASE` the model that the adapters adapt."]
        labels = ", num_labels=1" if command == "train-rm" else ""
        imports, code = _load_adapters(recipe, auto, classes, f'"{named}"{labels}')
        # vLLM stores nf4 as the run did; of the other kinds it takes the plain base.
        rank, kind = (recipe.get("lora") or {}).get("rank") or 0, _quantization(recipe).get("kind")
        stored = "--quantization bitsandbytes " if kind == "nf4" else ""
        widest = f" --max-lora-rank {1 << (rank - 1).bit_length()}" if rank > 16 else ""
        served = f"vllm serve {named} {serve}{stored}--enable-lora{widest} --lora-modules adapted=FOLDER"
        if kind:
            where.append(
                f"The adapters were trained over a base whose weights are stored in {kind}. Over the plain base they give nearly, but not "
                "exactly, the model that was trained."
            )
    if command == "train-rm" and sees_images:
        place = named if is_adapter else "FOLDER"
        imports = f"from ludic.models.loading import choose_class, load_config\n{imports}"
        code = f'choose_class(load_config("{place}"), scores=True)  # a class that transformers may lack\n{code}'
    return (
        f"## How to load it\n\n{' '.join(where)}\n\n```python\n{imports}\n\n{code}\n"
        f'{reader} = Auto{reader.capitalize()}.from_pretrained("FOLDER")\n```\n\n```bash\n{served}\n```'
    )


def _quantization(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    return recipe.get("quantization") or {}


def _load_adapters(recipe: Mapping[str, Any], auto: str, classes: str, source: str) -> tuple[str, str]:
    """(imports, code). `auto`: the class of the model; `classes`: it and its tokenizer's."""
    section = _quantization(recipe)
    kind, dtype = section.get("kind"), recipe.get("dtype") or "auto"
    if kind is None:
        imports = f"from peft import PeftModel\nfrom transformers import {classes}"
        return imports, f'base = {auto}.from_pretrained({source})\nmodel = PeftModel.from_pretrained(base, "FOLDER")'
    shown = '"auto"' if dtype == "auto" else f"torch.{dtype}"
    computed = section.get("compute_dtype") or (None if dtype == "auto" else dtype)
    product = None if computed is None else f"torch.{computed}"
    if kind == "int8":
        imports = (
            f"import torch\nfrom ludic.models.lora import load_adapter\n"
            f"from ludic.models.quantization import QuantizationSettings, quantize_layers\nfrom transformers import {classes}"
        )
        settings = '"int8"' if product is None else f'"int8", compute_dtype={product}'
        return imports, (
            f"base = {auto}.from_pretrained({source}, dtype={shown})\nquantize_layers(base, QuantizationSettings({settings}))\n"
            'model = load_adapter(base, "FOLDER")'
        )
    imports = f"import torch\nfrom peft import PeftModel\nfrom transformers import {classes}, BitsAndBytesConfig"
    lines = [
        "stored = BitsAndBytesConfig(",
        "    load_in_4bit=True,",
        f'    bnb_4bit_quant_type="{kind}",',
        f"    bnb_4bit_use_double_quant={bool(section.get('double'))},",
        *([] if product is None else [f"    bnb_4bit_compute_dtype={product},"]),
        ")",
        f"base = {auto}.from_pretrained({source}, dtype={shown}, quantization_config=stored)",
        'model = PeftModel.from_pretrained(base, "FOLDER")',
    ]
    return imports, "\n".join(lines)
