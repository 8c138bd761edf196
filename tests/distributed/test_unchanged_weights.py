"""Pushes of unchanged weights: servers only change the version, and a publisher that never changes
anything is an error."""

import copy
import itertools
import re

import pytest
import torch
from hypothesis import given, strategies as st
from stub_weight_server import same, weights
from training_samples import cpu_config, sorting_items, tiny_model

from ludic.distributed import create_vllm_publisher
from ludic.distributed.publisher import MOST_IN_A_ROW, UnchangedWeights
from ludic.errors import PublishError
from ludic.training import SAWBatch, Trainer, make_grpo

MARKS = {"a": "1", "b": "2"}
SENT = "/update_weights"


def publisher(*servers, **options):
    return create_vllm_publisher([server.url for server in servers], **{"timeout_s": 5.0, **options})


def required_action(unchanged, fingerprints, version, still_served=True):
    """Whether the weights of this version need a `push` or a `rename`."""
    calls = []
    unchanged.publish(
        fingerprints,
        version,
        push=lambda: calls.append("push"),
        rename=lambda: calls.append("rename"),
        still_served=lambda: still_served,
    )
    return calls[0]


def pushes(server):
    return server.paths().count(SENT)


def test_the_first_version_repeated_versions_and_new_fingerprints_are_pushed():
    unchanged = UnchangedWeights("weights")
    assert required_action(unchanged, MARKS, 1) == "push"
    assert required_action(unchanged, MARKS, 1) == "push"
    assert required_action(unchanged, MARKS, 2) == "rename"
    assert required_action(unchanged, {**MARKS, "b": "3"}, 3) == "push"
    assert required_action(unchanged, {**MARKS, "b": "3"}, 4, still_served=False) == "push"


def test_after_a_failed_push_the_same_weights_are_pushed_again():
    def fail():
        raise PublishError("lost")

    unchanged = UnchangedWeights("weights")
    assert required_action(unchanged, MARKS, 1) == "push"
    with pytest.raises(PublishError, match="lost"):
        unchanged.publish({"a": "9"}, 2, push=fail, rename=fail, still_served=lambda: True)
    assert required_action(unchanged, MARKS, 3) == "push"


@given(st.lists(st.sampled_from(["changed", "unchanged", "nothing to learn"]), max_size=80))
def test_unchanged_pushes_despite_gradients_are_an_error_after_the_limit(pushed):
    unchanged, mark, in_a_row = UnchangedWeights("weights"), 0, 0
    required_action(unchanged, {"a": "0"}, "first")
    for version, kind in enumerate(pushed):
        mark += kind == "changed"
        in_a_row = 0 if kind == "changed" else in_a_row + (kind == "unchanged")
        unchanged.change_expected = kind != "nothing to learn"
        if in_a_row == MOST_IN_A_ROW:
            with pytest.raises(PublishError, match=f"20 pushes .*version {version}, .*the weights"):
                required_action(unchanged, {"a": str(mark)}, version)
            return
        assert required_action(unchanged, {"a": str(mark)}, version) == ("push" if kind == "changed" else "rename")


def test_unchanged_weights_get_the_new_version_and_are_logged(start, caplog):
    servers = [start(), start()]
    push = publisher(*servers)
    push.publish(weights(1), version=1)
    push.publish(weights(1), version=2)
    for server in servers:
        assert (server.version, server.paused, pushes(server)) == ("2", None, 1)
        assert same(server.served, weights(1))
    assert re.search("weights of version 2 equal .*version 1", caplog.text)
    push.publish(weights(2), version=3)
    assert all(same(server.served, weights(2)) and server.version == "3" for server in servers)


@pytest.mark.parametrize("what", ["restarted", "given others"])
def test_unchanged_weights_are_pushed_to_a_server_that_lost_them(start, what):
    servers = [start(), start()]
    push = publisher(*servers)
    push.publish(weights(1), version=1)
    if what == "restarted":
        servers[1].restart()
    else:
        publisher(servers[1]).publish(weights(7), version=7)
    push.publish(weights(1), version=2)
    for server in servers:
        assert (server.version, server.paused) == ("2", None)
        assert same(server.served, weights(1))


def test_weights_of_a_failed_push_are_pushed_again(start):
    server = start()
    push = publisher(server)
    push.publish(weights(1), version=1)
    server.faults["/pause"] = lambda _: (_ for _ in ()).throw(RuntimeError("no"))
    with pytest.raises(PublishError, match="version 2 was not published"):
        push.publish(weights(2), version=2)
    server.faults.clear()
    push.publish(weights(1), version=3)
    assert (server.version, pushes(server)) == ("3", 3)


class Batches:
    """Batches with these weights, then batches of weight 0, which teach nothing."""

    def __init__(self, *weights):
        self.weights = itertools.chain(weights, itertools.repeat(0.0))

    async def next_batch(self):
        return SAWBatch(sorting_items(4, weight=next(self.weights)), {})


def trainer_with(server, model, source, push=None):
    cfg = cpu_config(weight_decay=0.0)  # weight decay would change weights without a gradient
    return Trainer(model=model, algo=make_grpo(group_size=4), batch_source=source, publisher=push or publisher(server), cfg=cfg)


def state_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_trainer_continues_while_there_is_nothing_to_learn(start, caplog):
    model = tiny_model()
    server = start(first=state_of(model), tied=True)
    trainer_with(server, model, Batches()).train_sync(MOST_IN_A_ROW + 5)
    assert (server.version, pushes(server)) == (str(MOST_IN_A_ROW + 5), 1)
    assert "there was no gradient since" in caplog.text


def test_a_publisher_that_keeps_pushing_stale_weights_is_detected(start):
    """The published model is not the one that is trained."""
    model = tiny_model()
    server = start(first=state_of(model), tied=True)
    stale, inner = copy.deepcopy(state_of(model)), publisher(server)

    class Stale:
        expect_change = inner.expect_change

        def publish(self, state_dict, version=None):
            inner.publish(stale, version=version)

    trainer = trainer_with(server, model, Batches(*[1.0] * 100), Stale())
    with pytest.raises(PublishError, match="check the published model"):
        trainer.train_sync(100)
    assert trainer.current_step == MOST_IN_A_ROW + 1


def test_a_batch_without_a_gradient_after_one_with_a_gradient_is_no_error(start):
    model = tiny_model()
    server = start(first=state_of(model), tied=True)
    trainer_with(server, model, Batches(0.0, 1.0, 0.0, 0.0)).train_sync(4)
    assert server.version == "4"
    assert all(torch.equal(server.served[name], tensor) for name, tensor in state_of(model).items())
