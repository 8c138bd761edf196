"""Reads the flat recipe files of MaxEnt-GRPO as recipes of `ludic train`.

Every key is translated, or named with the reason why it has no effect here; an unknown one is an
error with a suggestion. `foreign_names` has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ludic.errors import ConfigError, check_value, did_you_mean
from ludic.recipes.foreign_names import BETA_NAMES, FLAT_REASONS, INSTEAD, MAXENT_ONLY, META, REASONS, SEED, SETTINGS

TASKS = {"grpo": False, "maxent": True, "maxent-grpo": True, "infoseed": False, "info-seed": False}
"""Task of the document's launcher -> whether its objective is MaxEnt's."""
SECTIONS = ("baseline", "maxent", "infoseed")
_PARTS = ("script", "training", "model")
_SPECIAL = (
    *("train_grpo_objective", "maxent_reference_logprobs_source", "maxent_use_clip_objective", "clip_range", "maxent_clip_range"),
    *("controller_meta_enabled", "info_seed_enabled", "use_vllm", "vllm_mode", "adam_beta1", "adam_beta2", "num_processes"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "bf16", "fp16", "max_prompt_length"),
    *("vllm_server_host", "vllm_server_port"),
)
_DEFAULTS: Mapping[str, Any] = {
    "reward": "pure_accuracy_math",
    "rollout.group_size": 8,
    "rollout.temperature": 0.8,
    "rollout.top_p": 0.9,
    "trainer.lr": 1e-6,
    "trainer.lr_scheduler_type": "cosine",
    "trainer.lr_min_ratio": 0.0,
    "trainer.warmup_steps": 0,
    "trainer.betas": [0.9, 0.999],
    "trainer.minibatches_per_batch": 1,
    "checkpoint.every_n_steps": 500,
    "checkpoint.max_to_keep": None,
    "report_header": True,
    "report_aliases": True,
}
"""What the document, or the GRPOConfig below it, does where a file says nothing."""
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8}
"""Their defaults in GRPOConfig. A file with none of them leaves the batch to our recipe."""
_ANSWERS = ("answer", "solution")
_OWN_RATES = ("controller_meta_tau_lr", "controller_meta_beta_lr")
_KL_LAW = ("kl_target", "kl_horizon", "kl_ctl_step_size")
"""Without one of them its controller of beta is off."""
_SERVER_URL, _SERVER_ADDRESS = ("vllm_url", "vllm_server_base_url"), ("vllm_server_host", "vllm_server_port")
WITHOUT_EFFECT = {name: why for name, why in {**REASONS, **FLAT_REASONS}.items() if name not in _SPECIAL}
"""Key that is accepted and changes nothing -> the reason."""
SHARED = {
    name: paths.split(",")[-1]
    for name, paths in SETTINGS.items()
    if name not in (*BETA_NAMES, *WITHOUT_EFFECT) and not paths.startswith("loss.")
}
"""Key with the value of one setting, for both objectives -> the setting."""
KNOWN = (*_SPECIAL, *BETA_NAMES, *SHARED, *MAXENT_ONLY, *META, *SEED, *WITHOUT_EFFECT)
"""Every key that a flat file may have; keys of `INSTEAD` only if they are off."""


@dataclass(frozen=True)
class FlatRecipe:
    """A flat file in the terms of this library."""

    recipe: dict[str, Any]
    """A recipe as its YAML file has it."""
    without_effect: dict[str, str]
    """Key of the file -> why it changes nothing."""


def is_flat(content: Mapping[str, Any]) -> bool:
    """Whether this is a file of MaxEnt-GRPO: it has `train_grpo_objective`, a key `maxent_...`, or
    the sections of its Hydra templates."""
    keys = [str(key) for key in content]
    return "train_grpo_objective" in keys or any(key.startswith("maxent_") for key in keys) or _find_section(content) is not None


def from_flat(
    content: Mapping[str, Any], *, task: str | None = None, replaced: Mapping[str, Any] | None = None, ranks: int = 1
) -> FlatRecipe:
    """Translate a flat file. `task` (grpo, maxent, infoseed) replaces its objective, and `replaced`
    some of its keys. `ranks`: processes that train, if the file has no `num_processes`, of which
    each trains `per_device_train_batch_size` answers at a time; 0: not known, and the batch is left
    out.

    Raises ConfigError for an unknown key, for names of beta with different values, and for settings
    of MaxEnt with the objective of GRPO.
    """
    flat = {**_flatten(content), **(replaced or {})}
    _check_known(flat)
    check_value("task", task, optional=True, choices=TASKS)
    is_maxent = not flat.get("train_grpo_objective", False) if task is None else TASKS[task]
    settings: dict[str, Any] = {"algorithm": "maxent_grpo" if is_maxent else "grpo", "task.kind": "data"}
    own = [key for key in flat if key in MAXENT_ONLY or key in ("maxent_clip_range", "maxent_use_clip_objective")]
    if own and not is_maxent:
        raise ConfigError(f"{', '.join(own)} are settings of MaxEnt, and the objective is GRPO; set train_grpo_objective: false")
    settings |= _rename(flat, {**SHARED, **MAXENT_ONLY})
    coefficient = "algorithm_args.beta" if is_maxent else "algorithm_args.reference_kl"
    if beta := _rename(flat, dict.fromkeys(BETA_NAMES, coefficient)):
        settings |= {**beta, "algorithm_args.kl_level": "sequence"}
    _translate_clip(flat, settings, is_maxent)
    _translate_batch(flat, settings, ranks)
    _translate_rest(flat, settings)
    without = {key: WITHOUT_EFFECT[key] for key in flat if key in WITHOUT_EFFECT} | _list_idle(flat, is_maxent)
    if flat.get("controller_meta_enabled"):  # a rate of 0 leaves `controller_meta_lr` as it is
        rates = {key: value for key, value in flat.items() if key not in _OWN_RATES or value}
        if not is_maxent:
            rates.pop("controller_meta_method", None)
        settings |= {"controllers.meta.method": "analytic", **_rename(rates, META, "controllers.meta.")}
    elif not all(flat.get(key) for key in _KL_LAW):
        for key in _KL_LAW:
            settings.pop(SHARED[key], None)
    if flat.get("info_seed_enabled"):
        settings |= {"info_seed.coeff": 0.0, **_rename(flat, SEED, "info_seed.")}
    elif task in ("infoseed", "info-seed"):
        raise ConfigError(f"task {task} needs info_seed_enabled: true")
    return FlatRecipe(_nest({**_DEFAULTS, **settings}), without)


def translate_name(key: str) -> str:
    """The key of an override without the document's prefixes. `maxent.training.max_steps` and
    `training.max_steps` are `max_steps`."""
    parts = key.split(".")
    if parts[0] in SECTIONS:
        parts = parts[1:]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] in _PARTS else parts)


def _find_section(content: Mapping[str, Any]) -> str | None:
    return next((name for name in SECTIONS if isinstance(content.get(name), Mapping)), None)


def _flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a Hydra template's section, or the content itself."""
    section = _find_section(content)
    if section is None:
        return {str(key): value for key, value in content.items()}
    inner = dict(content[section])
    recipe = inner.pop("recipe", None)
    if recipe is not None:
        raise ConfigError(f"{section}.recipe ({recipe}) names another file; run that one, with the other keys as overrides")
    merged = {str(key): value for key, value in content.items() if key not in (*SECTIONS, "hydra", "defaults")}
    for part in _PARTS:
        merged |= inner.pop(part, None) or {}
    return {**merged, **inner}


def _check_known(flat: Mapping[str, Any]) -> None:
    for key, value in flat.items():
        if key not in KNOWN and key in INSTEAD and value not in (None, False):
            raise ConfigError(f"{key} ({value}) has no translation from a flat file; write {INSTEAD[key]}")
        if key not in KNOWN and key not in INSTEAD:
            remedy = did_you_mean(key, KNOWN, "remove it", count=2)
            raise ConfigError(f"there is no setting {key!r} in recipes of MaxEnt-GRPO{remedy}")


def _translate_clip(flat: Mapping[str, Any], settings: dict[str, Any], is_maxent: bool) -> None:
    """The document's MaxEnt is the likelihood form, without our departures; its clip term is on if
    the file says so."""
    own = flat.get("maxent_clip_range")
    width = own if own is not None else flat.get("clip_range")
    if width is None and not is_maxent:
        width = 0.2  # its default
    if width is not None:
        settings |= {"algorithm_args.clip_eps_low": width, "algorithm_args.clip_eps_high": width}
    if not is_maxent:
        settings["algorithm_args.group_normalize_adv"] = False  # the document's advantages are centred, not scaled
        return
    form = {"form": "likelihood", "baseline": "none", "sampler_exponent": 0.0}  # l weighted by w, not divided by the sampler
    settings |= {f"algorithm_args.{name}": value for name, value in form.items()}
    if flat.get("maxent_use_clip_objective"):
        settings.setdefault("algorithm_args.clip_coeff", 1.0)
    else:
        for name in ("clip_coeff", "clip_baseline", "clip_eps_low", "clip_eps_high"):
            settings.pop(f"algorithm_args.{name}", None)


def _list_idle(flat: Mapping[str, Any], is_maxent: bool) -> dict[str, str]:
    """Keys that have no effect in this file, since another switches them off."""
    idle: dict[str, str] = {}
    if is_maxent and not flat.get("maxent_use_clip_objective"):
        clip = ("clip_range", "maxent_clip_range", "maxent_clip_objective_coef", "maxent_clip_adv_baseline")
        idle |= dict.fromkeys(clip, "maxent_use_clip_objective is off")
    if not flat.get("use_vllm"):
        idle |= dict.fromkeys((*_SERVER_URL, *_SERVER_ADDRESS, "vllm_mode"), "use_vllm is off")
    else:
        idle["vllm_mode"] = "inference.url names a running server, and inference.python starts one"
        if any(flat.get(key) is not None for key in _SERVER_URL):
            idle |= dict.fromkeys(_SERVER_ADDRESS, "the url of the server has the address")
    if not flat.get("controller_meta_enabled"):
        idle |= dict.fromkeys(META, "controller_meta_enabled is off")
        if not all(flat.get(key) for key in _KL_LAW):
            idle |= dict.fromkeys(_KL_LAW, f"the controller of beta needs {', '.join(_KL_LAW)}, each above 0")
    else:
        laws = ("kl_horizon", "kl_ctl_step_size", "maxent_tau_lr", "maxent_tau_warmup_steps")
        idle |= {key: "controller_meta_lr stands in for a rate of 0" for key in _OWN_RATES if not flat.get(key)}
        idle |= dict.fromkeys(laws, "the meta-controller replaces the controllers of beta and tau")
        if not is_maxent and flat.get("controller_meta_method") not in (None, "analytic"):
            idle["controller_meta_method"] = "GRPO has no tau to differentiate by, so beta takes the analytic step"
    if not flat.get("info_seed_enabled"):
        idle |= dict.fromkeys(SEED, "info_seed_enabled is off")
    if flat.get("dataset_solution_column") in _ANSWERS:
        idle["dataset_solution_column"] = "rewards read the columns answer and solution"
    if flat.get("maxent_tau_min") == 0:
        idle["maxent_tau_min"] = "tau never reaches 0; its least value is 1e-6"
    return {key: reason for key, reason in idle.items() if key in flat}


def _translate_batch(flat: Mapping[str, Any], settings: dict[str, Any], ranks: int) -> None:
    """Answers of a step on all ranks, of which `num_generations` are to one prompt."""
    if all(flat.get(name) is None for name in _BATCH) or not ranks:
        return
    counts = {name: default if flat.get(name) is None else flat[name] for name, default in _BATCH.items()}
    counts["num_processes"] = flat.get("num_processes") or ranks
    for name, count in counts.items():
        check_value(name, count, whole=True, least=1)
    per_device, accumulation, group, processes = counts.values()
    answers = per_device * accumulation * processes
    if answers % group:
        product = f"per_device_train_batch_size ({per_device}) x gradient_accumulation_steps ({accumulation}) x {processes} ranks"
        raise ConfigError(f"{product} is {answers} answers, which num_generations ({group}) must divide")
    settings["rollout.prompts"] = answers // group


def _translate_rest(flat: Mapping[str, Any], settings: dict[str, Any]) -> None:
    betas = [flat.get("adam_beta1"), flat.get("adam_beta2")]
    if any(beta is not None for beta in betas):
        settings["trainer.betas"] = [default if beta is None else beta for beta, default in zip(betas, (0.9, 0.999), strict=True)]
    url = settings.pop("inference.url", None)
    if flat.get("use_vllm"):
        check_value("vllm_mode", flat.get("vllm_mode", "server"), choices=("server", "colocate"))
        settings["inference.kind"] = "vllm"
        host, port = (flat.get(key) for key in _SERVER_ADDRESS)
        if url is None and (host is not None or port is not None):
            url = f"http://{host or '127.0.0.1'}:{port or 8000}"
        if url is not None:  # it may end with the path of the document's own endpoint
            settings["inference.url"] = str(url).rstrip("/").removesuffix("/generate")
    if flat.get("output_dir") is not None:
        folder = PurePath(str(flat["output_dir"]))
        settings |= {"output": str(folder.parent), "name": folder.name}
    if settings.get("task.args.answer_column") in _ANSWERS:
        settings.pop("task.args.answer_column")
    if flat.get("run_name") is not None:
        settings["report_args.name"] = flat["run_name"]
    for name in ("bf16", "fp16"):
        if flat.get(name):
            settings["trainer.mixed_precision_dtype"] = name
    lengths = [flat.get("max_prompt_length"), flat.get("max_completion_length")]
    if None not in lengths:
        longest = sum(int(length or 0) for length in lengths)
        settings |= {"trainer.max_seq_len": longest, "trainer.micro_token_budget": max(8192, longest)}
    source = flat.get("maxent_reference_logprobs_source")
    if source is not None:
        check_value("maxent_reference_logprobs_source", source, choices=("auto", "model"))
        settings["reference.source"] = source
    if settings.get("controllers.entropy.least") == 0:
        settings.pop("controllers.entropy.least")  # tau never reaches 0 here
    if isinstance(reward := settings.get("reward"), list) and len(reward) == 1:
        settings["reward"] = reward[0]


def _rename(flat: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The values of `names` that are not null, by their paths here. Raises ConfigError for two
    names of one setting with different values."""
    settings: dict[str, Any] = {}
    for key, value in flat.items():
        if key not in names or value is None:
            continue
        path = f"{prefix}{names[key]}"
        if settings.get(path, value) != value:
            others = " and ".join(f"{name} ({flat[name]})" for name in flat if names.get(name) == names[key])
            raise ConfigError(f"{others} are names of one setting, {path}, with different values; keep one")
        settings[path] = value
    return settings


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, leaf = path.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return nested
