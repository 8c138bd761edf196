"""Objects of the user: names from the command line, which are imported from packages and from files
of the current directory, and adapted objects."""

import sys

import pytest

from ludic.errors import ConfigError
from ludic.user_objects import forward_members, import_named


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory that is not on `sys.path`, as for an installed command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_of_the_current_directory_can_be_imported(here):
    (here / "own_rewards.py").write_text("def exact(): return 'own'\n")
    assert import_named("own_rewards:exact", "reward")() == "own"
    assert import_named("json:dumps", "reward")(1) == "1"


def test_a_file_can_import_its_neighbours_even_later(here):
    (here / "own_words.py").write_text("WORD = 'late'\n")
    (here / "own_late.py").write_text("def exact():\n    import own_words\n    return own_words.WORD\n")
    assert import_named("own_late:exact", "reward")() == "late"


def test_files_of_the_current_directory_do_not_shadow_packages_afterwards(here):
    (here / "own_alone.py").write_text("x = 1\n")
    import_named("own_alone:x", "reward")
    assert sys.path.index(str(here)) == len(sys.path) - 1


def test_an_error_inside_the_file_is_shown_with_its_line_and_not_as_a_wrong_name(here):
    for name, text, message in (
        ("own_syntax", "x = 1\ndef exact(:\n", r"SyntaxError: invalid syntax \(own_syntax\.py, line 2\)$"),
        ("own_zero", "x = 1\n1 / 0\n", rf"ZeroDivisionError: division by zero \({here}/own_zero\.py:2, in <module>\)$"),
        ("own_import", "import own_missing\n", rf"No module named 'own_missing' \({here}/own_import\.py:1, in <module>\)$"),
    ):
        (here / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=message):
            import_named(f"{name}:exact", "reward")
    with pytest.raises(ConfigError, match=r"own_nowhere'; write package\.module:name"):
        import_named("own_nowhere:exact", "reward")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rewards", r"reward \(rewards\) .*package\.module:name, .*rewards:exact"),
        (":exact", r"must be package\.module:name"),
        ("rewards:", r"must be package\.module:name"),
        ("rewards.py:exact", r"module and not its file, .*rewards:exact"),
        ("./my/rewards.py:exact", r"such as my\.rewards:exact"),
        ("own_nowhere:exact", r"reward \(own_nowhere:exact\) .*imported: .*'own_nowhere'"),
        ("own_broken:exact", r"cannot be imported: SyntaxError: .*own_broken\.py"),
        ("own_raising:exact", r"cannot be imported: ZeroDivisionError"),
        ("own_empty:exact", r"own_empty\.py has no 'exact'"),
    ],
)
def test_an_import_error_shows_its_cause(here, path, message):
    (here / "own_broken.py").write_text("def exact(:\n")
    (here / "own_raising.py").write_text("1 / 0\n")
    (here / "own_empty.py").write_text("")
    with pytest.raises(ConfigError, match=message):
        import_named(path, "reward")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_gradings:exact", r"write package\.module:name; did you mean own_grading\?$"),
        ("own_grading:exakt", r"own_grading\.py .*'exakt'; did you mean exact\?$"),
        ("own_grading:qqqq", r"has no 'qqqq'$"),
        ("zzzz:exact", r"write package\.module:name$"),
    ],
)
def test_a_misspelt_module_or_name_is_met_with_the_nearest(here, path, message):
    (here / "own_grading.py").write_text("def exact(completions):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=message):
        import_named(path, "reward")


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
