"""The backend that takes batches by column: gradients, metrics, checkpoints, failures."""

import asyncio
import threading
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from training_samples import TOKENIZER, assert_same_tensors, tiny_model, weights_of

from ludic.errors import BackendStoppedError, CheckpointError, ConfigError, DataError, DataKeyError, NonFiniteError
from ludic.files.atomic import read_json
from ludic.inference.vllm.in_server.weight_receiver import Checkpoint
from ludic.rollouts.training.backends import TrainingBackend
from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend
from ludic.rollouts.training.rl_losses import grpo_loss, ppo_loss, sft_loss
from ludic.training.loss.clipped import ClippedSurrogateLoss, TokenClippedSurrogateLoss

LENGTHS = [6, 4, 5]


def make_batch(seed=0, *, left=False, **extra):
    """Three rows; the first two tokens of each are its prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids, attention, mask = (torch.zeros(3, 6, dtype=torch.int64) for _ in range(3))
    for row, length in enumerate(LENGTHS):
        columns = slice(6 - length, 6) if left else slice(0, length)
        ids[row, columns] = torch.randint(3, 50, (length,), generator=generator)
        attention[row, columns] = 1
        mask[row, columns] = torch.tensor([0, 0] + [1] * (length - 2))
    batch = {"input_ids": ids, "attention_mask": attention, "labels": ids.clone(), "loss_mask": mask.float()}
    return {**batch, "advantages": torch.randn(3, generator=generator), **extra}


def pack(batch):
    """The same rows, concatenated."""
    present = batch["attention_mask"].bool()
    columns = {name: value[present][None] for name, value in batch.items() if value.shape == present.shape}
    del columns["attention_mask"]
    return {**columns, "cu_seqlens": torch.tensor([0, 6, 10, 15]), "advantages": batch["advantages"]}


def make_backend(folder, loss_fn=grpo_loss, *, model=None, lr=0.1, **options):
    model = tiny_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return PyTorchTrainingBackend(model, optimizer, loss_fn, folder, **options)


def step_by_hand(batch, loss_of, lr=0.1):
    """A plain torch loop: (loss, gradient norm, weights after the step)."""
    model = tiny_model().train()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = loss_of(logits)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    torch.optim.SGD(model.parameters(), lr=lr).step()
    return loss.item(), norm.item(), weights_of(model)


async def test_a_step_is_that_of_a_plain_loop(tmp_path):
    batch = make_batch()
    loss, norm, weights = step_by_hand(
        batch, lambda logits: grpo_loss(logits, batch["labels"], batch["loss_mask"], batch["advantages"])
    )
    backend = make_backend(tmp_path)
    assert isinstance(backend, TrainingBackend)
    metrics = await backend.forward_backward(batch).result()
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert await backend.optim_step() == {"lr": 0.1, "step": 1.0, "grad_norm": pytest.approx(norm, rel=1e-5)}
    assert_same_tensors(weights_of(backend.model), weights, atol=1e-6)
    assert backend.weight_version == backend.current_step == 1


async def test_the_host_works_while_a_step_computes(tmp_path):
    """The forward pass waits for what the event loop does after both operations are submitted."""
    model, prepared = tiny_model(), threading.Event()
    model.register_forward_pre_hook(lambda *_: prepared.wait(60) and None)
    backend = make_backend(tmp_path, model=model)
    backend.forward_backward(make_batch())
    step = backend.optim_step()
    await asyncio.sleep(0)
    assert not step.done()
    prepared.set()
    assert (await step)["step"] == 1
    backend.close()


def user_loss(logits, labels, loss_mask, advantages):
    logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, labels[:, 1:, None])[..., 0] * loss_mask[:, 1:]
    return -(logp.sum(1) / loss_mask[:, 1:].sum(1) * advantages).mean()


LAYOUTS = {
    "left padding": ({}, grpo_loss, lambda: make_batch(left=True)),
    "packed": ({}, grpo_loss, lambda: pack(make_batch())),
    "split": ({"micro_token_budget": 6, "max_seq_len": 6}, grpo_loss, make_batch),
    "a function of the user's": ({}, user_loss, make_batch),
    "a bound function": ({}, partial(user_loss), make_batch),
    "its logits and batch": ({}, lambda logits, batch: user_loss(logits, *(batch[c] for c in COLUMNS)), make_batch),
    "computed when called": ({"in_thread": False}, grpo_loss, make_batch),
}
COLUMNS = ("labels", "loss_mask", "advantages")


def in_part(batch):
    """The batch with a loss mask of 0, 0.25, 0.5, ..."""
    return {**batch, "loss_mask": batch["loss_mask"] * (1 + torch.arange(6) % 4) / 4}


def make_ppo(old=None, **extra):
    old = -1 - torch.rand(3, 6, generator=torch.Generator().manual_seed(5)) if old is None else old
    return in_part(make_batch(old_log_probs=old, **extra))


GRPO, PPO = ("advantages",), ("advantages", "old_log_probs")
IN_PART = {
    "supervised": (sft_loss, lambda: {**in_part(make_batch()), "advantages": None}, ()),
    "GRPO": (grpo_loss, lambda: in_part(make_batch()), GRPO),
    "PPO": (ppo_loss, make_ppo, PPO),
    "by row": (partial(ppo_loss, aggregation="sequence", entropy_coef=0.5), make_ppo, PPO),
    "GSPO": (ppo_loss, lambda: make_ppo(torch.tensor([-4.0, -3.0, -3.5])), PPO),
    "a function of the user's": (user_loss, lambda: in_part(make_batch()), GRPO),
}


@pytest.mark.parametrize("name", IN_PART)
async def test_masks_with_fractions_count_as_in_the_functions(tmp_path, name):
    loss_fn, make, names = IN_PART[name]
    batch = make()
    columns = [batch[column] for column in ("labels", "loss_mask", *names)]
    loss, norm, weights = step_by_hand(batch, lambda logits: loss_fn(logits, *columns))
    backends = [make_backend(tmp_path / "whole", loss_fn)]
    if loss_fn is not user_loss:
        backends.append(make_backend(tmp_path / "split", loss_fn, micro_token_budget=6, max_seq_len=6))
    for backend in backends:
        metrics = await backend.forward_backward(batch)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        await backend.optim_step()
        assert_same_tensors(weights_of(backend.model), weights, atol=1e-6)


async def test_packed_masks_with_fractions_count_as_padded_ones(tmp_path):
    padded, packed = make_backend(tmp_path / "padded"), make_backend(tmp_path / "packed")
    metrics = [await padded.forward_backward(in_part(make_batch())), await packed.forward_backward(pack(in_part(make_batch())))]
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_layouts_of_a_batch_and_forms_of_a_loss_have_the_same_gradient(tmp_path, layout):
    options, loss_fn, make = LAYOUTS[layout]
    expected = make_backend(tmp_path / "expected")
    backend = make_backend(tmp_path / "backend", loss_fn, **options)
    metrics = []
    for each, batch in ((expected, make_batch()), (backend, make())):
        metrics.append(await each.forward_backward(batch))
        await each.optim_step()
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], abs=1e-6)
    assert_same_tensors(weights_of(backend.model), weights_of(expected.model), atol=1e-6)


async def test_ppo_reads_old_and_reference_log_probabilities_and_advantages_of_tokens(tmp_path):
    batch = make_batch()
    backend = make_backend(tmp_path, partial(ppo_loss, kl_coef=0.2, clip_range=0.1), micro_token_budget=6, max_seq_len=6)
    logps = await backend.forward_logprobs(batch)
    model = tiny_model()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    assert torch.allclose(logps[:, 1:], expected * batch["attention_mask"][:, 1:], atol=1e-5)
    old = logps + 0.3 * torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
    batch |= {"old_log_probs": old, "ref_log_probs": old + 0.1, "advantages": torch.linspace(-1, 1, 18).view(3, 6)}
    arguments = (batch["labels"], batch["loss_mask"], batch["advantages"], old)
    loss, norm, _ = step_by_hand(
        batch, lambda logits: ppo_loss(logits, *arguments, 0.1, ref_log_probs=batch["ref_log_probs"], kl_coef=0.2)
    )
    metrics = await backend.forward_backward(batch)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["ref_kl"] > 0


async def test_old_log_probabilities_of_rows_have_one_ratio_per_row(tmp_path):
    batch = make_batch(old_log_probs=torch.tensor([-2.0, -3.0, -4.0]))
    loss, _, _ = step_by_hand(
        batch, lambda logits: ppo_loss(logits, batch["labels"], batch["loss_mask"], batch["advantages"], batch["old_log_probs"])
    )
    metrics = await make_backend(tmp_path, ppo_loss).forward_backward(batch)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)


async def test_gradients_accumulate_until_the_step_which_can_be_submitted_ahead(tmp_path):
    backend, other = make_backend(tmp_path / "a"), make_backend(tmp_path / "b", max_grad_norm=1e-3)
    futures = [backend.forward_backward(make_batch(seed)) for seed in (0, 1)] + [backend.optim_step()]
    first, second, step = [await future for future in futures]
    assert step["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-6)
    assert first["grad_norm"] != pytest.approx(second["grad_norm"], rel=1e-3)
    alone = await other.forward_backward(make_batch(1))
    assert alone["grad_norm"] != pytest.approx(second["grad_norm"], rel=1e-3)
    assert (await other.optim_step())["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)  # before clipping


async def test_a_checkpoint_holds_everything_and_vllm_can_load_it(tmp_path):
    def make(folder):
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return PyTorchTrainingBackend(model, optimizer, sft_loss, folder, scheduler=scheduler, tokenizer=TOKENIZER)

    async def train(backend, seeds):
        results = []
        for seed in seeds:
            await backend.forward_backward(make_batch(seed))
            results.append(await backend.optim_step())
        return results

    whole, resumed = make(tmp_path / "whole"), make(tmp_path / "resumed")
    await train(whole, [0, 1])
    folder = await whole.save_checkpoint(2, {"loss": 0.5})
    assert folder == tmp_path / "whole" / "step_000002"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors", "metadata.json"} <= names
    assert set(Checkpoint(folder).weights) == set(load_file(folder / "model.safetensors"))  # what a server loads
    metadata = read_json(folder / "metadata.json")
    assert (metadata["step"], metadata["weight_version"], metadata["metrics"]["loss"]) == (2, 2, 0.5)
    assert await resumed.load_checkpoint(folder) == metadata
    assert await train(resumed, [2, 3]) == await train(whole, [2, 3])
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))
    assert (resumed.current_step, resumed.weight_version) == (4, 4)


async def test_the_start_of_another_phase_takes_the_weights_only(tmp_path):
    source, backend = make_backend(tmp_path / "a"), make_backend(tmp_path / "b", model=tiny_model(seed=1))
    await source.forward_backward(make_batch())
    await source.optim_step()
    folder = await source.save_checkpoint(7)
    await backend.load_checkpoint(folder, optimizer=False)
    assert_same_tensors(weights_of(backend.model), weights_of(source.model))
    assert (backend.current_step, backend.weight_version) == (0, 0)


async def test_saving_a_step_again_changes_no_version(tmp_path):
    backend = make_backend(tmp_path)
    await backend.optim_step()
    for _ in range(2):
        folder = await backend.save_checkpoint(1, {})
    assert read_json(folder / "metadata.json")["weight_version"] == 1


async def test_another_save_meanwhile_has_a_step_and_metrics_of_its_own(tmp_path):
    futures = []

    class SavingTokenizer:
        pad_token_id = 0

        def save_pretrained(self, folder):
            if not futures:
                other = threading.Thread(target=lambda: futures.append(backend.save(tmp_path / "other")))
                other.start()
                other.join()

    backend = make_backend(tmp_path, tokenizer=SavingTokenizer())
    await backend.optim_step()
    folder = await backend.save_checkpoint(7, {"score": 0.5})
    await futures[0]
    first, second = (read_json(path / "metadata.json") for path in (folder, tmp_path / "other"))
    assert (first["step"], first["metrics"]["score"]) == (7, 0.5)
    assert (second["step"], "score" in second["metrics"]) == (1, False)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.bin", "checkpoint.pt"])
async def test_pickles_are_refused_with_the_remedy(tmp_path, name):
    folder = tmp_path / "step_0500"
    folder.mkdir()
    (folder / name).write_bytes(b"\x80\x04N.")
    backend = make_backend(tmp_path)
    before = weights_of(backend.model)
    with pytest.raises(CheckpointError, match=rf"has a pickle \({name}\).*save_pretrained"):
        await backend.load_checkpoint(folder)
    assert_same_tensors(weights_of(backend.model), before)


async def test_a_damaged_checkpoint_is_refused(tmp_path):
    backend = make_backend(tmp_path)
    folder = await backend.save_checkpoint(1)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is damaged: model\.safetensors"):
        await backend.load_checkpoint(folder)


async def test_weights_can_be_read_and_set(tmp_path):
    source, backend = make_backend(tmp_path / "a"), make_backend(tmp_path / "b", model=tiny_model(seed=1))
    weights = await source.get_weights().result()
    assert await backend.load_weights(weights).result() is None
    assert_same_tensors(weights_of(backend.model), weights_of(source.model))
    before = weights_of(backend.model)
    with pytest.raises(DataError, match=r"lm_head\.weight are missing, unknown or .*shape"):
        await backend.load_weights({name: value for name, value in weights.items() if name != "lm_head.weight"})
    assert_same_tensors(weights_of(backend.model), before)


async def test_after_a_failure_the_backend_refuses_work_until_reset(tmp_path):
    backend = make_backend(tmp_path)
    with pytest.raises(DataError, match="needs input_ids"):
        await backend.forward_backward({"labels": torch.zeros(1, 2)})
    assert backend.poisoned
    with pytest.raises(BackendStoppedError, match="forward_backward failed before it"):
        await backend.optim_step()
    await backend.reset()
    assert not backend.poisoned
    await backend.forward_backward(make_batch(advantages=torch.full((3,), 3e38)))
    with pytest.raises(NonFiniteError, match="No weight was changed"):
        await backend.optim_step()
    assert backend.weight_version == 0
    await backend.forward_backward(make_batch())
    assert (await backend.optim_step())["step"] == 1


BAD = {
    "shifted labels": ({"labels": torch.roll(make_batch()["labels"], -1, dims=1)}, r"labels\[0, .* is .*, not shifted"),
    "a negative mask": ({"loss_mask": make_batch()["loss_mask"] * -0.5}, r"loss_mask\[0, 2\] \(-0.5\) must be .* at least 0"),
    "a short mask": ({"loss_mask": torch.ones(3, 5)}, r"loss_mask \(3, 5\) must have the shape of input_ids \(3, 6\)"),
    "too few advantages": ({"advantages": torch.ones(2)}, "one value for each of 3 rows, or one for each token"),
    "an empty row": ({"attention_mask": torch.tensor([[1] * 6, [0] * 6, [1] * 6])}, "row 1 of attention_mask has no token"),
}


@pytest.mark.parametrize("case", BAD)
async def test_columns_that_do_not_fit_are_refused(tmp_path, case):
    changes, message = BAD[case]
    with pytest.raises(DataError, match=message):
        await make_backend(tmp_path).forward_backward({**make_batch(), **changes})


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        (ppo_loss, "ppo_loss needs .*Sample.rollout_log_probs, or the column old_log_probs"),
        (TokenClippedSurrogateLoss(), "no actor_logps; .* set Sample.rollout_log_probs"),
        (ClippedSurrogateLoss(), "no old_logp_action; .* set Sample.rollout_log_probs"),
    ],
    ids=["ppo_loss", "per token", "per row"],
)
async def test_a_batch_without_old_log_probabilities_is_refused_with_the_remedy(tmp_path, loss, remedy):
    with pytest.raises((DataError, DataKeyError), match=f"{remedy}"):
        await make_backend(tmp_path, loss).forward_backward(make_batch())


def test_settings_that_cannot_hold_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"micro_token_budget .* needs whole"):
        make_backend(tmp_path, user_loss, micro_token_budget=64)
    with pytest.raises(ConfigError, match=r"\(logits, beta\) must be logits, .*or have defaults"):
        make_backend(tmp_path, lambda logits, beta: logits.mean() * beta)


async def test_a_loss_object_and_its_statistics(tmp_path):
    batch = make_batch(old_log_probs=torch.full((3, 6), -3.0))
    metrics = await make_backend(tmp_path / "a", TokenClippedSurrogateLoss()).forward_backward(batch)
    assert {"ratio_mean", "clip_frac", "loss", "grad_norm"} <= metrics.keys()
    metrics = await make_backend(tmp_path / "b", lambda logits: (logits.mean(), {"size": 3.0})).forward_backward(batch)
    assert metrics["size"] == 3.0
    assert "reported_loss" not in metrics
    own = await make_backend(tmp_path / "c", lambda logits: (logits.mean(), {"loss": 7.0})).forward_backward(batch)
    assert (own["loss"], own["reported_loss"]) == (metrics["loss"], 7.0)


async def test_a_snapshot_of_facts(tmp_path):
    backend = make_backend(tmp_path, weight_version=3, current_step=2)
    facts = backend.get_state_snapshot()
    assert facts["optimizer"] == "SGD"
    assert facts["parameters"] == sum(parameter.numel() for parameter in backend.model.parameters())
    assert (facts["step"], facts["weight_version"], facts["poisoned"], facts["is_fsdp"]) == (2, 3, False, False)
