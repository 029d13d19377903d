"""A headless Chromium that tests talk to over a pipe, in the DevTools protocol: no driver and no package is needed."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZE = (1200, 900)


class Browser:
    """One tab. What goes wrong in its page, and what it asks the network for, is kept."""

    def __init__(self, profile: Path):
        # Above the numbers 3 and 4, which Chromium reads from and writes to.
        (commands, self._commands), (self._answers, answers) = (
            [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in os.pipe()] for _ in range(2)
        )
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += ["--no-first-run", f"--user-data-dir={profile}", "--window-size={},{}".format(*SIZE), "about:blank"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags],
            preexec_fn=lambda: (os.dup2(commands, 3), os.dup2(answers, 4)),
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._lines, self._number, self._session = b"", 0, None
        self.events: list[dict] = []
        (tab,) = [each for each in self("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self._session = self("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict:
        while b"\0" not in self._lines:
            part = os.read(self._answers, 2**20)
            assert part, "the browser has ended"
            self._lines += part
        line, _, self._lines = self._lines.partition(b"\0")
        return json.loads(line)

    def open(self, page: Path | str) -> None:
        """Show a file or an address, and wait until it is there."""
        self.events.clear()
        self("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """Return what an expression comes to in the page."""
        answer = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Return the errors of the page, among them what its policy forbade, and all that it tried to load."""
        reported = [each for each in self.events if each["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        fetched = [url for url in self.requests() if not url.startswith(("file:", "data:"))]
        return [json.dumps(event["params"]) for event in reported] + fetched

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        held = {"button": "left", "buttons": 1} if kind != "mouseReleased" and clicks else {"button": "left"}
        self("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=clicks, **(held if clicks else {}))

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, clicks=1)
        self("Input.dispatchMouseEvent", type="mouseMoved", x=end[0], y=end[1], button="left", buttons=1)
        self.mouse("mouseReleased", *end, clicks=1)

    def double_click(self, x: float, y: float) -> None:
        for clicks in (1, 2):
            self.mouse("mousePressed", x, y, clicks)
            self.mouse("mouseReleased", x, y, clicks)

    def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """Return what an expression comes to as soon as that is something."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"this did not come true: {script}"
            time.sleep(0.05)
        return found

    def requests(self) -> list[str]:
        """Return all that the page has asked for, from wherever."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        os.close(self._commands)
        self._process.terminate()
        self._process.wait()
        os.close(self._answers)
