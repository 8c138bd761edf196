"""`ludic doctor` with settings: the table, the advice, and what it says if nothing fits."""

import json

import commands
import pytest

from ludic.cli import doctor

SMALL = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]


def test_a_run_that_fits_is_said_to_fit() -> None:
    shown = commands.ludic("doctor", "sort", *SMALL)
    assert "The run fits as it is set." in shown
    assert "dtype=bfloat16" in shown
    report = json.loads(commands.ludic("doctor", "sort", *SMALL, "--json"))
    assert report["device"] in ("cpu", "cuda")
    assert report["estimates"][0]["settings"] == "as set"
    assert report["estimates"][0]["peak_bytes"] == max(
        report["estimates"][0][f"{part}_bytes"] for part in ("training", "sampling")
    )
    assert report["room_bytes"] < report["available_bytes"]


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        ((False, True, False, True), "It fits with dtype=bfloat16"),
        ((False, False, False, True), "It fits with all of dtype=bfloat16 lora.rank=16"),
        ((False, False, False, False), "take a smaller model"),
    ],
)
def test_what_to_set_is_said(fits: tuple[bool, ...], expected: str) -> None:
    names = ("as set", "dtype=bfloat16", "lora.rank=16", "all of these")
    estimates = [{"settings": name, "fits": does} for name, does in zip(names, fits, strict=True)]
    assert expected in doctor._conclude(estimates)


def test_runs_of_the_other_commands_are_estimated() -> None:
    """None of them samples; a reward model has one score and no logits."""
    of = {name: json.loads(commands.ludic("doctor", name, *SMALL, "--json")) for name in ("train", "sft", "dpo", "train-rm")}
    own = {name: report["estimates"][0] for name, report in of.items()}
    assert own["train"]["kv_cache_bytes"] > own["sft"]["kv_cache_bytes"] == own["dpo"]["kv_cache_bytes"] == 0
    assert own["sft"]["logits_bytes"] > own["train-rm"]["logits_bytes"] == 0
    assert of["sft"]["parameters"] + 16 == of["train-rm"]["parameters"]  # the head


def test_the_reference_counts_as_a_second_copy_of_the_weights() -> None:
    """With adapters it is the policy without them."""

    def weights(*settings: str) -> int:
        return json.loads(commands.ludic("doctor", "sort", *SMALL, "--json", *settings))["estimates"][0]["weights_bytes"]

    held = "algorithm_args.reference_kl=0.1"
    assert weights(held) == 2 * weights()
    assert weights(held, "lora.rank=2") == weights("lora.rank=2")


def test_a_model_that_is_not_there_is_named() -> None:
    assert "nosuch" in commands.refused("doctor", "model=runs/nosuch")


def test_layers_that_no_adapter_fits_are_named() -> None:
    said = commands.refused("doctor", "sort", *SMALL, "lora.rank=4", "lora.target_modules=[nope]")
    assert "lora.target_modules (['nope']): Target modules {'nope'} not found" in said


def test_pages_of_files_do_not_count_as_used(tmp_path) -> None:
    """A limit of 1000, of which 900 are used and 600 of these are files that nothing reads: 700 are
    left."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert doctor._list_limits(tmp_path) == [100]
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 600\nactive_file 0\n")
    assert doctor._list_limits(tmp_path) == [700]
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor._list_limits(tmp_path) == []


def test_a_system_that_does_not_say_what_is_free_gives_all_of_its_memory(tmp_path, monkeypatch) -> None:
    """macOS has no /proc and no SC_AVPHYS_PAGES."""
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 2000 kB\nMemAvailable: 1500 kB\nHugePages_Total: 0\n")
    assert doctor._find_free(memory) == 1500 * 1024
    sizes = {"SC_PHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(doctor.os, "sysconf_names", dict.fromkeys(sizes, 0))
    monkeypatch.setattr(doctor.os, "sysconf", sizes.__getitem__)
    assert doctor._find_free(tmp_path / "none") == 7 * 4096


@pytest.mark.parametrize(
    ("instruction", "says"), [("amx_bf16", "try trainer.mixed_precision_dtype=bf16"), ("avx2", "many times slower")]
)
def test_doctor_says_whether_the_processor_computes_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, instruction: str, says: str
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False, instruction: True})
    assert says in commands.ludic("doctor")
