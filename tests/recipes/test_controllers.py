import pytest

from ludic.errors import ConfigError
from ludic.recipes.build import build_controllers
from ludic.recipes.sections import ControllersSection
from ludic.training import make_grpo
from ludic.training.controllers import EntropyController, KLController, MetaController
from ludic.training.presets import make_maxent_grpo


def section(**settings):
    """A section with dotted settings: `kl__target=0.1`."""
    made = ControllersSection()
    for name, value in settings.items():
        part, _, field = name.partition("__")
        setattr(getattr(made, part), field, value)
    return made


def build(algorithm=None, **settings):
    algorithm = make_maxent_grpo(group_size=8, beta=0.1) if algorithm is None else algorithm
    return algorithm, build_controllers(section(**settings), algorithm, group_size=8)


def test_by_default_there_are_none():
    assert build()[1] == []
    assert build(kl__target=0.1)[1] == []
    assert build(entropy__target=1.0)[1] == []


def test_the_laws_set_the_coefficients_of_the_algorithm():
    algorithm, (kl, entropy) = build(
        kl__target=0.1, kl__horizon=50, entropy__start=1.0, entropy__final=2.0, entropy__horizon=10, entropy__lr=0.1
    )
    assert isinstance(kl, KLController)
    assert isinstance(entropy, EntropyController)
    assert kl.coefficients["beta"] is algorithm.coefficients["beta"]
    assert entropy.coefficients["tau"] is algorithm.coefficients["tau"]
    assert entropy.entropy_target.at(5) == 1.5


def test_grpo_with_a_reference_has_a_kl_controller():
    algorithm, [kl] = build(make_grpo(group_size=8, reference_kl=0.2), kl__target=0.1, kl__horizon=50)
    assert kl.coefficients["beta"] is algorithm.coefficients["beta"]


def test_the_meta_controller_replaces_both_and_has_their_targets():
    algorithm, [meta] = build(
        meta__method="first_order",
        meta__lr=0.02,
        kl__target=0.1,
        kl__horizon=50,
        entropy__target=1.5,
        entropy__lr=0.1,
        entropy__most=2.0,
    )
    assert isinstance(meta, MetaController)
    assert dict(meta.coefficients) == dict(algorithm.coefficients)
    assert meta.kl_target == 0.1
    assert meta.entropy_target.at(0) == 1.5


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        (
            make_maxent_grpo(group_size=8),
            {"kl__target": 0.1, "kl__horizon": 9},
            "controllers.kl controls beta, which maxent_grpo does not",
        ),
        (
            make_grpo(group_size=8, reference_kl=0.1),
            {"entropy__target": 1.0, "entropy__lr": 0.1},
            "belongs to algorithm=maxent_grpo",
        ),
        (None, {"entropy__target": 2.1, "entropy__lr": 0.1}, r"target \(2\.1\) .*group_size"),
        (None, {"meta__method": "analytic", "meta__lr": 0.1}, "needs controllers.entropy.target"),
        (None, {"meta__method": "magic", "kl__target": 0.1, "meta__lr": 0.1}, "must be one of analytic"),
    ],
)
def test_what_does_not_fit_is_named(algorithm, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(algorithm, **settings)
