"""Which containers are removed, and what becomes of those that cannot be."""

import pytest
from hypothesis import given, strategies as st

from ludic.envs.code_exec.containers import Remover, this_process
from ludic.errors import GradingError

ENDED = f"{this_process().rsplit(' ', 2)[0]} {2**22 + 1} 5"


class Engine(Remover):
    """Containers by their names, with their owners. Those in `stuck` cannot be removed."""

    def __init__(self, owners, stuck=()):
        super().__init__()
        self.owners, self.stuck = dict(owners), set(stuck)

    def _list_owners(self):
        return dict(self.owners)

    def _remove(self, container):
        if container in self.stuck:
            raise GradingError(f"the container {container} could not be removed")
        self.owners.pop(container, None)


def test_a_container_that_could_not_be_removed_is_tried_again():
    engine = Engine({"one": this_process(), "two": this_process()}, stuck=["one"])
    with pytest.raises(GradingError, match="the container one could not be removed"):
        engine.remove("one")
    assert engine.failed == {"one"}
    engine.remove_leftovers()
    assert (set(engine.owners), engine.failed) == ({"one", "two"}, {"one"})
    engine.stuck.clear()
    engine.remove_leftovers()
    assert (set(engine.owners), engine.failed) == ({"two"}, set())  # two is in use


def test_a_container_that_went_by_itself_is_forgotten():
    engine = Engine({"one": this_process()}, stuck=["one"])
    with pytest.raises(GradingError):
        engine.remove("one")
    engine.owners.clear()
    engine.remove_leftovers()
    assert engine.failed == set()


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=6))
def test_what_is_left_is_what_is_in_use_or_stuck(containers):
    """Each container: (has its process ended, did its removal fail before, is it stuck)."""
    engine = Engine({name: ENDED if ended else this_process() for name, (ended, _, _) in containers.items()})
    engine.stuck = set(containers)
    for name in (name for name, (_, failed, _) in containers.items() if failed):
        with pytest.raises(GradingError):
            engine.remove(name)
    engine.stuck = {name for name, (_, _, stuck) in containers.items() if stuck}
    engine.remove_leftovers()
    assert set(engine.owners) == {name for name, (ended, failed, stuck) in containers.items() if stuck or not (ended or failed)}
    assert engine.failed == {name for name, (ended, failed, stuck) in containers.items() if stuck and (ended or failed)}
