"""The chat page: what is served, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from octavo.server.page import FILES, PAGE_PATHS
from tests.server import mock_server
from tests.server.browser import CHROMIUM, Page, browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


# ---- what is served ----


def test_the_page_is_public_and_nothing_else_became_so():
    with mock_server.start(server={"api_key": ["k"]}) as server:
        for path in PAGE_PATHS:
            answer = server.client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = server.client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert server.client.get("/").headers["content-type"].startswith("text/html")
        for path in (
            "/pages/",
            "/pages/x.js",
            "/pages/index.html",
            "/pages/../auth.py",
            "/v1/models",
        ):
            assert server.client.get(path).status_code == 401, path
        server.client.headers["authorization"] = "Bearer k"
        assert server.client.get("/pages/x.js").status_code == 404
        assert server.client.post("/").status_code == 405
        assert "/" not in server.client.get("/openapi.json").json()["paths"]


def test_the_page_asks_for_nothing_outside():
    """No address but its own files' in the sources: the snippets' come from the page's own."""
    for path in FILES.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|@import|innerHTML|outerHTML|eval\(", text), path
        assert " style=" not in text and " onclick=" not in text
    page = (FILES / "index.html").read_text()
    linked = set(re.findall(r'(?:href|src)="(pages/[^"]+)"', page))
    assert {f"/{name}" for name in linked} <= PAGE_PATHS


def test_behind_a_path_prefix_the_page_finds_its_files():
    with mock_server.start(server={"root_path": "/llm/"}) as server:
        for path in ("/", "/llm/"):
            assert '<base href="/llm/">' in server.client.get(path).text
        assert server.client.get("/llm/pages/chat.js").status_code == 200


def test_the_files_are_in_the_wheel(tmp_path):
    """As setuptools collects them."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "octavo/server", tmp_path / "octavo/server")
    (tmp_path / "octavo/__init__.py").write_text("")
    shutil.copy(root / "pyproject.toml", tmp_path)
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("x")
    code = "from setuptools import setup; setup(script_args=['-q', 'build_py', '-d', 'out'])"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    built = {path.name for path in (tmp_path / "out/octavo/server/pages").iterdir()}
    assert built == {path.name for path in FILES.iterdir()}


# ---- in a browser ----


def visit(server, script, path="/"):
    """Runs ``script(page)`` on the opened page; nothing may have gone wrong in it."""

    async def run() -> None:
        async with browser() as page:
            await page.resize(1200, 800)
            await page.open(f"{server.url}{path}")
            await script(page)
            assert page.problems == []
            assert all(url.startswith(server.url) for url in page.requests), page.requests

    asyncio.run(run())


async def ready(page: Page) -> None:
    await page.until("document.getElementById('light').dataset.state === 'ready'")


async def send(page: Page, text: str) -> None:
    await page.value("document.getElementById('prompt').focus()")
    await page.write(text)
    await page.press("Enter")


ANSWERS = "[...document.querySelectorAll('.assistant')]"
DONE = "document.getElementById('stop').hidden && document.querySelectorAll('.fact').length"


async def texts(page: Page) -> list[str]:
    return await page.value(f"{ANSWERS}.map((a) => a.querySelector('.body').textContent)")


@pytest.fixture(scope="module")
def slow_server():
    """One token each 20 ms."""
    with mock_server.start(engine={"step_seconds": 0.02}) as server:
        yield server


@pytest.mark.slow
@in_browser
def test_types_streams_and_stops(slow_server, tmp_path):
    async def script(page: Page) -> None:
        await ready(page)
        assert await page.value("document.activeElement.id") == "prompt"
        assert await page.value("document.getElementById('send').disabled")
        await page.write("first line")
        await page.press("Enter", shift=True)
        await page.write("second, endless")
        await page.press("Enter")
        body = f"{ANSWERS}[0].querySelector('.body').textContent"
        await page.until(f"{body}.length > 5")
        early = await page.value(body)
        streaming = await page.picture(tmp_path / "streaming.png")
        await page.until(f"{body}.length > {len(early)} + 5")
        assert await page.value("document.getElementById('send').hidden")
        await page.click("#stop")
        await page.until(DONE)
        said = await page.value(body)
        assert said.startswith(early) and "abcdefghij".startswith(said[:10])
        facts = await page.value("[...document.querySelectorAll('.fact')].map(f => f.textContent)")
        assert facts[-1] == "stopped" and facts[0].startswith("first token")
        await asyncio.sleep(0.1)
        assert await page.value(body) == said
        slow_server.wait_idle()
        user = await page.value("document.querySelector('.user .text').textContent")
        assert user == "first line\nsecond, endless"
        stopped = await page.picture(tmp_path / "stopped.png")
        assert colours(streaming) > 20 and streaming != stopped
        await send(page, "more, endless")
        await page.until(f"{ANSWERS}.length === 2 && {ANSWERS}[1].textContent.length > 20")
        await page.press("Escape")
        await page.until(DONE)

    visit(slow_server, script)


@pytest.mark.slow
@in_browser
def test_settings_reach_the_request_and_figures_come_back(server):
    async def script(page: Page) -> None:
        await ready(page)
        await page.click("#open-settings")
        await page.value("document.getElementById('system').focus()")
        await page.write("Be brief.")
        for name, value in (("temperature", "0.5"), ("max_tokens", "4"), ("top_k", "7")):
            await page.value(f"document.querySelector('[data-field={name}]').focus()")
            await page.write(value)
        await page.press("Escape")
        await page.value("document.getElementById('model').value = 'alias'")
        await send(page, "say:hello it's me")
        await page.until(DONE)
        assert await texts(page) == ["hell"]
        facts = await page.value("[...document.querySelectorAll('.fact')].map(f => f.textContent)")
        assert re.fullmatch(r"first token \d+ ms", facts[0])
        assert re.fullmatch(r"[\d.]+ tokens/s", facts[1])
        assert facts[2:] == ["4 tokens", "cut at the token limit"]
        await page.value("document.getElementById('prompt').focus()")
        await page.write("say:it's")
        await page.click("#open-request")
        curl = await page.value("document.getElementById('curl').textContent")
        python = await page.value("document.getElementById('python').textContent")
        expected = {
            "model": "alias",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "say:hello it's me"},
                {"role": "assistant", "content": "hell"},
                {"role": "user", "content": "say:it's"},
            ],
            "temperature": 0.5, "max_tokens": 4, "top_k": 7, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        assert sent_by(curl) == expected
        output = subprocess.run(
            [sys.executable, "-c", python], capture_output=True, text=True, check=True
        )
        assert output.stdout == "it's\n"
        assert (
            json.loads(await page.value("JSON.stringify(sessionStorage)"))["octavo.temperature"]
            == "0.5"
        )

    visit(server, script)


def sent_by(command: str) -> dict[str, Any]:
    """The body that a shell would give to curl."""
    if shutil.which("bash") is None:
        pytest.skip("no shell")
    curl = """curl() { for a in "$@"; do last="$a"; done; printf %s "$last"; }"""
    shown = subprocess.run(
        ["bash", "-c", f"{curl}\n{command}"], capture_output=True, text=True, check=True
    )
    return json.loads(shown.stdout)


@pytest.mark.slow
@in_browser
def test_what_a_model_writes_is_text(server):
    evil = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"

    async def script(page: Page) -> None:
        await ready(page)
        await send(page, f"say:{evil} **b** `<i>`")
        await page.until(DONE)
        (text,) = await texts(page)
        assert text == f"{evil} b <i>"
        assert await page.value(f"{ANSWERS}[0].querySelectorAll('img, script, i').length") == 0
        assert await page.value("document.title") == "octavo"
        shown = await page.value(
            "import('/pages/message.js').then((m) => { const v = new m.AnswerView();"
            "const text = 'a\\n```py\\n<b>x</b>\\n```\\nb\\n```\\nopen'; const seen = [];"
            "for (let n = 1; n <= text.length; n++) v.show({text: text.slice(0, n)});"
            "return [...v.body.children].map((c) => [c.dataset.kind,"
            " (c.querySelector('code') ?? c).textContent]); })"
        )
        assert shown == [["text", "a"], ["block", "<b>x</b>"], ["text", "b"], ["block", "open"]]

    visit(server, script)


@pytest.mark.slow
@in_browser
def test_errors_are_shown_and_leave_the_conversation_whole():
    async def script(page: Page) -> None:
        await ready(page)
        await send(page, "x" * 600)
        await page.until("document.querySelector('[role=alert]') !== null")
        shown = await page.value("document.querySelector('[role=alert]').textContent")
        assert shown.startswith("400: the prompt has") and "512 tokens" in shown
        assert await page.value("document.getElementById('stop').hidden")
        await send(page, "say:fine")
        await page.until(DONE)
        assert (await texts(page))[-1] == "fine"
        await page.click("#new-chat")
        assert await page.value("document.querySelectorAll('.message').length") == 0
        assert page.problems.pop().startswith("Failed to load resource")

    with mock_server.start() as server:
        visit(server, script)


@pytest.mark.slow
@in_browser
def test_an_engine_that_dies_in_the_middle_of_an_answer():
    async def script(page: Page) -> None:
        await ready(page)
        await send(page, "endless")
        await page.until(f"{ANSWERS}[0]?.textContent.length > 30")
        os.kill(server.engine_pid, signal.SIGKILL)
        await page.until("document.querySelector('[role=alert]') !== null")
        shown = await page.value("document.querySelector('[role=alert]').textContent")
        assert shown == "the engine process ended by signal 9"
        (said,) = await texts(page)
        assert said.startswith("abcdef")
        assert await page.value("document.getElementById('stop').hidden")

    with mock_server.start(engine={"step_seconds": 0.02}) as server:
        visit(server, script)


@pytest.mark.slow
@in_browser
def test_asking_again_and_copying(server):
    async def script(page: Page) -> None:
        origin = {"origin": server.url, "permissions": ["clipboardReadWrite"]}
        await page.call("Browser.grantPermissions", **origin)
        await ready(page)
        for text in ("say:one", "say:two"):
            before = await page.value(f"{ANSWERS}.length")
            await send(page, text)
            await page.until(f"{ANSWERS}.length > {before} && {DONE} > 2")
            await page.until("document.getElementById('stop').hidden")
        await page.click(".assistant:last-child .below button")
        assert await page.value("navigator.clipboard.readText()") == "two"
        assert await page.value("document.activeElement.textContent") == "Copied"
        await page.click(".assistant .again")  # the first: what came after it goes
        await page.until(f"{ANSWERS}.length === 1 && {DONE}")
        assert await texts(page) == ["one"]
        users = await page.value("document.querySelectorAll('.user').length")
        assert users == 1
        await page.click("#open-request")
        await page.click("[data-copies=curl]")
        copied = await page.value("navigator.clipboard.readText()")
        roles = [message["role"] for message in sent_by(copied)["messages"]]
        assert roles == ["user"]  # the last request, for nothing is in the field
        await page.press("Escape")

    visit(server, script)


@pytest.mark.slow
@in_browser
def test_a_server_with_keys_behind_a_prefix():
    async def script(page: Page) -> None:
        await page.until("document.getElementById('settings').open")
        assert await page.value("document.activeElement.id") == "key"
        await page.write("secret")
        await page.press("Escape")
        await ready(page)
        await send(page, "say:in")
        await page.until(DONE)
        assert await texts(page) == ["in"]
        await page.click("#open-request")
        for name in ("curl", "python"):
            text = await page.value(f"document.getElementById('{name}').textContent")
            assert "OCTAVO_API_KEY" in text and "secret" not in text and "/llm/v1" in text
        assert await page.value("Object.keys(localStorage).length") == 0
        page.problems = [p for p in page.problems if not p.startswith("Failed to load resource")]

    with mock_server.start(server={"api_key": ["secret"], "root_path": "/llm"}) as server:
        visit(server, script, "/llm/")


@pytest.mark.slow
@in_browser
def test_phone_width_and_dark_theme(server, tmp_path):
    async def script(page: Page) -> None:
        await ready(page)
        await send(page, f"say:{'long words and ' * 20}{'x' * 120}")
        await page.until(DONE)
        light = await page.picture(tmp_path / "light.png")
        await page.resize(390, 844, phone=True)
        for drawer in (None, "settings", "request"):
            if drawer:
                await page.click(f"#open-{drawer}")
                await page.still()
            wide = await page.value(
                "[...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() &&"
                " !e.closest('pre') && !e.closest('.hidden, .skip') &&"
                " e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML)"
            )
            assert wide == [], wide
            assert await page.value("document.documentElement.scrollWidth <= innerWidth")
            await page.picture(tmp_path / f"phone-{drawer}.png")
            if drawer:
                await page.press("Escape")
        small = await page.value(
            "[...document.querySelectorAll('.bar button, .round')].filter((e) =>"
            " e.checkVisibility() && e.getBoundingClientRect().height < 36).length"
        )
        assert small == 0
        await page.resize(1200, 800)
        await page.prefer("dark")
        dark = await page.picture(tmp_path / "dark.png")
        assert brightness(light) > 200 > 60 > brightness(dark)

    visit(server, script)


CONTRAST = """
(() => {
  const channels = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = channels(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.closest('.hidden') || e.disabled) continue;
    const style = getComputedStyle(e);
    if (style.fontSize === '0px') continue;
    const [a, b] = [light(channels(style.color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([ratio, e.outerHTML.slice(0, 80)]);
  }
  return found;
})()
"""


@pytest.mark.slow
@in_browser
def test_names_labels_and_contrast_of_everything(server):
    """Every control has a name for screen readers, every text the contrast of WCAG AA."""

    async def script(page: Page) -> None:
        await ready(page)
        await send(page, "say:hello **there** `code`")
        await page.until(DONE)
        for theme in ("light", "dark"):
            await page.prefer(theme)
            for drawer in ("settings", "request"):
                assert await page.value(CONTRAST) == [], theme
                await page.click(f"#open-{drawer}")
                assert await page.value(CONTRAST) == [], (theme, drawer)
                nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
                roles = {"button", "textbox", "spinbutton", "combobox", "dialog", "heading", "log"}
                nameless = [
                    node for node in nodes
                    if not node["ignored"] and node["role"]["value"] in roles
                    and not node.get("name", {}).get("value")
                ]  # fmt: skip
                assert nameless == []
                await page.press("Escape")
                focused = await page.value("document.activeElement.id")
                assert focused == f"open-{drawer}"
        assert await page.value("document.getElementById('news').textContent") == (
            "The answer is complete."
        )

    visit(server, script)


# ---- pictures ----


def pixels(png: bytes) -> list[bytes]:
    """Rows of an 8-bit RGB or RGBA picture that is not interlaced, filters undone."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8 and kind in (2, 6)
    step = 3 if kind == 2 else 4
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    raw, rows, above = zlib.decompress(data), [], bytes(width * step)
    for y in range(height):
        begin = y * (width * step + 1)
        kind, line = raw[begin], bytearray(raw[begin + 1 : begin + 1 + width * step])
        for x in range(len(line)) if kind else ():
            left = line[x - step] if x >= step else 0
            corner = above[x - step] if x >= step else 0
            guess = (0, left, above[x], (left + above[x]) // 2, paeth(left, above[x], corner))[kind]
            line[x] = (line[x] + guess) & 255
        above = bytes(line)
        rows.append(bytes(b for i, b in enumerate(line) if i % step < 3))
    return rows


def paeth(left: int, above: int, corner: int) -> int:
    guess = left + above - corner
    return min((left, above, corner), key=lambda value: abs(guess - value))


def brightness(png: bytes) -> float:
    rows = pixels(png)
    return sum(map(sum, rows)) / sum(map(len, rows))


def colours(png: bytes) -> int:
    return len({row[i : i + 3] for row in pixels(png) for i in range(0, len(row), 3)})
