"""A headless Chromium that a test drives over a pipe, by the DevTools protocol
(chromedevtools.github.io/devtools-protocol). It has no port and no network."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 120.0
"""For one answer, on a machine that is busy with other things."""
_FETCHED = Path(__file__).parents[2] / "target" / "chromium" / "chromium-headless-shell"
_VIRTUAL_KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
    "Tab": 9,
}


def find_chromium() -> str:
    """The path of the program that `.ci/get-chromium` prints. Skips the test without one."""
    named = os.environ.get("LUDIC_CHROMIUM") or (str(_FETCHED) if _FETCHED.exists() else shutil.which("chromium-headless-shell"))
    if not named:
        pytest.skip("no headless Chromium; .ci/get-chromium fetches one")
    return named


class Chromium:
    """One page. What it reported is in `problems`: exceptions, refusals of its security policy, and
    requests for anything but itself."""

    def __init__(self, *, width: int = 1400, height: int = 900) -> None:
        self._profile = tempfile.mkdtemp(prefix="ludic-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            *(find_chromium(), "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", f"--user-data-dir={self._profile}", f"--window-size={width},{height}", "about:blank"),
        ]
        self._process = subprocess.Popen(  # the protocol's pipes are descriptors 3 and 4
            ["/bin/bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', *command],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        self.url = ""
        self._site = ""
        page = next(target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises AssertionError for an error,
        TimeoutError without an answer."""
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **({"sessionId": self._session} if self._session else {}),
        }
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, scheme: str = "light") -> float:
        """Open a file and wait until its script has run to its end. Returns the seconds from the
        start of the navigation, as the page measured them."""
        self.url = path.resolve().as_uri()
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=self.url)
        self.wait_for("document.documentElement?.dataset.ready !== undefined")
        return float(self.evaluate("Number(document.documentElement.dataset.ready)")) / 1000

    def visit(self, site: str, page: str, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Open a page of a site, which may load everything below the address `site`, in a window
        of this size."""
        self.url, self._site = f"{site}/{page}", f"{site}/"
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=self.url)
        self.wait_for(f"location.href === {json.dumps(self.url)} && document.readyState === 'complete'")

    def wait_for(self, condition: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition} did not come true; the page reported {self.problems}")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. The page's own policy does not limit
        it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str) -> None:
        """Press and release a key."""
        known = {"windowsVirtualKeyCode": _VIRTUAL_KEYS[key]} if key in _VIRTUAL_KEYS else {"text": key}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **known)

    def screenshot(self, path: Path | None = None) -> bytes:
        image = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        if path is not None:
            path.write_bytes(image)
        return image

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], DEADLINE_S)[0]:
                raise TimeoutError("the browser did not answer")
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(event["exceptionDetails"].get("exception", event["exceptionDetails"]).get("description")))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {event['message']}")
        elif method == "Network.requestWillBeSent":
            url = event["request"]["url"].split("#")[0]
            is_own = url.startswith("data:") or bool(self._site and url.startswith(self._site))  # data: is in the page
            if url not in (self.url, "about:blank") and not is_own:
                self.problems.append(f"request: {url[:200]}")
