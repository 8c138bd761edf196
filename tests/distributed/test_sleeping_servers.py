"""Servers that share the trainer's device: what they free, when they wake, and what they serve if a
step fails. The faults are those that users of colocated training report."""

import threading
import time

import pytest
import torch
from fake_card import FakeCard, held_tensors
from stub_policy_server import StubPolicyServer
from stub_weight_server import refuse, same, weights
from training_samples import ListSource, cpu_config, sorting_items, tiny_model, weights_of

from ludic.distributed import create_vllm_publisher
from ludic.distributed.push import server_link
from ludic.errors import PublishError
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.training import CheckpointConfig, Trainer, make_grpo

WAKE = [
    "/start_weight_update",
    "/update_weights",
    "/wake_up",  # the weights, before they are loaded
    "/collective_rpc:ludic_after_wake",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    "/collective_rpc:ludic_fingerprint",
    "/wake_up",  # keys and values, once the weights are right
]


def publisher(server, *, level=2, **options):
    return create_vllm_publisher(server.url, **{"timeout_s": 5.0, "sleep_level": level, **options})


def tags(server):
    """Of all calls that wake the server, in order. A server notes a call before it takes effect."""
    return [query["tags"][0] for path, query in server.queries if path == "/wake_up"]


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch):
    monkeypatch.setattr(server_link, "ANSWER_MARGIN_S", 0.5)


@pytest.mark.parametrize(("level", "rank0_only"), [(1, False), (2, False), (2, True)])
def test_a_push_wakes_the_weights_loads_and_checks_them_and_then_wakes_the_cache(start, level, rank0_only):
    server = start()
    push = publisher(server, level=level, rank0_only=rank0_only)
    assert push.shares_device
    push.sleep()
    assert server.sleeping == {"weights", "kv_cache"}
    assert server.used_bytes() == 0
    push.publish(weights(1), version=1)
    assert server.paths()[-len(WAKE) :] == WAKE
    assert tags(server) == ["weights", "kv_cache"]
    assert (server.sleeping, server.paused, server.version) == (set(), None, "1")
    assert same(server.served, weights(1))
    assert not server.cache_is_stale


def test_a_server_that_is_awake_is_paused_as_ever(start):
    server = start()
    publisher(server).publish(weights(1), version=1)
    assert "/wake_up" not in server.paths()
    assert server.paths()[-1] == "/resume"


def test_equal_weights_are_sent_again_because_the_sleep_has_dropped_them(start):
    """Without a look at the server's weights, which have no memory."""
    server = start()
    push = publisher(server)
    push.publish(weights(1), version=1)
    push.sleep()
    assert not same(server.served, weights(1))
    push.publish(weights(1), version=2)
    assert same(server.served, weights(1))
    assert server.version == "2"
    assert server.paths().count("/collective_rpc:ludic_fingerprint") == 2


@pytest.mark.parametrize("level", [1, 2])
def test_frozen_weights_that_are_not_pushed_survive_level_1_alone(start, level):
    """Only what is in no layer of the push: the receiver reads the rest of a layer from its
    files."""
    server = start()
    push = publisher(server, level=level, partial=True)
    trained = {name: value for name, value in weights(1).items() if "layers.0" in name}
    push.sleep()
    if level == 1:
        push.publish(trained, version=1)
        assert same(server.served, {**weights(0), **trained})
        assert server.paused is None
        return
    with pytest.raises(PublishError, match=r"lacks 3 weights that it lost"):
        push.publish(trained, version=1)
    assert server.paused == "abort"
    assert "kv_cache" in server.sleeping


def test_memory_that_a_sleep_does_not_free_is_an_error_with_numbers(start):
    server = start()
    server.leaks = True
    with pytest.raises(PublishError, match=r"has freed 0.00 GiB of its device"):
        publisher(server).sleep()


def test_a_server_without_sleep_mode_is_refused_before_it_sleeps(start):
    server = start()
    server.has_sleep_mode = False
    with pytest.raises(PublishError, match=r"start it with --enable-sleep-mode"):
        publisher(server)
    assert "/sleep" not in server.paths()


def test_weights_that_a_sleep_of_level_1_changes_are_found_before_they_are_served(start):
    server = start()
    push = publisher(server, level=1)
    push.sleep()
    server.forgets = True
    with pytest.raises(PublishError, match=r"woke with other values in 5 tensors"):
        push.publish(weights(1), version=1)
    assert "kv_cache" in server.sleeping
    assert server.version == "default"


def test_a_push_that_loads_other_values_is_not_served(start):
    server = start()
    push = publisher(server)
    push.sleep()
    server.loads_nothing = True
    with pytest.raises(PublishError, match=r"served with other values"):
        push.publish(weights(1), version=1)
    assert "kv_cache" in server.sleeping
    assert server.paused == "abort"


@pytest.mark.parametrize("at", ["/sleep", "/wake_up"])
def test_a_server_that_does_not_answer_ends_the_wait_at_its_deadline(start, at):
    server = start()
    push = publisher(server, timeout_s=0.3)
    release = threading.Event()
    if at == "/wake_up":
        push.sleep()
    server.faults[at] = lambda _: release.wait(20) and None
    began = time.monotonic()
    try:
        with pytest.raises(PublishError, match=r"gave no answer within 0.8 s"):
            push.sleep() if at == "/sleep" else push.publish(weights(1), version=1)
        assert time.monotonic() - began < 5
    finally:
        release.set()


def test_a_wake_that_fails_leaves_the_server_asleep_and_the_next_push_wakes_it(start):
    server = start()
    push = publisher(server)
    push.sleep()
    server.faults["/wake_up"] = refuse("CUDA error: out of memory")
    with pytest.raises(PublishError, match=r"out of memory"):
        push.publish(weights(1), version=1)
    assert server.sleeping == {"weights", "kv_cache"}
    del server.faults["/wake_up"]
    push.publish(weights(1), version=1)
    assert same(server.served, weights(1))
    assert not server.sleeping


def test_a_cache_that_does_not_wake_is_an_error(start):
    server = start()
    push = publisher(server)
    push.sleep()

    def only_weights(_):
        return None if "weights" in server.sleeping else '{"status": "sleeping", "tags": ["kv_cache"]}'

    server.faults["/wake_up"] = only_weights
    with pytest.raises(PublishError, match=r"still sleeps after it was woken"):
        push.publish(weights(1), version=1)


@pytest.mark.parametrize("level", [1, 2])
def test_a_trainer_that_was_killed_finds_its_server_asleep_and_wakes_it(start, level):
    server = start()
    publisher(server, level=level).sleep()
    again = publisher(server, level=level)
    again.publish(weights(3), version=7)
    assert same(server.served, weights(3))
    assert (server.version, server.sleeping, server.paused) == ("7", set(), None)


def test_a_server_that_a_killed_trainer_left_paused_is_resumed(start):
    server = start()
    push = publisher(server, level=1)
    push.sleep()
    push.publish(weights(1), version=1)
    server.on_pause({"mode": ["keep"]}, {})
    publisher(server, level=1).publish(weights(2), version=2)
    assert same(server.served, weights(2))
    assert server.paused is None


def test_a_server_that_died_asleep_is_named(start, tmp_path):
    server = start()
    push = publisher(server)
    push.sleep()
    server._http.shutdown()
    server._http.server_close()
    with pytest.raises(PublishError, match=r"127.0.0.1"):
        push.publish(weights(1), version=1)
    server._http.shutdown = server._http.server_close = lambda: None


def test_a_restarted_server_is_given_all_weights(start):
    server = start()
    push = publisher(server)
    push.sleep()
    server.restart()
    push.publish(weights(1), version=1)
    assert same(server.served, weights(1))
    assert server.paused is None


def test_running_requests_are_aborted_and_new_ones_wait(start):
    """A sleep that waited for them would hang, since nothing schedules them."""
    server = start()
    publisher(server).sleep()
    assert next(query for path, query in server.queries if path == "/sleep") == {"level": ["2"], "mode": ["abort"]}
    assert VllmEndpoints(server.url).is_sleeping()


class Ledger:
    """The bytes of trainer and server on one device, whenever one of them changes."""

    def __init__(self, card):
        self.card, self.trainer, self.server, self.lines = card, None, 0, []

    def own_bytes(self):
        if self.trainer is None:
            return 0
        held = held_tensors(self.trainer.backend.model, self.trainer.backend.optimizer)
        return sum({tensor.untyped_storage()._cdata: tensor.nbytes for tensor in held if self.card.holds(tensor)}.values())

    def note(self, who):
        self.lines.append((who, self.own_bytes(), self.server))

    def of_server(self, size):
        self.server = size
        self.note("server")


class Sampling(ListSource):
    """A batch that needs the server awake, with the weights of the step."""

    def __init__(self, server, ledger):
        super().__init__(sorting_items(8))
        self.server, self.ledger, self.seen = server, ledger, []

    async def next_batch(self):
        assert not self.server.sleeping
        assert self.server.paused is None
        self.ledger.note("sampling")
        self.seen.append({name: value.clone() for name, value in self.server.served.items()})
        return await super().next_batch()


def colocated(server, card, *, level=2, trainer_class=Trainer, **options):
    ledger = Ledger(card)
    push = publisher(server, level=level)
    server.card = ledger.of_server
    ledger.server = server.used_bytes()
    push.sleep()

    class Noting(trainer_class):
        async def _optimize(self, *arguments, **settings):
            ledger.note("training")
            return await super()._optimize(*arguments, **settings)

    source = Sampling(server, ledger)
    trainer = Noting(
        model=tiny_model(),
        algo=make_grpo(group_size=4),
        batch_source=source,
        cfg=cpu_config(offload=True),
        publisher=push,
        **options,
    )
    ledger.trainer = trainer
    return trainer, ledger, source


@pytest.fixture
def server(tmp_path):
    first = {name: value for name, value in tiny_model().state_dict().items() if name != "lm_head.weight"}
    with StubPolicyServer(tmp_path / "policy", tied=True, first=first, backend="gloo") as stub:
        yield stub


@pytest.mark.parametrize("level", [1, 2])
def test_trainer_and_server_take_turns_and_never_hold_the_device_both(server, level):
    with FakeCard() as card:
        trainer, ledger, source = colocated(server, card, level=level)
        trainer._event_loop.run(trainer.publish(), instead="publish")
        trainer.train_sync(3)
    assert all(own == 0 or theirs == 0 for _, own, theirs in ledger.lines), ledger.lines
    turns = [who for who, _, _ in ledger.lines]
    #   asleep     first push: weights, cache        each step: sleeps, trains, weights, cache
    assert turns == ["server", "server", "server"] + ["sampling", "server", "training", "server", "server"] * 3
    for who, own, theirs in ledger.lines:
        assert (own > 0) == (who == "training") or (who == "server" and theirs == 0), ledger.lines
        assert who != "sampling" or theirs > 0
    # What is sampled from is what was trained, and it changes.
    assert same(server.served, {name: value for name, value in weights_of(trainer.model).items() if name in server.served})
    assert not same(source.seen[0], source.seen[2])


def test_turns_change_no_bit_of_the_training(server):
    class Plain(ListSource):
        pass

    expected = Trainer(
        model=tiny_model(), algo=make_grpo(group_size=4), batch_source=Plain(sorting_items(8)), cfg=cpu_config(sync_every_steps=0)
    )
    expected.train_sync(3)
    with FakeCard() as card:
        trainer, _, _ = colocated(server, card)
        trainer._event_loop.run(trainer.publish(), instead="publish")
        trainer.train_sync(3)
    assert same(weights_of(trainer.model), weights_of(expected.model))


def test_an_evaluation_between_steps_finds_the_server_awake(server):
    class Asking:
        async def eval(self, **_):
            assert not server.sleeping
            assert server.paused is None
            return [], {"reward": 1.0}

    with FakeCard() as card:
        trainer, _, _ = colocated(server, card, evaluator=Asking())
        trainer.cfg.eval_at_start, trainer.cfg.eval_every_n_steps = True, 1
        trainer._event_loop.run(trainer.publish(), instead="publish")
        trainer.train_sync(2)
        assert trainer.last_eval["eval/step"] == 2


def test_a_trainer_killed_in_its_turn_resumes_with_the_server_that_still_sleeps(server, tmp_path):
    """The first life ends after the server fell asleep, in the third step."""

    class Killed(Trainer):
        async def _optimize(self, *arguments, **settings):
            if self.current_step == 2 and self.dies:
                raise KeyboardInterrupt
            return await super()._optimize(*arguments, **settings)

    def live(dies, **options):
        with FakeCard() as card:
            places = CheckpointConfig(tmp_path / "kept", every_n_steps=1)
            trainer, _, source = colocated(server, card, trainer_class=Killed, checkpoint_config=places, **options)
            trainer.dies = dies
            source.position = trainer.current_step
            trainer._event_loop.run(trainer.publish(), instead="publish")
            trainer.train_sync(4 - trainer.current_step)
            return weights_of(trainer.model)

    with pytest.raises(KeyboardInterrupt):
        live(dies=True)
    assert server.sleeping
    ended = live(dies=False, resume_from=2)
    whole = Trainer(
        model=tiny_model(),
        algo=make_grpo(group_size=4),
        batch_source=ListSource(sorting_items(8)),
        cfg=cpu_config(sync_every_steps=0),
    )
    whole.train_sync(4)
    assert same(ended, weights_of(whole.model))
    assert server.version == "4"
    assert torch.equal(server.served["model.norm.weight"], ended["model.norm.weight"])
