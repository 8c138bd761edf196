"""The vision tower computes each image once an optimizer step, and the gradient is the one of
computing it for each answer."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from benches.python.peak_bytes import PeakBytes
from image_items import add_pictures, image_groups, image_item, once_an_answer
from tiny_vision import CONFIGS, make_tiny_vision
from training_samples import ListSource, cpu_config, gradients_of, tiny_model, weights_of

from ludic.errors import BudgetError, ConfigError, NonFiniteError
from ludic.models.images.features import find_tower_owner
from ludic.models.images.processor import attach_processor
from ludic.models.images.rows import IMAGES
from ludic.models.lora import LoraSettings, apply_lora
from ludic.training import FrozenModel, RLAlgorithm, Trainer, make_grpo, make_ppo, make_sft
from ludic.training.backend.image_pass import ImageEncoder, ImagePass
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import TokenClippedSurrogateLoss
from ludic.training.preflight.layouts import with_right_layout

ALGORITHM = RLAlgorithm("test", ConstantCredit(1.0), TokenClippedSurrogateLoss(ratio_clip=10.0))
LAYOUTS = {
    "padded": {"packing": "optimal", "prefix_sharing": "off"},
    "padding_free": {"packing": "padding_free", "prefix_sharing": "off"},
    "trees": {"prefix_sharing": "tree"},
}
SIZES = [(16, 24), (16, 24), (24, 16)]
ONE_IMAGE = 24
"""Patches of a picture of 16 x 24 pixels."""


@cache
def case(name="qwen2_vl"):
    """(model, processor, [(item, inputs)] of 3 groups of 8, gradients and loss once an answer)."""
    model, processor = make_tiny_vision(name)
    made = image_groups(processor, add_pictures(processor, SIZES))
    return model, processor, made, *once_an_answer(model, made, ALGORITHM)


def make_backend(model, *, algo=ALGORITHM, layout="trees", enable_gradient_checkpointing=False, **settings):
    cfg = cpu_config(**{"max_seq_len": 64, "micro_token_budget": 128, "skip_zero_weight": False, **LAYOUTS[layout], **settings})
    backend = TorchBackend(model, cfg, algo=algo, enable_gradient_checkpointing=enable_gradient_checkpointing)
    if layout == "padding_free":
        assert with_right_layout(cfg, model) is cfg
    return backend


def mini_batch(backend, items):
    macro = MacroBatch.ingest(items, backend.cfg.max_seq_len)
    batch = (TreeMiniBatch if backend.shares_prefixes else MiniBatch)(macro, np.arange(len(macro.items)), backend.cfg)
    assert getattr(batch, "has_trees", False) == (backend.cfg.prefix_sharing == "tree")
    return batch


def backward(backend, items):
    """(result, gradients) of one mini-batch."""
    backend.model.zero_grad(set_to_none=True)
    batch = mini_batch(backend, items)
    result = backend.forward_backward(batch, totals=batch.totals).wait()
    return result, gradients_of(backend.model)


def items_of(made):
    return [item for item, _ in made]


def relative(got, expected):
    largest = max(float(each.abs().max()) for each in expected.values())
    assert got.keys() == expected.keys()
    return max(float((got[name] - each).abs().max()) for name, each in expected.items()) / largest


@pytest.mark.parametrize("passes", ["whole", "in chunks"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "smolvlm"])
def test_the_gradient_is_the_one_of_once_an_answer(name, layout, passes):
    model, processor, made, expected, loss = case(name)
    most = max(
        processor.process(digest).num_patches for digest in {span.digest for item in items_of(made) for span in item.images}
    )
    backend = make_backend(model, layout=layout, image_patch_budget=None if passes == "whole" else most)
    result, got = backward(backend, items_of(made))
    assert relative(got, expected) <= 1e-5
    assert result.loss.item() == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert result.images["images/distinct"] == 3
    assert result.images["images/occurrences"] == 24
    assert result.images["images/encoded"] == (3 if passes == "whole" else 6)
    tower = [name for name in expected if "visual" in name or "vision" in name]
    assert max(float(expected[name].abs().max()) for name in tower) >= 1e-3 * max(
        float(each.abs().max()) for each in expected.values()
    )


def test_another_image_changes_loss_and_gradient():
    model, processor, made, _, loss = case()
    _, second, third = add_pictures(processor, SIZES)
    items = items_of(image_groups(processor, [second, second, third]))
    assert [item.input_ids for item in items] == [item.input_ids for item in items_of(made)]
    result, got = backward(make_backend(model), items)
    _, same = backward(make_backend(model), items_of(made))
    assert abs(result.loss.item() - loss) >= 1e-3
    assert relative(got, same) >= 0.05


def freeze_tower(model):
    """The model with a frozen tower."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("visual" not in name)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_tower_computes_each_image_once(checkpointing):
    model, processor = make_tiny_vision("qwen2_vl")
    made = image_groups(processor, add_pictures(processor, SIZES))
    expected, _ = once_an_answer(freeze_tower(model), made, ALGORITHM)
    backend = make_backend(model, enable_gradient_checkpointing=checkpointing)
    encoded = []
    for _ in range(2):
        result, got = backward(backend, items_of(made))
        encoded.append(result.images["images/encoded"])
        if len(encoded) == 1:
            assert relative(got, expected) <= 1e-5
            assert result.images["images/patches"] == 3 * ONE_IMAGE
        backend.optim_step().wait()
    assert encoded == [3, 0]


def test_passes_without_gradient_use_the_same_features():
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES)))
    backend = make_backend(freeze_tower(model))
    for batch in mini_batch(backend, items):
        backend.forward_logprobs(batch).wait()
    assert backend.images.take_counts()["images/encoded"] == 3
    assert backward(backend, items)[0].images["images/encoded"] == 0


def logps_of(backend, items):
    return torch.cat([each.flatten() for batch in mini_batch(backend, items) for each in backend.forward_logprobs(batch).wait()])


def test_features_are_computed_again_when_the_tower_was_changed():
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES), size=2))
    backend = make_backend(model, lr=0.1)
    before = logps_of(backend, items)
    assert torch.equal(logps_of(backend, items), before)
    assert backend.images.take_counts()["images/encoded"] == 3
    backward(backend, items)
    backend.optim_step().wait()
    stepped = logps_of(backend, items)
    assert torch.equal(stepped, logps_of(make_backend(model), items))
    with torch.no_grad():
        find_tower_owner(model).visual.patch_embed.proj.weight.mul_(2.0)
    changed = logps_of(backend, items)
    assert torch.equal(changed, logps_of(make_backend(model), items))
    assert float((stepped - before).abs().max()) >= 0.1
    assert float((changed - stepped).abs().max()) >= 0.1


@pytest.mark.parametrize("in_tower", [False, True])
def test_adapters_are_switched_off_in_the_tower_too(in_tower):
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES), size=2))
    expected = logps_of(make_backend(model), items)
    names = [name for name, _ in model.named_modules() if name.endswith((".qkv", ".fc1"))]
    targets = names if in_tower else ["q_proj", "v_proj"]
    adapted = apply_lora(model, LoraSettings(rank=2, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    backend = make_backend(adapted)
    with_adapters = logps_of(backend, items)
    batches = list(mini_batch(backend, items))
    without = torch.cat([each.flatten() for batch in batches for each in backend.forward_logprobs(batch, adapters=False).wait()])
    torch.testing.assert_close(without, expected, rtol=0, atol=1e-5)
    assert float((with_adapters - expected).abs().max()) >= 0.1
    assert backend.images.take_counts()["images/encoded"] == (6 if in_tower else 3)
    result, gradients = backward(backend, items)
    assert result.images["images/encoded"] == (3 if in_tower else 0)
    assert all(bool(each.abs().max() > 0) for name, each in gradients.items() if "lora_A" in name)


def test_several_calls_before_a_step_add_up():
    model, _, made, expected, _ = case()
    backend = make_backend(model)
    whole = mini_batch(backend, items_of(made))
    model.zero_grad(set_to_none=True)
    for part in (items_of(made)[:12], items_of(made)[12:]):
        batch = mini_batch(backend, part)
        backend.forward_backward(list(batch), totals=whole.totals).wait()
    assert relative(gradients_of(model), expected) <= 1e-5
    backend.reset().wait()


def test_turns_that_share_a_row_have_the_gradient_of_rows_of_their_own():
    model, processor = make_tiny_vision("qwen2_vl")
    one, two = add_pictures(processor, [(16, 16), (16, 16)])
    said, said_later = (processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "xyz"))
    made = []
    for index, (first, second) in enumerate([(one, two), (two, one), (one, one)]):
        history = ["see ", first, ":ab"]
        made.append(image_item(processor, ["see ", first, ":"], said, index=index, weight=0.5))
        made.append(image_item(processor, [*history, " now ", second, "?"], said_later, index=index, weight=-1.0))
    expected, loss = once_an_answer(model, made, ALGORITHM)
    backend = make_backend(model, layout="padded")
    macro = MacroBatch.ingest(items_of(made), 64, merge_turns=True)
    batch = MiniBatch(macro, np.arange(6), backend.cfg)
    assert [each.tensors["turns"].shape[0] for each in batch] == [6]
    model.zero_grad(set_to_none=True)
    result = backend.forward_backward(batch, totals=batch.totals).wait()
    assert relative(gradients_of(model), expected) <= 1e-5
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)


def test_a_teacher_sees_images_through_its_own_tower():
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES), size=1))
    backend = make_backend(model, layout="padded")
    teacher = FrozenModel(model, backend.cfg)
    [batch] = mini_batch(backend, items)
    expected = teacher.logits(batch.tensors)
    with torch.no_grad():
        find_tower_owner(model).visual.patch_embed.proj.weight.mul_(2.0)
    bound = backend.images.bind(batch)
    torch.testing.assert_close(teacher.logits(bound.tensors), expected, rtol=0, atol=0)
    assert float((backend.forward_logprobs(bound).wait() - teacher.logps(bound).wait()).abs().max()) >= 0.1


def test_gradient_checkpointing_and_autocast_reach_the_tower():
    model, processor = make_tiny_vision("qwen2_vl")
    made = image_groups(processor, add_pictures(processor, SIZES))
    expected, _ = once_an_answer(model, made, ALGORITHM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = once_an_answer(model, made, ALGORITHM)
    assert relative(rounded, expected) >= 0.1
    _, got = backward(make_backend(model, mixed_precision_dtype="bf16", image_patch_budget=ONE_IMAGE), items_of(made))
    assert relative(got, rounded) <= 0.03
    _, got = backward(make_backend(model, enable_gradient_checkpointing=True, image_patch_budget=ONE_IMAGE), items_of(made))
    assert relative(got, expected) <= 1e-5


def test_a_float16_loss_is_scaled_through_the_tower():
    model, processor = make_tiny_vision("qwen2_vl")
    made = image_groups(processor, add_pictures(processor, SIZES))
    expected, _ = once_an_answer(model, made, ALGORITHM)
    backend = make_backend(model.to(torch.float16), max_grad_norm=None)
    backward(backend, items_of(made))
    backend._masters.move_gradients()
    masters = {name: backend._masters.stepped_tensor(parameter).grad for name, parameter in model.named_parameters()}
    assert backend._scale.value == 65536
    got = {name: gradient / backend._scale.value for name, gradient in masters.items() if gradient is not None}
    assert relative(got, expected) <= 0.05


def test_gradients_of_half_precision_features_add_up_in_float32():
    """1 and 512 times 2^-9 are 2; added up in bfloat16 they are 1."""
    model, processor = make_tiny_vision("qwen2_vl")
    backend = make_backend(model.to(torch.bfloat16))
    [item] = items_of(image_groups(processor, add_pictures(processor, SIZES[:1]), size=1))
    [batch] = mini_batch(backend, [item])

    def tower_gradient(parts):
        model.zero_grad(set_to_none=True)
        images = ImagePass(backend.images, [batch])
        [features] = images.bind(batch).tensors[IMAGES].features.values()
        for part in parts:
            (features.tensors[0].sum() * part).backward()
            images.move_gradients()
        images.backward()
        return gradients_of(model)

    assert relative(tower_gradient([1.0] + [2.0**-9] * 512), tower_gradient([2.0])) == 0


def test_dropout_draws_the_same_masks_when_a_pass_is_computed_again(monkeypatch):
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES)))
    tower = find_tower_owner(model).visual
    tower.merger.register_forward_hook(lambda module, _, output: torch.nn.functional.dropout(output, 0.5, module.training))
    model.lm_head.register_forward_hook(lambda *_: torch.rand(1) and None)  # draws in each micro-batch
    backend = make_backend(model, image_patch_budget=ONE_IMAGE)
    seen, encode = {}, ImageEncoder.encode

    def record(encoder, digests):
        features = encode(encoder, digests)
        seen.setdefault(tuple(digests), []).extend(each.tensors[0].detach().clone() for each in features)
        return features

    monkeypatch.setattr(ImageEncoder, "encode", record)
    torch.manual_seed(1)
    backward(backend, items)
    drawn = torch.rand(1)
    first = {digests: both[0] for digests, both in seen.items()}
    assert len(seen) == 3
    assert all(len(both) == 2 and torch.equal(*both) for both in seen.values())
    seen.clear()
    backward(backend, items)
    assert not any(torch.equal(both[0], first[digests]) for digests, both in seen.items())
    torch.manual_seed(1)
    for _ in range(3):  # what the first computation draws, and the second does not
        torch.nn.functional.dropout(torch.ones_like(next(iter(first.values()))), 0.5)
    for _ in mini_batch(backend, items):
        torch.rand(1)
    assert torch.equal(torch.rand(1), drawn)


def test_dropout_does_not_change_features_that_are_kept():
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES), size=2))
    expected = logps_of(make_backend(freeze_tower(model)), items)
    find_tower_owner(model).visual.merger.register_forward_hook(
        lambda module, _, output: torch.nn.functional.dropout(output, 0.5, module.training)
    )
    backend = make_backend(model)
    assert backward(backend, items)[0].images["images/encoded"] == 3
    assert torch.equal(logps_of(backend, items), expected)


@pytest.mark.parametrize("fault", [torch.nan, 0.0])
def test_a_sample_whose_image_is_broken_is_named(monkeypatch, fault):
    """Pixels of NaN give a loss of NaN. With pixels of 0, only the tower's gradient is NaN."""
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES), size=2))
    broken, process = items[2].images[0].digest, processor.process

    def process_broken(digest):
        image = process(digest)
        factor = fault if digest == broken else 1.0
        return replace(image, arrays={**image.arrays, "pixel_values": image.arrays["pixel_values"] * factor})

    monkeypatch.setattr(processor, "process", process_broken)
    find_tower_owner(model).visual.patch_embed.register_forward_hook(
        lambda _, inputs, output: output + 0 * output.square().sum(-1, keepdim=True).sqrt()  # its gradient at 0 is 0 * inf
    )
    backend = make_backend(model)
    batch = mini_batch(backend, items)
    loss = backend.forward_backward(batch, totals=batch.totals).wait().loss
    assert bool(loss.isfinite()) == (fault == 0)
    with pytest.raises(NonFiniteError, match=r"offending samples \(rollout/step\): i2/0, i3/0\. "):
        backend.optim_step().wait()


@pytest.mark.parametrize("frozen", [False, True])
def test_an_image_over_the_budget_is_named(frozen):
    model, processor, made, *_ = case()
    backend = make_backend(freeze_tower(make_tiny_vision("qwen2_vl")[0]) if frozen else model, image_patch_budget=ONE_IMAGE - 1)
    if frozen:
        attach_processor(backend.model, processor)
    digest = items_of(made)[0].images[0].digest
    with pytest.raises(BudgetError, match=rf"image {digest} \(16x24\) has 24 patches"):
        backward(backend, items_of(made))


def test_a_model_of_text_refuses_images():
    items = items_of(case()[2])
    backend = make_backend(tiny_model(vocab_size=512), layout="padded")
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM cannot read them"):
        backward(backend, items)


@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_log_probabilities_without_logits_are_the_same(logits):
    model, _, made, expected, _ = case()
    backend = make_backend(model, logits=logits)
    assert backend.skips_logits == (logits == "chunked")
    assert relative(backward(backend, items_of(made))[1], expected) <= 1e-5


def train(algo, items, *, model=None, steps=2, batch=8, **options):
    """(trainer, statistics of each step) of a run on batches of `batch` samples."""
    settings = {"lr": 1e-2, "max_seq_len": 64, "micro_token_budget": 128}
    cfg = cpu_config(**{**settings, **options.pop("settings", {})})
    batches = [items[start : start + batch] for start in range(0, len(items), batch)]
    trainer = Trainer(model=model, algo=algo, batch_source=ListSource(*batches), cfg=cfg, **options)
    return trainer, [trainer.train_step_sync() for _ in range(steps)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_learns_which_image_gets_which_answer(layout):
    """Equal prompts and pictures of equal size: only the image tells."""
    model, processor = make_tiny_vision("qwen2_vl")
    pictures = add_pictures(processor, [(16, 16), (16, 16)])
    items = [
        image_item(processor, ["?", digest], [letter] * 3, index=n)[0]
        for n, (digest, letter) in enumerate(zip(pictures, (97, 98), strict=True))
    ]
    _, stats = train(make_sft(), items, model=model, steps=25, settings=LAYOUTS[layout])
    assert stats[0]["train/loss"] >= 1.0
    assert stats[-1]["train/loss"] <= 0.1
    assert stats[0]["images/encoded"] == stats[0]["images/distinct"] == 2


def grpo(**options):
    return make_grpo(group_size=8, **options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (grpo, {}),
        (partial(grpo, reference_kl=0.1), {}),
        (partial(make_ppo), {}),
    ],
    ids=["grpo", "with a reference", "ppo"],
)
def test_the_trainer_takes_steps_on_samples_with_images(make, options):
    model, processor = make_tiny_vision("qwen2_vl")
    items = items_of(image_groups(processor, add_pictures(processor, SIZES)))
    algo = make()
    cfg = {"minibatches_per_batch": 1, "epochs_per_batch": 2}
    reference = FrozenModel(model, cpu_config()) if algo.reads_reference else None
    before = weights_of(model)
    trainer, stats = train(algo, items, model=model, batch=24, settings=cfg, reference=reference)
    assert stats[0]["images/distinct"] == 2 * 3
    assert stats[0]["images/encode_s"] > 0
    changed = {name for name, weight in weights_of(trainer.model).items() if not torch.equal(weight, before[name])}
    assert any("visual" in name for name in changed)


def test_the_memory_of_passes_does_not_grow_with_the_images(monkeypatch):
    """Passes of one image, of a tower whose activations are most of the memory."""
    tower = {**CONFIGS["qwen2_vl"]["vision_config"], "depth": 4, "embed_dim": 64}
    monkeypatch.setitem(CONFIGS, "qwen2_vl", {**CONFIGS["qwen2_vl"], "vision_config": tower})
    model, processor = make_tiny_vision("qwen2_vl")
    processor.processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 64 * 64}
    made = image_groups(processor, add_pictures(processor, [(64, 64)] * 6), size=1)
    peaks = {}
    for groups in (2, 6):
        for budget in (256, None):
            backend = make_backend(model, max_seq_len=128, micro_token_budget=128, image_patch_budget=budget or 256 * groups)
            model.zero_grad(set_to_none=True)
            batch = mini_batch(backend, items_of(made[:groups]))
            with PeakBytes() as in_use:
                result = backend.forward_backward(batch, totals=batch.totals).wait()
            assert result.images["images/encoded"] == (2 if budget else 1) * groups
            peaks[groups, budget] = in_use.peak
    assert peaks[6, 256] <= 1.25 * peaks[2, 256]
    assert peaks[6, None] >= 2 * peaks[2, None]
