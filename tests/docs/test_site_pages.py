"""Each page of the site as a browser shows it: `make site`, then this."""

import contextlib
import functools
import http.server
import threading
from pathlib import Path

import pytest
from chromium import Chromium

SITE = Path(__file__).parents[2] / "target" / "site"
DESKTOP, PHONE = 1280, 390

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not SITE.is_dir(), reason="`make site` builds it")]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing for each request."""


@pytest.fixture(scope="module")
def site():
    """The address of a server of the site, on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with contextlib.closing(Chromium()) as opened:
        yield opened


def pages():
    return sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))


LOOK = """(() => {
  const article = document.querySelector('article');
  const shown = (node) => node.getClientRects().length > 0;
  const text = [...article.querySelectorAll('p, li, td')].map((node) => node.innerText).join('\\n');
  return {
    heading: [...article.querySelectorAll('h1')].filter(shown).map((node) => node.firstChild.textContent.trim()),
    fences: text.includes('```'),
    code: [...article.querySelectorAll('pre > code')].filter((node) => node.innerText.trim() === '').length,
    hidden: [...article.querySelectorAll('pre > code')].filter((node) => node.scrollWidth > node.clientWidth + 1).length,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    pictures: [...document.images].filter((image) => !(image.complete && image.naturalWidth > 0)).map((image) => image.src),
    background: getComputedStyle(document.body).backgroundColor,
  };
})()"""


@pytest.mark.parametrize(("width", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")])
def test_each_page_shows_its_heading_code_and_pictures_within_the_window(site, browser, width, scheme):
    assert len(pages()) > 50
    faults = {}
    for page in pages():
        browser.visit(site, page, width=width, scheme=scheme)
        look = browser.evaluate(LOOK)
        expected = {
            "heading": look["heading"][:1],
            "fences": False,
            "code": 0,
            "hidden": 0 if width == PHONE else look["hidden"],
            "wide": 0,
            "pictures": [],
            "background": "rgb(255, 255, 255)" if scheme == "light" else look["background"],
        }
        wrong = {name: look[name] for name in look if look[name] != expected[name]}
        if wrong or not look["heading"] or (scheme == "dark" and look["background"] == "rgb(255, 255, 255)"):
            faults[page] = wrong or look
    assert faults == {}
    assert browser.problems == []


def test_the_first_screen_says_what_it_is_with_a_command_and_its_picture(site, browser):
    browser.visit(site, "index.html", width=DESKTOP, height=900)
    lowest = {
        selector: browser.evaluate(f"document.querySelector({selector!r}).getBoundingClientRect().top")
        for selector in ("article h1", "article p", "article pre", "article img[src$='dashboard.svg']", ".md-search__input")
    }
    assert {selector for selector, top in lowest.items() if top > 700} == set()
    assert "post-training language models" in browser.text("article p")
    assert "make train" in browser.text("article pre")
    assert len(browser.screenshot()) > 20_000


def test_the_search_finds_a_setting(site, browser):
    browser.visit(site, "index.html", width=DESKTOP)
    browser.evaluate("document.querySelector('.md-search__input').focus()")
    for key in "temperature":
        browser.press(key)
    browser.wait_for("document.querySelectorAll('.md-search-result__link').length > 0")
    assert "temperature" in browser.text(".md-search-result__list").lower()
