"""Runs whose rows or environments have images: where they are stored, and what is refused before
anything is written."""

import json
import re
import shutil
from random import Random

import numpy as np
import pytest
import torch
from commands import ludic, refused, summary_of, train_until
from graded_shapes import SETTINGS as SHAPES
from image_spans import draw_picture
from PIL import Image
from safetensors.torch import load_file
from tiny_vision import make_tiny_vision

from ludic.images.store import ImageStore, current_store
from ludic.models.images.processor import ImageProcessor
from ludic.models.saving import save_policy
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_sft
from ludic.runs.data.sft import SFTData
from ludic.tasks.shapes import Shapes, draw_picture as draw_shapes

SMALL = [
    "network.hidden_size=16",
    "network.num_layers=1",
    "network.num_heads=2",
    "network.num_kv_heads=1",
    "network.intermediate_size=16",
]
VISION = ["network.kind=qwen2_vl", *SMALL]


def write_rows(folder, count=12):
    (folder / "img").mkdir(parents=True)
    rows = []
    for number in range(count):
        picture = draw_picture(number).repeat(4, 0).repeat(4, 1)
        Image.fromarray(picture).save(folder / "img" / f"{number}.png")
        rows.append({"prompt": "How many?", "completion": str(number % 3), "images": [f"img/{number}.png"]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_images_that_a_run_has_seen_lie_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    before = current_store()
    heldout = "task.args.num_heldout=3"
    ludic(
        "train",
        "recipe=shapes",
        *SMALL,
        "steps=0",
        "warmup.steps=0",
        "evaluation.prompts=3",
        heldout,
        f"output={tmp_path}",
        "name=run",
    )
    store = ImageStore(tmp_path / "run" / "images")
    shown = [draw_shapes(problem["id"]) for problem in Shapes(num_heldout=3).suites()["held out"]]
    assert all(store.has(ImageStore().add(picture)) for picture in shown)
    assert current_store() is before
    assert not list((tmp_path / "tmp").glob("ludic-images-*"))


def test_sft_reads_rows_with_images_for_a_model_that_sees_them(tmp_path):
    from ludic.models.images.processor import find_processor
    from ludic.recipes.model import build_model, build_tokenizer

    recipe = compose_sft([f"data={write_rows(tmp_path / 'data')}", *VISION, "heldout=0.3"])
    tokenizer = build_tokenizer(recipe)
    images = find_processor(build_model(recipe, tokenizer))
    data = SFTData.read(recipe, tokenizer)
    assert (len(data.train), len(data.heldout)) == (9, 3)  # by its image, each prompt is another one
    assert len({item.images[0].digest for item in (*data.train, *data.heldout)}) == 12
    assert all(np.asarray(item.input_ids)[item.images[0].start] == images.placeholder_id for item in data.train)


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_images_for_a_model_of_text_are_refused_before_anything_is_written(tmp_path, command):
    path = write_rows(tmp_path / "data")
    if command == "dpo":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "chosen": "1", "rejected": "2"}) + "\n" for row in rows))
    message = refused(command, f"data={path}", *SMALL, f"output={tmp_path / 'runs'}")
    assert "rows.jsonl, line 1 has images, and the model reads text alone" in message
    assert not (tmp_path / "runs").exists()


def test_a_missing_picture_is_refused_with_its_line(tmp_path):
    path = write_rows(tmp_path / "data")
    (tmp_path / "data" / "img" / "7.png").unlink()
    message = refused("sft", f"data={path}", *VISION, f"output={tmp_path / 'runs'}")
    assert "rows.jsonl, line 8: images[0] ('img/7.png') does not exist in" in message
    (tmp_path / "data" / "img").rename(tmp_path / "img")
    assert "does not exist" in refused("sft", f"data={path}", *VISION, f"output={tmp_path / 'runs'}")
    assert "images[0] ('img/7.png')" in refused(
        "sft", f"data={path}", f"image_folder={tmp_path}", *VISION, f"output={tmp_path / 'runs'}"
    )
    assert not (tmp_path / "runs").exists()


def test_the_folder_of_images_is_a_setting_of_a_task():
    recipe = compose(["data=rows.jsonl", "reward=gsm8k", "model=somewhere", "task.args.image_folder=pictures"])
    assert recipe.task.args["image_folder"] == "pictures"


@pytest.fixture
def begun(tmp_path):
    """A run that was stopped after a step, of a model in a folder."""
    model, processor = make_tiny_vision("qwen2_vl")
    save_policy(model, processor.tokenizer, tmp_path / "model")
    settings = [f"data={write_rows(tmp_path / 'data')}", f"model={tmp_path / 'model'}", "batch_size=2", "heldout=0"]
    assert train_until("sft", 1, [*settings, "threads=1", f"output={tmp_path}", "name=run"]) == 130
    return tmp_path / "run"


def test_a_run_that_is_resumed_with_another_processor_is_refused(begun, monkeypatch):
    config, processor = begun / "config.yaml", begun.parent / "model" / "processor_config.json"
    for path, old, new, said in [
        (config, "max_pixels: null", "max_pixels: 256", r"images\.max_pixels is 256, .*began with None"),
        (processor, '"patch_size": 4', '"patch_size": 8', rf"{begun.parent / 'model'} has changed .*processor_config\.json"),
    ]:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        assert re.search(said, refused("sft", "--resume", str(begun)))
        path.write_text(text)
    began = json.loads((begun / "progress.json").read_text())["images"]["processor"]
    with monkeypatch.context() as patch:
        patch.setattr(ImageProcessor, "fingerprint", "another")  # as with another version of a library
        assert re.search(rf"began with the processor {began}, .* has another", refused("sft", "--resume", str(begun)))
    ludic("sft", "--resume", str(begun))


def test_a_run_that_is_resumed_without_an_image_is_refused(tmp_path, begun):
    (tmp_path / "data" / "img" / "7.png").rename(tmp_path / "7.png")
    assert "line 8: images[0] ('img/7.png') does not exist in" in refused("sft", "--resume", str(begun))
    settings = [*SHAPES, "inference.batches_ahead=1", "checkpoint.every_n_steps=1", f"output={tmp_path}", "name=ahead"]
    assert train_until("train", 2, settings, phase="reinforce") == 130
    (tmp_path / "ahead" / "images").rename(tmp_path / "images")
    message = refused("train", "--resume", str(tmp_path / "ahead"))
    assert re.search(rf"image '\w{{32}}' is not in {tmp_path}/ahead/images; restore it", message)
    shutil.copytree(tmp_path / "images", tmp_path / "ahead" / "images", dirs_exist_ok=True)
    assert "step 5" in ludic("train", "--resume", str(tmp_path / "ahead"))


def test_the_limit_of_pixels_holds_for_the_small_model():
    from ludic.models.images.processor import find_processor
    from ludic.recipes.model import build_policy

    counts = []
    for more in ([], ["images.max_pixels=256"]):
        processor = find_processor(build_policy(compose(["recipe=shapes", *SMALL, *more]))[0])
        counts.append(processor.process(processor.store.add(np.zeros((24, 24, 3), dtype=np.uint8))).num_patches)
    assert counts == [36, 16]


def write_pairs(folder, count=24):
    """Pairs of which the image alone says which text is better: each text is chosen for one picture
    and rejected for another."""
    rows = [json.loads(line) for line in write_rows(folder, count).read_text().splitlines()]
    texts = ["12"[number % 2] for number in range(count)]
    pairs = [
        {"prompt": row["prompt"], "images": row["images"], "chosen": text, "rejected": "12"[text == "1"]}
        for row, text in zip(rows, texts, strict=True)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return path


def test_a_reference_a_teacher_and_a_critic_have_the_limit_of_pixels(tmp_path):
    """They are the policy itself, so their distance from it is 0 at the first step."""
    data, out = write_pairs(tmp_path / "data", 4), f"output={tmp_path}"
    ludic("sft", f"data={tmp_path / 'data' / 'rows.jsonl'}", *VISION, "steps=0", "heldout=0", out, "name=policy")
    policy = str(tmp_path / "policy")
    common = [f"model={policy}", "images.max_pixels=256", "images.tower=trained", "steps=1", "threads=1", out]
    ludic("dpo", f"data={data}", *common, f"reference.model={policy}", "batch_size=2", "answers=0", "heldout=0", "name=dpo")
    asked = ["train", f"data={tmp_path / 'data' / 'rows.jsonl'}", *common, "rollout.prompts=2", "rollout.group_size=2"]
    asked += [
        "rollout.max_new_tokens=2",
        "evaluation.prompts=1",
        "trainer.minibatches_per_batch=1",
        "reward=byte_rewards:mean_id",
    ]
    ludic(*asked, "algorithm=opd", f"teacher={policy}", "name=opd")
    ludic(*asked, "algorithm=ppo", f"critic.model={policy}", "name=ppo")
    lines = {name: (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("dpo", "opd", "ppo")}
    metrics = {name: {key: value for line in text for key, value in json.loads(line).items()} for name, text in lines.items()}
    assert metrics["dpo"]["train/rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert metrics["opd"]["reference/kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["ppo"]["critic/loss"] > 0


def read_weights(folder):
    [path] = (folder / "model").glob("*.safetensors")
    return load_file(path)


def test_a_reward_model_sees_images_is_saved_with_its_tower_and_rewards_answers(tmp_path):
    data, out = write_pairs(tmp_path / "data"), f"output={tmp_path}"
    ludic("train-rm", f"data={data}", *VISION, "images.tower=trained", "steps=0", out, "name=before")
    train = ["train-rm", f"data={data}", f"model={tmp_path / 'before'}", "steps=2", "batch_size=4", "trainer.lr=1e-2"]
    ludic(*train, "images.tower=trained", out, "name=trained")
    before, trained = (read_weights(tmp_path / name) for name in ("before", "trained"))
    of_tower = {name for name in before if name.startswith("visual.")}
    assert of_tower
    assert not any(torch.equal(before[name], trained[name]) for name in of_tower if "bias" not in name)
    ludic("sft", f"data={tmp_path / 'data' / 'rows.jsonl'}", *VISION, "steps=0", "heldout=0", out, "name=policy")
    asked = ["train", f"model={tmp_path / 'policy'}", f"data={tmp_path / 'data' / 'rows.jsonl'}"]
    judged = [f"reward_model={tmp_path / 'trained'}", "steps=1", "evaluation.prompts=2", "rollout.max_new_tokens=2"]
    ludic(*asked, *judged, "rollout.prompts=2", "rollout.group_size=2", out, "name=judged")
    rollouts = [json.loads(line) for line in (tmp_path / "judged" / "rollouts.jsonl").read_text().splitlines()]
    assert all(one["meta"]["rm_score_from"] == "tokens" for one in rollouts)


def test_a_reward_model_of_text_has_no_settings_of_images(tmp_path):
    data = write_pairs(tmp_path / "data")
    message = refused("train-rm", f"data={data}", *SMALL, "images.tower=trained", f"output={tmp_path / 'runs'}")
    assert "images is set, and Qwen2ForSequenceClassification sees none" in message


@pytest.mark.parametrize("settings", [["images.tower=trained"], ["loss=kto", "lora.rank=2", "heldout=0"]])
def test_preferences_about_images_resume_to_the_bits_of_an_uninterrupted_run(tmp_path, settings):
    """The reference scored each pair with its own image and the tower of the start."""
    pairs = [f"data={write_pairs(tmp_path / 'data', 12)}", *VISION, *settings, "warmup.steps=1", "batch_size=4", "answers=2"]
    run = [*pairs, "max_new_tokens=2", "trainer.lr=1e-2", "threads=1", "steps=3", f"output={tmp_path}"]
    ludic("dpo", *run, "name=whole")
    assert train_until("dpo", 1, [*run, "name=parts"], phase="dpo") == 130
    ludic("dpo", "--resume", str(tmp_path / "parts"))
    whole, parts = (read_weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["phase"] == "dpo")
    assert first["train/rewards/chosen"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_pairs_that_the_image_alone_decides_are_learned(tmp_path):
    """A model that does not look is right in half of the mirrored pairs."""
    task, rng = Shapes(num_heldout=200), Random(0)
    train, heldout = [task.draw(rng) for _ in range(6000)], task.suites()["held out"]

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def show(problem):
        Image.fromarray(draw_shapes(problem["id"])).save(tmp_path / f"{problem['id']}.png")
        return {"prompt": problem["question"], "image": f"{problem['id']}.png"}

    def mirror(problems):
        both = [pair for one, other in zip(problems[::2], problems[1::2], strict=True) for pair in ((one, other), (other, one))]
        return [
            {**show(one), "chosen": one["answer"], "rejected": other["answer"]}
            for one, other in both
            if one["answer"] != other["answer"]
        ]

    write("chats.jsonl", [{**show(problem), "completion": problem["answer"]} for problem in train])
    write("pairs.jsonl", mirror(train[:4000]))
    write("heldout.jsonl", mirror(heldout))
    common = ["images.tower=trained", "threads=1", f"output={tmp_path}"]
    shape = [*VISION[:1], "network.hidden_size=64", "network.num_heads=2", "network.num_kv_heads=1"]
    data = f"data={tmp_path / 'chats.jsonl'}"
    ludic(
        "sft", data, *shape, "network.intermediate_size=128", "trainer.lr=2e-3", "batch_size=64", "steps=150", *common, "name=sft"
    )
    pairs = [f"data={tmp_path / 'pairs.jsonl'}", f"heldout_data={tmp_path / 'heldout.jsonl'}", f"model={tmp_path / 'sft'}"]
    ludic("dpo", *pairs, "trainer.lr=3e-4", "steps=50", "batch_size=32", *common, "name=dpo")
    ludic("train-rm", *pairs, "trainer.lr=1e-3", "epochs=2", "batch_size=32", *common, "name=rm")
    assert summary_of(tmp_path / "dpo")["eval_rewards/accuracies"] >= 0.95
    assert summary_of(tmp_path / "rm")["eval_pairwise_accuracy"] >= 0.97
