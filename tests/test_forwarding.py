"""What an adapter reads of the object that it adapts."""

import pytest

from ludic.forwarding import forward_members


class Player:
    """Declares every member; `score` follows from another."""

    name = "nobody"
    points = 1

    @property
    def score(self):
        return 10 * self.points

    def move(self):
        return f"{self.name} waits"


@forward_members("inner", ["name", "points", "score", "move"])
class AdaptedPlayer(Player):
    def __init__(self, inner):
        self.inner = inner


def test_a_member_that_the_object_lacks_is_that_of_the_base_class():
    player = AdaptedPlayer(object())
    assert (player.name, player.points, player.score, player.move()) == ("nobody", 1, 10, "nobody waits")


def test_a_default_that_follows_from_another_member_follows_from_that_of_the_object():
    class Own:
        points = 3

    assert AdaptedPlayer(Own()).score == 30


def test_a_member_that_is_set_changed_or_deleted_later_is_seen():
    class Own:
        pass

    own = Own()
    player = AdaptedPlayer(own)
    own.name = "x"
    assert player.move() == "x waits"
    own.name = "o"
    assert player.name == "o"
    del own.name
    assert player.name == "nobody"


def test_a_subclass_of_the_adapter_overrides_a_member_and_keeps_the_others():
    class Named(AdaptedPlayer):
        name = "named"

    class Own:
        name, points = "own", 2

    assert (Named(Own()).name, Named(Own()).score) == ("named", 20)


def test_a_property_that_fails_is_no_missing_member():
    class Own:
        @property
        def points(self):
            return self.no_such_attribute

    with pytest.raises(AttributeError, match="no_such_attribute"):
        AdaptedPlayer(Own()).points  # noqa: B018
