"""What the supervisor does when processes end, on a place without processes."""

import json
import signal
from dataclasses import replace

import pytest
from events import read_events
from hypothesis import given, strategies as st
from scripted_place import Clock, ScriptedPlace

from ludic.errors import TRY_AGAIN, ConfigError, LaunchError
from ludic.launch.process import Process
from ludic.launch.state import read_launch
from ludic.launch.supervisor import POLL_S, RestartBudget, Supervisor

TRAINER = Process("trainer", "trainer", ("train",))
ACTORS = [Process(f"actor{i}", "actor", ("act",)) for i in range(2)]


class World:
    """A supervisor on a scripted place."""

    def __init__(self, folder, processes=(TRAINER, *ACTORS), **options):
        self.clock, self.notes = Clock(), []
        self.place = ScriptedPlace(self.clock)
        options = {"note": self.notes.append, "clock": self.clock, "sleep": self.clock.sleep, **options}
        self.supervisor = Supervisor(self.place, processes, folder=folder, **options)
        self.folder = folder

    def run(self, seconds, step=POLL_S):
        """Let time pass. Returns the exit status as soon as there is one."""
        end = self.clock() + seconds
        while self.clock() <= end:
            status = self.supervisor.tick()
            if status is not None:
                return status
            self.clock.sleep(step)
        return None

    def begin(self):
        assert self.run(1.0) is None
        return self

    def starts(self, name):
        return [time for time, started in self.place.starts if started == name]

    def events(self, kind):
        return [event for event in read_events(self.folder / "events.jsonl") if event["event"] == kind]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path).begin()


def test_roles_start_in_the_order_of_the_list(world):
    assert [name for _, name in world.place.starts] == ["trainer", "actor0", "actor1"]


def test_a_role_waits_until_the_earlier_ones_run(tmp_path):
    world = World(tmp_path)
    world.place.poll = list  # no start is reported
    assert world.run(5.0) is None
    assert [name for _, name in world.place.starts] == ["trainer"]


@pytest.mark.parametrize("how", [{"code": 1}, {"code": 75}, {"signal": 9}, {"signal": 15}, {"code": 143}, {}])
def test_an_actor_that_fails_is_restarted(world, how):
    world.place.end("actor0", **how)
    assert world.run(0.2) is None
    assert len(world.starts("actor0")) == 2
    assert len(world.starts("actor1")) == 1
    assert [event["name"] for event in world.events("restart")] == ["actor0"]
    assert "actor0" in world.notes[-1]
    assert "the last line" in world.notes[-1]


@pytest.mark.parametrize("how", [{"code": 1}, {"code": 75}, {"signal": 9}, {"signal": 15}, {}])
def test_a_trainer_that_fails_is_restarted(world, how):
    world.place.end("trainer", **how)
    assert world.run(0.2) is None
    assert len(world.starts("trainer")) == 2


def test_the_run_is_done_when_the_trainer_is(world):
    world.place.end("trainer", code=0)
    assert world.run(1.0) == 0


def test_an_actor_that_is_done_is_not_restarted_and_ends_nothing(world):
    world.place.end("actor0", code=0)
    world.place.end("actor1", code=0)
    assert world.run(5.0) is None
    assert len(world.place.starts) == 3


def test_a_trainer_of_several_agents_is_done_when_all_are(tmp_path):
    agents = [Process(f"trainer{i}", "trainer", ("train",)) for i in range(2)]
    world = World(tmp_path, agents).begin()
    world.place.end("trainer0", code=0)
    assert world.run(5.0) is None
    world.place.end("trainer1", code=0)
    assert world.run(1.0) == 0


AGENTS = [Process(f"trainer{i}", "trainer", ("train",), restarts=2) for i in range(3)]


def test_trainers_that_need_each_other_are_restarted_together_from_one_budget(tmp_path):
    """One lost rank ends the agents of all machines, in any order; that is one failure."""
    world = World(tmp_path, [*AGENTS, ACTORS[0]]).begin()
    for failure in range(2):
        world.place.end("trainer1", code=1)
        world.place.end("trainer0", code=75)  # of the same failure, and not yet reported
        assert world.run(5.0) is None
        assert [len(world.starts(agent.name)) for agent in AGENTS] == [failure + 2] * 3
        assert {slot.state.state for slot in world.supervisor._trainers()} == {"running"}
    assert world.place.stopped == [("trainer0", 0.0), ("trainer2", 0.0)] * 2
    assert len(world.starts("actor0")) == 1
    world.place.end("trainer2", signal=9)
    assert world.run(5.0) == 128 + 9
    assert [event["restarts"] for event in world.events("restart")] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("code", [2, 78, 130, 143])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("restarts", [0, 2])
def test_an_agent_that_wants_no_restart_ends_the_run_whichever_is_reported_first(tmp_path, code, order, restarts):
    """Its end is the cause; the other agent only lost it."""
    agents = [Process(f"trainer{i}", "trainer", ("train",), restarts=restarts) for i in range(2)]
    world = World(tmp_path, agents).begin()
    ends = [("trainer0", code), ("trainer1", 75)]
    for i in order:
        world.place.end(ends[i][0], code=ends[i][1])
    ends_the_run = code in (2, 78) or restarts or order == (0, 1)  # else the agent without restarts does
    assert world.run(5.0) == (code if ends_the_run else 75)
    assert [len(world.starts(agent.name)) for agent in agents] == [1, 1]


def test_an_agent_that_ended_for_good_while_the_others_were_stopped_ends_the_run(tmp_path):
    world = World(tmp_path, AGENTS).begin()
    stop = world.place.stop
    world.place.stop = lambda names, grace_s: [replace(end, code=78, signal=None) for end in stop(names, grace_s)]
    world.place.end("trainer1", code=75)
    assert world.run(5.0) == 78
    assert [len(world.starts(agent.name)) for agent in AGENTS] == [1, 1, 1]


def test_an_agent_that_was_done_is_needed_by_one_that_fails_then(tmp_path):
    world = World(tmp_path, AGENTS).begin()
    world.place.end("trainer0", code=0)
    assert world.run(1.0) is None
    world.place.end("trainer1", code=1)
    assert world.run(1.0) is None
    assert [len(world.starts(agent.name)) for agent in AGENTS] == [2, 2, 2]
    for agent in AGENTS:
        world.place.end(agent.name, code=0)
    assert world.run(1.0) == 0


def test_trainers_that_go_on_with_fewer_are_restarted_alone(tmp_path):
    world = World(tmp_path, AGENTS, least=2).begin()
    world.place.end("trainer1", code=1)
    assert world.run(5.0) is None
    assert [len(world.starts(agent.name)) for agent in AGENTS] == [1, 2, 1]


@pytest.mark.parametrize("code", [2, 78, 130, 143])
def test_a_trainer_that_wants_no_restart_ends_the_run(world, code):
    world.place.end("trainer", code=code)
    assert world.run(5.0) == code
    assert len(world.starts("trainer")) == 1


def test_restarts_wait_longer_each_time_and_are_limited(world):
    """Restarts after 0, 1 and 2 s; the fourth failure within ten minutes ends the run."""
    waited = []
    for _ in range(3):
        ended = world.clock()
        world.place.end("trainer", code=1)
        assert world.run(40.0) is None
        waited.append(world.starts("trainer")[-1] - ended)
    assert waited == pytest.approx([0, 1, 2], abs=0.11)
    world.place.end("trainer", signal=9)
    assert world.run(1.0) == 137
    assert "3 restarts in 10 minutes" in world.notes[-1]
    assert [event["name"] for event in world.events("give_up")] == ["trainer"]


def test_the_budget_is_renewed_after_the_window(tmp_path):
    world = World(tmp_path, window_s=100.0).begin()
    for _ in range(10):
        world.place.end("actor0", code=1)
        assert world.run(40.0) is None  # 3 failures in any 100 s
    assert len(world.starts("actor0")) == 11


def test_the_run_goes_on_with_the_remaining_actors_and_ends_without_any(world):
    world.place.end("actor0", code=78)
    assert world.run(5.0) is None
    world.place.end("actor1", code=78)
    assert world.run(5.0) == 78


def test_an_actor_that_waits_for_its_restart_counts_as_left(world):
    world.place.end("actor1", code=1)
    world.run(POLL_S)
    world.place.end("actor1", code=1)
    world.place.end("actor0", code=78)
    assert world.run(0.5) is None
    assert world.place.running == {"trainer"}
    assert world.run(2.0) is None
    assert world.place.running == {"trainer", "actor1"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", [{"code": 143}, {"code": 1}, {"signal": 15}, {"code": 75}])
def test_a_polite_stop_waits_for_the_trainer_and_keeps_the_actors_until_then(world, number, how):
    world.supervisor.request_stop(number)
    assert world.run(10.0) is None
    assert [(name, sent) for _, name, sent in world.place.asked] == [("trainer", number)]
    assert world.place.running == {"trainer", "actor0", "actor1"}
    world.place.end("actor0", code=1)
    assert world.run(5.0) is None
    assert len(world.starts("actor0")) == 1  # nothing is restarted any more
    world.place.end("trainer", **how)
    assert world.run(1.0) == 128 + number


def test_a_stopped_trainer_that_was_just_done_is_done(world):
    world.supervisor.request_stop()
    world.run(1.0)
    world.place.end("trainer", code=0)
    assert world.run(1.0) == 0


def test_a_stopped_trainer_that_could_not_save_says_so(world):
    world.supervisor.request_stop()
    world.run(1.0)
    world.place.end("trainer", code=78)
    assert world.run(1.0) == 78


def test_a_trainer_that_does_not_stop_is_killed_after_the_grace_period(world):
    world.supervisor.request_stop()
    assert world.run(60.0) == 143
    assert world.clock() == pytest.approx(31, abs=0.2)
    world.supervisor._end_all(143)
    assert world.place.stopped == [("trainer", 0.0)]


def test_a_second_signal_is_passed_on_too(world):
    world.supervisor.request_stop(signal.SIGINT)
    world.run(1.0)
    world.supervisor.request_stop(signal.SIGINT)
    world.run(1.0)
    assert [sent for _, _, sent in world.place.asked] == [signal.SIGINT, signal.SIGINT]


def test_a_stop_while_the_trainer_waits_for_its_restart_ends_the_run(world):
    for _ in range(2):
        world.place.end("trainer", code=1)
        world.run(POLL_S * 2)
    world.supervisor.request_stop()
    assert world.run(1.0) == 143


def test_a_run_without_actors_left_lets_the_trainer_save(tmp_path):
    world = World(tmp_path, [TRAINER, ACTORS[0]])
    world.clock.sleep = lambda seconds: setattr(world.clock, "now", world.clock.now + seconds) or fail_actor(world)
    world.supervisor._sleep = world.clock.sleep
    assert world.supervisor.run() == 78
    assert world.place.stopped == [("trainer", 30.0)]
    assert world.place.closed_with == 10.0


def fail_actor(world):
    if "actor0" in world.place.running:
        world.place.end("actor0", code=78)


def test_an_error_ends_all_processes(tmp_path):
    world = World(tmp_path)
    world.supervisor._sleep = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        world.supervisor.run()
    assert world.place.running == set()
    assert read_launch(tmp_path).exit_status is None


def test_a_process_that_cannot_be_started_at_first_is_an_error_and_later_uses_its_budget(world):
    def refuse(process):
        raise LaunchError("no room")

    world.place.start = refuse
    world.place.end("actor0", code=1)
    assert world.run(30.0) is None
    assert len(world.events("restart")) == 3
    assert "no room" in world.notes[-1]
    world.place.end("trainer", code=1)
    assert world.run(30.0) == TRY_AGAIN
    assert [event["name"] for event in world.events("give_up")] == ["actor0", "trainer"]
    broken = World(world.folder)
    broken.place.start = refuse
    with pytest.raises(LaunchError, match="no room"):
        broken.run(1.0)


ENDS = st.sampled_from([{"code": code} for code in (0, 1, 2, 75, 78, 130, 143)] + [{"signal": 9}, {}])
STEPS = st.lists(
    st.tuples(st.floats(0.0, 300.0), st.sampled_from(["trainer", "actor0", "actor1"]), ENDS), min_size=1, max_size=25
)


@given(steps=STEPS)
def test_no_sequence_of_ends_exceeds_the_budget_or_restarts_what_wants_none(tmp_path_factory, steps):
    """The status comes from the last end; whatever is live runs; nothing starts after a final
    end."""
    world = World(tmp_path_factory.mktemp("run")).begin()
    for pause, name, how in steps:
        world.clock.sleep(pause)
        if name not in world.place.running:
            continue  # it waits for its restart, or is gone
        recent = [t for t in world.starts(name)[1:] if world.clock() - t < 600.0 - 1e-6]
        world.place.end(name, **how)
        before = len(world.starts(name))
        code = how.get("code")
        expected = 128 + how["signal"] if "signal" in how else how.get("code", 75)
        is_final = code in (2, 78) or len(recent) >= 3
        status = world.run(35.0, step=1.0)  # longer than any delay
        if name == "trainer" and (code in (0, 130, 143) or is_final):
            assert status == expected
            return
        if code == 0 or is_final:
            assert len(world.starts(name)) == before
            over = name != "trainer" and code != 0 and not ({"actor0", "actor1"} & world.place.running)
            assert status == (expected if over else None)
            if over:
                return
        else:
            assert status is None
            assert len(world.starts(name)) == before + 1
        for each in ("trainer", "actor0", "actor1"):
            times = world.starts(each)[1:]
            assert all(later - earlier >= 600.0 - 2.0 for earlier, later in zip(times, times[3:], strict=False))


@given(st.lists(st.floats(0.0, 400.0), max_size=40), st.integers(0, 5))
def test_a_budget_never_allows_more_than_its_limit_in_a_window(gaps, limit):
    budget, now, granted = RestartBudget(limit, 600.0), 0.0, []
    for gap in gaps:
        now = max(now + gap, granted[-1] if granted else 0.0)  # a process ends after it was restarted
        delay = budget.spend(now)
        recent = [time for time in granted if now - time < 600.0]
        assert (delay is None) == (len(recent) >= limit)
        if delay is not None:
            assert delay == (min(30.0, 2.0 ** (len(recent) - 1)) if recent else 0.0)
            granted.append(now + delay)


def test_events_and_state_tell_what_happened(tmp_path):
    world = World(tmp_path, processes=[Process("trainer", "trainer", ("train",), env={"SECRET": "hidden"})]).begin()
    world.place.end("trainer", signal=9)
    world.run(1.0)
    world.place.end("trainer", code=0)
    world.supervisor._end_all(world.run(1.0))
    kinds = [(event["event"], event.get("code"), event.get("signal")) for event in read_events(tmp_path / "events.jsonl")]
    assert kinds == [
        ("start", None, None),
        ("end", None, 9),
        ("restart", None, None),
        ("start", None, None),
        ("end", 0, None),
        ("end_of_launch", None, None),
    ]
    state = read_launch(tmp_path)
    assert state.exit_status == 0
    (process,) = state.processes
    assert (process.state, process.restarts, process.last_end["code"]) == ("ended", 1, 0)
    texts = [(tmp_path / name).read_text() for name in ("events.jsonl", "launch.json")]
    assert not any("hidden" in text for text in texts)
    assert json.loads(texts[1])["processes"][0]["log"] == "trainer.log"


def test_the_state_is_renewed_while_nothing_happens(world):
    first = read_launch(world.folder).beat
    (world.folder / "launch.json").unlink()
    world.run(5.2)
    assert read_launch(world.folder).beat >= first


def test_a_list_of_processes_is_checked(tmp_path):
    with pytest.raises(LaunchError, match="no process has the role trainer"):
        World(tmp_path, ACTORS)
    with pytest.raises(ConfigError, match="two processes have the name trainer"):
        World(tmp_path, [TRAINER, TRAINER])
    with pytest.raises(ConfigError, match="names the host of nobody"):
        World(tmp_path, [Process("trainer", "trainer", ("train", "{host:nobody}"))])
