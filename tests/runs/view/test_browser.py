"""The page of `ludic view` in a real browser: what a reader sees, and that nothing in the texts of
a model is ever run."""

import json
import time

import numpy as np
import pytest
from chromium import Chromium
from image_spans import parts
from run_folders import log_rollouts, make_rollout, make_run

from ludic.images.store import ImageStore
from ludic.runs.directory import RMDirectory
from ludic.runs.reading import read_run
from ludic.runs.report.scores import encode_scores
from ludic.runs.view.page import build_page
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.rollouts.episodes import EpisodeFailure
from ludic.training.rollouts.log import append_failures

pytestmark = pytest.mark.integration

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload=window.hacked=1><iframe srcdoc='<script>parent.hacked = 1</script>'></iframe></svg>",
    "<a href='javascript:window.hacked=1'>click</a><!-- <script>",
    "<style>body{display:none}</style>{{SCRIPT}}${window.hacked=1}\u2028window.hacked=1",
    "<meta http-equiv=refresh content='0;url=http://example.invalid/'><base href='http://example.invalid/'>",
    "<img src='http://example.invalid/pixel.png'><link rel=stylesheet href='http://example.invalid/a.css'>",
]


@pytest.fixture(scope="module")
def chromium():
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    chromium.problems.clear()
    yield chromium
    assert chromium.problems == []


def show(browser, tmp_path, *runs, **options):
    page = tmp_path / "report.html"
    page.write_text(build_page([read_run(run) for run in runs], episodes=100_000), encoding="utf-8")
    browser.open(page, **options)
    return page


def rows(browser):
    return browser.evaluate("document.querySelectorAll('.row').length")


def test_hostile_texts_are_shown_and_never_run(browser, tmp_path):
    run = make_run(tmp_path / "<img src=x onerror=window.hacked=1>")
    log_rollouts(run, [make_rollout(number, prompt=text, answer=text, group=text) for number, text in enumerate(HOSTILE)])
    show(browser, tmp_path, run)
    for number, text in enumerate(HOSTILE):
        browser.evaluate(f"document.querySelectorAll('.row')[{number}].click()")
        shown = browser.evaluate("[...document.querySelectorAll('.detail .text')].map((node) => node.textContent)")
        assert shown == [text, text]
    assert browser.evaluate("window.hacked") is None
    assert (
        browser.evaluate(
            "document.querySelectorAll('.detail img, .detail script, .detail a, .detail iframe, iframe, img, base').length"
        )
        == 0
    )
    assert browser.evaluate("document.querySelectorAll('script').length") == 2


def test_the_policy_refuses_a_script_that_gets_into_the_page(browser, tmp_path):
    """If the escape failed, the browser itself would not run it."""
    show(browser, tmp_path, make_run(tmp_path / "run"))
    browser.evaluate(
        """(() => {
          const script = document.createElement('script');
          script.textContent = 'window.hacked = 1';
          document.body.append(script);
          const image = document.createElement('div');
          image.innerHTML = "<img src=x onerror='window.hacked = 1'>";
          document.body.append(image);
        })()"""
    )
    time.sleep(0.2)
    assert browser.evaluate("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in browser.problems)
    browser.problems.clear()


def test_ten_thousand_episodes_are_a_list_of_few_elements_that_reaches_the_last(browser, tmp_path):
    run = make_run(tmp_path / "run")
    log_rollouts(
        run,
        [make_rollout(n, prompt=f"{n}+1=", answer=f"{n + 1}", reward=float(n % 2), group=f"g{n // 8}") for n in range(10_000)],
    )
    show(browser, tmp_path, run)
    assert "10,000 of 10,000 episodes" in browser.text("#episodes")
    assert 10 < rows(browser) < 60
    browser.evaluate("document.querySelector('.list').focus()")
    browser.press("End")
    assert "9999+1=" in browser.text(".detail")
    assert browser.text(".row[aria-selected=true] .what") == "9999+1= → 10000"
    assert rows(browser) < 60
    browser.press("ArrowUp")
    assert "9998+1=" in browser.text(".detail")
    browser.press("Home")
    assert browser.text(".detail .text") == "0+1="


def test_failed_episodes_are_found_by_filter_search_and_order(browser, tmp_path):
    run = make_run(tmp_path / "run")
    rollouts = [make_rollout(n, answer=f"answer{n}") for n in range(50)]
    rollouts[17] = make_rollout(17, answer="wrong", reward=0.0)
    rollouts[31] = make_rollout(31, answer="endless", reward=1.0, finish="length")
    log_rollouts(run, rollouts)
    show(browser, tmp_path, run)
    choose(browser, "filter", "failed")
    assert browser.evaluate("[...document.querySelectorAll('.row .what')].map((node) => node.textContent)") == [
        "2+2= → wrong",
        "2+2= → endless",
    ]
    assert browser.text(".row:nth-child(2) .flag") == "cut off"
    choose(browser, "filter", "all")
    choose(browser, "order", "low")
    assert "wrong" in browser.text(".row")
    browser.evaluate("document.activeElement.blur()")
    browser.press("/")
    for letter in "answer42":
        browser.press(letter)
    assert "1 of 50 episodes" in browser.text("#episodes")
    assert browser.text(".detail .answer") == "answer42"


def choose(browser, label, value):
    browser.evaluate(
        f"(() => {{ const node = document.querySelector('select[aria-label=\"{label}\"]'); node.value = '{value}';"
        "node.dispatchEvent(new Event('change')); })()"
    )


def test_tokens_are_coloured_by_log_probability_and_by_advantage(browser, tmp_path):
    """A token of -0.5 nats is of shade floor(0.5 * 1.6) = 0, one of -3 of floor(4.8) = 4; an
    advantage of 0.5 is of the first shade of those above 0."""
    run = make_run(tmp_path / "run")
    rollout = make_rollout(0, answer="ab")
    rollout.steps[0].trace.completion_logprobs[1] = -3.0
    log_rollouts(run, [rollout])
    (run / "model").mkdir()
    save_byte_tokenizer(run / "model")
    show(browser, tmp_path, run)
    classes = "[...document.querySelectorAll('.token')].map((node) => node.className.trim())"
    assert browser.evaluate(classes) == ["token s0", "token s4"]
    browser.evaluate("document.querySelectorAll('.token')[1].dispatchEvent(new MouseEvent('mouseenter'))")
    assert browser.text("#episodes > .readout") == '"b" log-probability -3.00, probability 5.0 %'
    choose(browser, "colour of tokens", "credit")
    assert browser.evaluate(classes) == ["token p1", "token p1"]


def test_tokens_are_coloured_by_mismatch_and_the_largest_is_found_first(browser, tmp_path):
    """Differences of 0, -0.125 and 2 nats: none, the third shade below 0 and the fourth above."""
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(n, answer="abc") for n in range(3)])
    line = {"id": "r2", "step": 0, "skipped": 0, "logps": [-0.5, -0.625, 1.5]}
    (run / "token_logps.jsonl").write_text(json.dumps(line) + "\n")
    (run / "model").mkdir()
    save_byte_tokenizer(run / "model")
    show(browser, tmp_path, run)
    choose(browser, "order", "mismatch")
    browser.evaluate("document.querySelector('.row').click()")
    choose(browser, "colour of tokens", "mismatch")
    classes = "[...document.querySelectorAll('.token')].map((node) => node.className.trim())"
    assert browser.evaluate(classes) == ["token", "token n3", "token p4"]
    assert "largest mismatch 2" in browser.text(".detail")
    browser.evaluate("document.querySelectorAll('.token')[1].dispatchEvent(new MouseEvent('mouseenter'))")
    assert browser.text("#episodes > .readout").endswith("trainer minus sampler -0.125")


def test_an_episode_that_an_error_ended_is_found_and_says_it(browser, tmp_path):
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(n, group="g") for n in range(5)])
    failures = [
        EpisodeFailure(7, "task", None, f"KeyError: {HOSTILE[1]}", 2, {"problem_id": "p7"}, "2+2=", HOSTILE[0]),
        EpisodeFailure(8, "task", None, "TimeoutError: 5 s", 2, {}),
    ]
    append_failures(run / "failed_episodes.jsonl", failures)
    show(browser, tmp_path, run)
    assert "7 of 7 episodes" in browser.text("#episodes")
    choose(browser, "filter", "error")
    assert rows(browser) == 2
    assert browser.text(".row .flag") == "error"
    assert browser.text(".detail .error") == f"KeyError: {HOSTILE[1]}"
    assert browser.text(".detail .answer") == HOSTILE[0]
    assert "null" not in browser.text(".detail")
    for order in ("low", "high", "surprise", "mismatch", "long"):
        choose(browser, "order", order)
        assert rows(browser) == 2
    browser.evaluate("document.querySelectorAll('.row')[1].click()")
    assert browser.evaluate("window.hacked") is None
    choose(browser, "filter", "failed")
    assert rows(browser) == 2
    choose(browser, "filter", "wrong")
    assert rows(browser) == 0


def save_byte_tokenizer(folder):
    """Token n is the character n, as `make_rollout` has it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({chr(n): n for n in range(128)}, unk_token="a"))
    ).save_pretrained(folder)


def test_curves_are_read_by_keys_hidden_by_run_and_drawn_on_a_log_axis(browser, tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", lr=0.2)
    show(browser, tmp_path, one, two)
    chart = "document.querySelectorAll('.chart')[1]"  # train/loss: 1, 1/2, 1/3, 1/4
    assert browser.evaluate(f"{chart}.querySelector('select').value") == "train/loss"
    assert browser.evaluate(f"{chart}.querySelectorAll('path.curve').length") == 2
    browser.evaluate(f"{chart}.querySelector('.plot').focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    readout = f"{chart}.querySelector('.readout').innerText"
    assert browser.evaluate(readout).split() == ["step", "2", "one", "0.5", "two", "0.5"]
    path = browser.evaluate(f"{chart}.querySelector('path.curve').getAttribute('d')")
    browser.evaluate("document.querySelector('#curves input[type=checkbox]').click()")
    assert browser.evaluate(f"{chart}.querySelector('path.curve').getAttribute('d')") != path
    browser.evaluate("document.querySelectorAll('.runs input')[1].click()")
    assert browser.evaluate(f"{chart}.querySelectorAll('path.curve').length") == 1


def test_smoothing_is_an_exponential_mean_without_bias(browser, tmp_path):
    """Of 1, 1/2, 1/3 with weight 1/2: at step 2 (1/2 * 1 + 1/2) / (3/2) = 2/3, as sum / norm."""
    run = make_run(tmp_path / "run")
    show(browser, tmp_path, run)
    browser.evaluate(
        "(() => { const node = document.querySelector('input[type=range]'); node.value = 0.5; node.dispatchEvent(new Event('input')); })()"
    )
    browser.evaluate("document.querySelectorAll('.plot')[1].focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    assert "(smoothed 0.6667)" in browser.evaluate("document.querySelectorAll('.chart .readout')[1].innerText")


def test_settings_show_what_differs_and_all_on_request(browser, tmp_path):
    show(browser, tmp_path, make_run(tmp_path / "one"), make_run(tmp_path / "two", lr=0.2))
    names = "[...document.querySelectorAll('#settings tbody th')].map((node) => node.textContent)"
    assert browser.evaluate(names) == ["≠ trainer.lr"]
    browser.evaluate("document.querySelector('#settings input').click()")
    assert len(browser.evaluate(names)) == 7
    assert browser.evaluate("document.querySelectorAll('#settings tr.differs').length") == 1
    assert "0.7 to 0.8" in browser.text("#heldout")


def test_a_reward_model_has_its_margins_and_calibration(browser, tmp_path):
    run = make_run(tmp_path / "rm", command="train-rm")
    metrics = PreferenceMetrics()
    metrics.update([2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0])
    RMDirectory(run).scores.write_text(encode_scores(metrics))
    show(browser, tmp_path, run)
    assert browser.evaluate("document.querySelectorAll('#preferences circle').length") == 3  # p = .88, .27, .73
    assert "Median 1; 33.33 % are negative" in browser.text("#preferences")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_painted_in_both_schemes(browser, tmp_path, scheme):
    run = make_run(tmp_path / "run")
    log_rollouts(run, [make_rollout(0)])
    show(browser, tmp_path, run, scheme=scheme)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert len(browser.screenshot()) > 10_000  # an empty page compresses to less


def test_a_run_that_diverged_and_tokens_without_log_probabilities_are_shown(browser, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text('{"before": {"loss": 2.5}, "after": {"loss": NaN}}')
    log_rollouts(run, [make_rollout(0, answer="abc")])
    log = run / "rollouts.jsonl"
    log.write_text(log.read_text().replace("[-0.5,-0.5,-0.5]", "null"))
    assert "-0.5,-0.5" not in log.read_text()
    monkeypatch.setattr("ludic.runs.view.page.find_decoder", lambda run: chr)
    show(browser, tmp_path, run)
    assert "3 t" in browser.text(".row")
    assert browser.evaluate("document.querySelectorAll('#heldout circle').length") == 1  # of before; nan has no place


def test_a_thumbnail_follows_the_words_for_an_image(browser, tmp_path):
    run = make_run(tmp_path / "run")
    store = ImageStore(run / "images")
    digests = [store.add(np.full((16, 24, 3), value, dtype=np.uint8)) for value in (0, 255)]
    log_rollouts(
        run, [make_rollout(number, prompt=parts("Look: ", digest, "How many?")) for number, digest in enumerate(digests)]
    )
    show(browser, tmp_path, run)
    words = f"[image 24x16 {digests[0][:8]}...]"
    browser.wait_for("document.querySelector('.detail .text img').complete")
    assert browser.evaluate("document.querySelector('.detail .text img').alt") == words
    assert browser.evaluate("document.querySelector('.detail .text img').naturalWidth") == 24
    assert browser.evaluate("document.querySelector('.detail .text').textContent") == "Look: How many?"
    assert browser.evaluate("document.querySelectorAll('.detail img').length") == 1
