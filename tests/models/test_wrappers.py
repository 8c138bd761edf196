import pytest
from torch import nn

from ludic.models.wrappers import evaluation_mode


def modes(model):
    return [module.training for module in model.modules()]


def model_with_a_frozen_part():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), nn.Dropout())
    model.train()
    model[1].requires_grad_(False).eval()
    return model


def test_inside_every_module_is_in_evaluation_mode():
    model = model_with_a_frozen_part()
    with evaluation_mode(model):
        assert not any(modes(model))


def test_afterwards_each_module_has_its_previous_mode():
    model = model_with_a_frozen_part()
    before = modes(model)
    assert before == [True, True, False, False, False, True]
    with evaluation_mode(model):
        pass
    assert modes(model) == before


def test_the_modes_are_restored_after_an_error():
    model = model_with_a_frozen_part()
    before = modes(model)
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        raise ZeroDivisionError
    assert modes(model) == before
