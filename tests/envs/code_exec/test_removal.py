"""Which containers are removed, and what becomes of those that cannot be."""

import pytest
from hypothesis import given, strategies as st

from ludic.envs.code_exec.containers import Remover, this_process
from ludic.errors import GradingError

ENDED = f"{this_process().rsplit(' ', 2)[0]} {2**22 + 1} 5"


class Engine:
    """Containers by their names, with their owners. Those in `stuck` cannot be removed."""

    def __init__(self, owners, stuck=()):
        self.owners, self.stuck = dict(owners), set(stuck)

    def list_owners(self):
        return dict(self.owners)

    def remove(self, container):
        if container in self.stuck:
            raise GradingError(f"the container {container} could not be removed")
        self.owners.pop(container, None)


def test_a_container_that_could_not_be_removed_is_tried_again():
    engine = Engine({"one": this_process(), "two": this_process()}, stuck=["one"])
    remover = Remover(engine)
    with pytest.raises(GradingError, match="the container one could not be removed"):
        remover.remove("one")
    assert remover.failed == {"one"}
    remover.remove_leftovers()
    assert (set(engine.owners), remover.failed) == ({"one", "two"}, {"one"})
    engine.stuck.clear()
    remover.remove_leftovers()
    assert (set(engine.owners), remover.failed) == ({"two"}, set())  # two is in use


def test_a_container_that_went_by_itself_is_forgotten():
    engine = Engine({"one": this_process()}, stuck=["one"])
    remover = Remover(engine)
    with pytest.raises(GradingError):
        remover.remove("one")
    engine.owners.clear()
    remover.remove_leftovers()
    assert remover.failed == set()


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=6))
def test_what_is_left_is_what_is_in_use_or_stuck(containers):
    """Each container: (has its process ended, did its removal fail before, is it stuck)."""
    engine = Engine({name: ENDED if ended else this_process() for name, (ended, _, _) in containers.items()})
    remover = Remover(engine)
    engine.stuck = set(containers)
    for name in (name for name, (_, failed, _) in containers.items() if failed):
        with pytest.raises(GradingError):
            remover.remove(name)
    engine.stuck = {name for name, (_, _, stuck) in containers.items() if stuck}
    remover.remove_leftovers()
    assert set(engine.owners) == {name for name, (ended, failed, stuck) in containers.items() if stuck or not (ended or failed)}
    assert remover.failed == {name for name, (ended, failed, stuck) in containers.items() if stuck and (ended or failed)}
