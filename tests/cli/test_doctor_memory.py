"""`ludic doctor` with settings: the table, the advice, and what it says if nothing fits."""

import json

import commands
import pytest

from ludic.cli import doctor_memory

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
        ((False, True, False, True), "does not fit as it is set. It fits with dtype=bfloat16"),
        ((False, False, False, True), "It fits with all of dtype=bfloat16 lora.rank=16"),
        ((False, False, False, False), "None of these settings makes it fit: take a smaller model"),
    ],
)
def test_what_to_set_is_said(fits: tuple[bool, ...], expected: str) -> None:
    names = ("as set", "dtype=bfloat16", "lora.rank=16", "all of these")
    estimates = [{"settings": name, "fits": does} for name, does in zip(names, fits, strict=True)]
    assert expected in doctor_memory._conclude(estimates)


def test_a_model_that_is_not_there_is_named() -> None:
    assert "nosuch" in commands.refused("doctor", "model=runs/nosuch")
