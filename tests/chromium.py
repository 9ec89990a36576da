"""Chromium without a window, driven over its DevTools protocol, as a user would."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, Self

from websockets.sync.client import connect

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60.0  # that an answer of it may take
_HEARD = {"Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Network.requestWillBeSent", "Log.entryAdded"}


class Browser:
    """One page of a new profile. ``requests``: the URLs it asked for; ``faults``: dialogs, exceptions and errors."""

    def __init__(self, profile: Path) -> None:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
        self._process = subprocess.Popen(
            [str(PROGRAM), *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.requests, self.faults = list[str](), list[str]()
        self._numbers, self._session, self._open = itertools.count(1), "", ExitStack()

    def __enter__(self) -> Self:
        for line in self._process.stderr or ():
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                break
        Thread(target=deque, args=(self._process.stderr, 0), daemon=True).start()  # a full pipe would stop it
        self._stream = self._open.enter_context(connect(found[1], max_size=None, proxy=None))
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(SECONDS)

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        """The answer to one command; what the page did meanwhile is kept."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        self._stream.send(json.dumps(command | ({"sessionId": self._session} if self._session else {})))
        end = time.monotonic() + SECONDS
        while (said := json.loads(self._stream.recv(end - time.monotonic()))).get("id") != number:
            self._heard(said)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']['message']}")
        result: dict[str, Any] = said["result"]
        return result

    def _heard(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Network.requestWillBeSent":
            self.requests.append(said["params"]["request"]["url"])
        elif said.get("method") in _HEARD:
            self.faults.append(json.dumps(said["params"])[:500])

    def show(self, url: str, width: int, height: int) -> None:
        """Load a page in a window of this size, a phone's below 600 pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript, awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until it holds in the page, or in the one that follows it. Raises TimeoutError."""
        look = f"const look = () => ({condition}) ? resolve(true) : setTimeout(look, 20)"
        while True:
            try:
                self.value(f"new Promise((resolve) => {{ {look}; look(); }})")
                return
            except RuntimeError as error:
                if "navigated" not in str(error):
                    raise

    def image(self, path: Path) -> None:
        """Write what the window shows."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))
