"""The torch backend on its own, and a trainer that uses a different backend."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch
from training_samples import ListSource, assert_same_tensors, cpu_config, gradients_of, sorting_items, tiny_model, weights_of

from ludic.training import Trainer, TrainFuture, make_grpo
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch

ALGO = make_grpo(group_size=4)


def mini_batch_of(items, **changes):
    cfg = cpu_config(**changes)
    return MiniBatch(MacroBatch.ingest(items, cfg.max_seq_len), np.arange(len(items)), cfg)


def backend_of(model=None, **changes):
    return TorchBackend(model or tiny_model(), cpu_config(**changes), algo=ALGO)


async def test_gradients_of_several_calls_add_up():
    mini_batch = mini_batch_of(sorting_items(12), micro_token_budget=40)
    whole, split = backend_of(), backend_of()
    await whole.forward_backward(mini_batch, totals=mini_batch.totals).result()
    for micro_batch in mini_batch:
        await split.forward_backward(micro_batch, totals=mini_batch.totals).result()
    assert len(mini_batch) > 1
    assert_same_tensors(gradients_of(split.model), gradients_of(whole.model), atol=1e-7)


async def test_a_step_clears_the_gradients_and_returns_the_learning_rate():
    mini_batch = mini_batch_of(sorting_items(4))
    backend = backend_of(lr=0.5)
    await backend.forward_backward(mini_batch, totals=mini_batch.totals).result()
    step = await backend.optim_step(lr_factor=0.5).result()
    assert step["lr"] == 0.25
    assert step["grad_norm"] > 0
    assert gradients_of(backend.model) == {}
    assert backend.optimizer.param_groups[0]["initial_lr"] == 0.5


async def test_log_probs_equal_a_plain_log_softmax_for_every_packing():
    items = sorting_items(6)
    model = tiny_model()
    expected = {}
    for row, item in enumerate(items):
        ids = torch.tensor([item.input_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].double()
        expected[row] = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    for packing in ("greedy", "padding_free"):
        mini_batch = mini_batch_of(items, packing=packing, micro_token_budget=50)
        backend = backend_of(model)
        for index, micro_batch in enumerate(mini_batch):
            logps = await backend.forward_logprobs(micro_batch).result()
            assert not logps.requires_grad
            for place, row in enumerate(mini_batch.plan[index]):
                length = len(expected[int(row)])
                assert (logps[place, :length] - expected[int(row)]).abs().max() < 1e-4


async def test_forward_logprobs_restores_the_training_mode_of_the_model():
    model = tiny_model(attention_dropout=0.5)
    [micro_batch] = mini_batch_of(sorting_items(2))
    backend = backend_of(model)
    model.train()
    first, second = [await backend.forward_logprobs(micro_batch).result() for _ in range(2)]
    assert torch.equal(first, second)  # no dropout
    assert model.training


async def test_save_and_load_restore_weights_and_moments(tmp_path):
    mini_batch = mini_batch_of(sorting_items(8))
    backend = backend_of()

    async def step(which):
        await which.forward_backward(mini_batch, totals=mini_batch.totals).result()
        await which.optim_step().result()

    await step(backend)
    await backend.save(tmp_path / "state").result()
    other = backend_of(tiny_model(seed=1))
    await other.load(tmp_path / "state").result()
    await step(backend)
    await step(other)
    assert_same_tensors(weights_of(other.model), weights_of(backend.model))


async def test_errors_are_raised_by_the_result():
    future = backend_of().load("/nowhere")
    assert future.done()
    with pytest.raises(FileNotFoundError):
        await future.result()


async def test_a_padding_free_loss_that_is_not_finite_names_its_samples():
    from ludic.errors import NonFiniteError

    items = sorting_items(6, weight=1.0)
    items[4].attachments.actor_logps.token_logps[0] = -3e38  # the ratio overflows
    mini_batch = mini_batch_of(items, packing="padding_free")
    backend = backend_of(packing="padding_free")
    await backend.forward_backward(mini_batch, totals=mini_batch.totals).result()
    with pytest.raises(NonFiniteError, match=r"offending samples \(rollout/step\): r4/0\. No weight"):
        await backend.optim_step().result()


class ThreadedBackend:
    """A backend that answers later, from its own thread."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []

    def __getattr__(self, name):
        def later(*args, **kwargs):
            self.asked.append(name)
            future = TrainFuture(name)

            def work():
                time.sleep(0.001)
                done = getattr(self.inner, name)(*args, **kwargs)
                future.set_result(asyncio.run(done.result()))

            threading.Thread(target=work).start()
            return future

        return later


def test_the_trainer_works_through_any_backend():
    weights = []
    for wrap in (lambda backend: backend, ThreadedBackend):
        cfg, model = cpu_config(minibatches_per_batch=2), tiny_model()
        backend = wrap(TorchBackend(model, cfg, algo=ALGO))
        trainer = Trainer(model=model, algo=ALGO, batch_source=ListSource(sorting_items(8)), cfg=cfg, backend=backend)
        trainer.train_step_sync()
        weights.append(weights_of(model))
    assert_same_tensors(*weights)
    assert backend.asked == ["forward_backward", "optim_step"] * 2


async def test_a_frozen_part_in_evaluation_mode_stays_in_evaluation_mode():
    """Otherwise its dropout would be active after the first evaluation or step."""
    mini_batch = mini_batch_of(sorting_items(4))
    model = tiny_model(attention_dropout=0.5)
    model.train()
    frozen = model.model.layers[0].requires_grad_(False).eval()
    backend = backend_of(model)
    await backend.forward_logprobs(next(iter(mini_batch))).result()
    await backend.forward_backward(mini_batch, totals=mini_batch.totals).result()
    assert not any(module.training for module in frozen.modules())
    assert model.model.layers[1].training


async def test_a_model_in_evaluation_mode_is_trained_in_training_mode():
    backend = backend_of(tiny_model().eval())
    mini_batch = mini_batch_of(sorting_items(4))
    await backend.forward_backward(mini_batch, totals=mini_batch.totals).result()
    assert all(module.training for module in backend.model.modules())


async def test_freed_memory_is_returned_before_the_passes_and_after_the_step(monkeypatch):
    done = []
    mini_batch = mini_batch_of(sorting_items(4))
    backend = backend_of()
    monkeypatch.setattr(backend._freed, "return_to_system", lambda: done.append(len(gradients_of(backend.model))))
    await backend.forward_backward(mini_batch, totals=mini_batch.totals).result()
    await backend.optim_step().result()
    assert done == [0, 0]  # there is no gradient at either time
