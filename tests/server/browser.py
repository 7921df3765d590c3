"""A real Chromium for tests, driven by its DevTools protocol over aiohttp's websocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.fixtures.waiting import PATIENCE

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
WAIT = PATIENCE


class Page:
    """One tab. Coordinates are CSS pixels."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []  # addresses the page asked for
        self.problems: list[str] = []  # exceptions, console errors, breaches of the policy
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        coming = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(coming, WAIT)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """Of JavaScript; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        deadline = time.monotonic() + WAIT
        while not await self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            await asyncio.sleep(0.02)

    async def click(self, selector: str) -> None:
        """In its middle, as a user does: what covers it gets the click."""
        place = await self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView"
            "({block: 'nearest'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, **at)

    async def write(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        event |= {"modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def resize(self, width: int, height: int, phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip

    async def prefer(self, theme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path) -> bytes:
        """What is seen, as a PNG file, and a tenth of its size as a PNG to count in."""
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))
        size = await self.value("[innerWidth, innerHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 0.1}
        answer = await self.call("Page.captureScreenshot", format="png", clip=clip)
        return base64.b64decode(answer["data"])

    async def still(self) -> None:
        """Waits until what is moved by a click has come to its place."""
        await self.until(
            "document.getAnimations().every((a) => a.effect.getTiming().iterations === Infinity)"
        )

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                self.problems.append(str(event["params"]["entry"]["text"]))


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A tab of a fresh Chromium."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        flags = ["--headless=new", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        if os.geteuid() == 0:  # its sandbox does not run as root
            flags.append("--no-sandbox")
        process = subprocess.Popen(
            [CHROMIUM, *flags, "--disable-dev-shm-usage", "--hide-scrollbars",
             f"--user-data-dir={directory}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(directory) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                target = next(tab for tab in tabs if tab["type"] == "page")
                url = target["webSocketDebuggerUrl"]
                page = Page(await session.ws_connect(url, max_msg_size=0))
                try:
                    await page.start()
                    yield page
                finally:
                    await page.close()
        finally:
            process.terminate()
            process.wait(WAIT)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + WAIT
    while not (file.exists() and file.read_text().strip()):
        assert process.poll() is None, f"{CHROMIUM} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{CHROMIUM} opened no port"
        await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
