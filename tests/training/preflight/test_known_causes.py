import pytest

from ludic.training.preflight import causes

FACTS = {
    "configured": 0.7,
    "drawn": 0.5,
    "top_p": 0.9,
    "temperature": 1.0,
    "where": "after",
    "by": -1,
    "way": "one line for each message",
    "at": 3,
    "count": 2,
    "total": 80,
    "prompt": "{user}",
    "expected": "<|user|>",
}
CAUSES = {name: cause for name, cause in vars(causes).items() if isinstance(cause, causes.Cause)}


@pytest.mark.parametrize("name", CAUSES)
def test_every_cause_has_a_name_a_reason_and_a_remedy_without_placeholders(name):
    cause = CAUSES[name](**FACTS)
    for text in (cause.name, cause.description, cause.remedy):
        assert text
        assert "{" not in text.replace("{user}", "")


def test_the_texts_contain_the_measured_values():
    assert causes.SHIFTED_IDS(by=1).name == "completion ids +1"
    assert causes.OTHER_TEMPERATURE(drawn=0.5, configured=1.0).remedy == "set TrainerConfig.temperature to 0.5"
    assert "at character 3 they have '{user}'" in causes.OTHER_TEMPLATE(at=3, prompt="{user}", expected="x").description


def test_long_names_fit_into_the_table():
    assert len(causes.OTHER_PROMPT_FITS(way="the chat template without its generation prompt and more").name) == 57
