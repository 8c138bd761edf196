"""Sleep and wake of a real vLLM server. On a CPU vLLM answers the calls and frees nothing, so that
these tests show their order, and that what is sampled is what was pushed; and the stub's routes are
compared with the installed package's. On a GPU: `tests/gpu/test_colocation.py`."""

import ast
import threading
from pathlib import Path

import pytest
from real_vllm import vllm_or_skip
from served_weights import CLOSE, generate, max_difference, perturb, running_requests, weights
from stub_weight_server import StubWeightServer

from ludic.distributed import create_vllm_publisher
from ludic.errors import PublishError
from ludic.inference.vllm.endpoints import VllmEndpoints

pytestmark = pytest.mark.integration


def find_package(name):
    """A source file of the installed vLLM."""
    lib = Path(vllm_or_skip()).parent.parent / "lib"
    [path] = lib.glob(f"python3*/site-packages/vllm/{name}")
    return ast.parse(path.read_text())


def test_the_stub_has_the_routes_parameters_and_answers_of_the_installed_package():
    routes = {}
    for function in ast.walk(find_package("entrypoints/serve/dev/sleep/api_router.py")):
        calls = [each for each in getattr(function, "decorator_list", ()) if isinstance(each, ast.Call)]
        for call in calls:
            answer = next(each for each in ast.walk(function) if isinstance(each, ast.keyword) and each.arg == "content")
            parameters = {each.arg for each in function.args.args} - {"raw_request"}
            defaults = [ast.literal_eval(each) for each in function.args.defaults]
            keys = [key.value for key in answer.value.keys]
            routes[call.args[0].value] = (call.func.attr, parameters, defaults, keys)
    assert routes["/sleep"] == ("post", {"level", "mode"}, [1, "abort"], ["status", "level"])
    assert routes["/wake_up"] == ("post", set(), [], ["status", "tags"])
    assert routes["/is_sleeping"] == ("get", set(), [], ["is_sleeping"])
    tags = next(
        ast.literal_eval(each.value.args[0])
        for each in find_package("v1/executor/abstract.py").body
        if isinstance(each, ast.Assign) and each.targets[0].id == "SLEEP_TAGS"
    )
    stub = StubWeightServer.__new__(StubWeightServer)
    stub.__dict__.update(sleeping=set(), paused=None, kept=None, card=None, served={}, leaks=False, forgets=False)
    assert list(stub.on_sleep({}, {})) == routes["/sleep"][3]
    assert stub.sleeping == set(tags)
    assert list(stub.on_is_sleeping({}, {})) == routes["/is_sleeping"][3]
    assert list(stub.on_wake_up({"tags": ["weights"]}, {})) == routes["/wake_up"][3]


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_and_a_push_the_server_samples_from_the_pushed_weights(vllm_server_to_change, level):
    server = vllm_server_to_change
    push, endpoints = create_vllm_publisher(server.url, sleep_level=level), VllmEndpoints(server.url)
    prompt = [10 + token % 200 for token in range(300)]
    generate(server, max_tokens=4, prompt=prompt)  # fills the prefix cache
    for step in (1, 2):
        model = perturb(server.model, seed=10 * level + step)
        push.sleep()
        assert endpoints.is_sleeping()
        push.publish(weights(model), version=step)
        assert not endpoints.is_sleeping()
        assert max_difference(model, server, max_tokens=4, prompt=prompt) < CLOSE
        assert generate(server)[2] == [{"version": str(step), "start": 0, "end": 32}]


def test_requests_that_come_while_it_sleeps_wait_and_those_that_run_end(vllm_server_to_change):
    server = vllm_server_to_change
    push, endpoints = create_vllm_publisher(server.url, sleep_level=2), VllmEndpoints(server.url)
    answers = []
    long = threading.Thread(target=lambda: answers.append(generate(server, max_tokens=450)))
    long.start()
    while running_requests(server) < 1:
        assert long.is_alive()
    push.sleep()
    long.join(60)
    assert not long.is_alive(), "a request that ran hangs"
    waiting = threading.Thread(target=lambda: answers.append(generate(server, max_tokens=8)))
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    assert endpoints.is_sleeping()
    model = perturb(server.model, seed=31)
    push.publish(weights(model), version=9)
    waiting.join(60)
    assert answers[-1][2] == [{"version": "9", "start": 0, "end": 8}]


def test_weights_that_level_2_has_lost_are_found_if_the_push_lacks_them(vllm_server_to_change):
    """The real memory is not lost on a CPU: the check makes it NaN, and finds it again. The server
    stays out of service until a push of all weights, by a new publisher."""
    server = vllm_server_to_change
    push = create_vllm_publisher(server.url, sleep_level=2, partial=True)
    push.sleep()
    some = {name: value for name, value in weights(server.model).items() if "layers.0." in name}
    with pytest.raises(PublishError, match=r"lost in its sleep"):
        push.publish(some, version=1)
    assert VllmEndpoints(server.url).is_sleeping()
    model = perturb(server.model, seed=41)
    create_vllm_publisher(server.url, sleep_level=2).publish(weights(model), version=2)
    assert max_difference(model, server) < CLOSE
