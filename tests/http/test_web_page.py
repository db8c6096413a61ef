"""The page at `/`: its files, the numbers behind it, and a chat in a real browser."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.scripted_worker import Script
from slipstream.http.web_page import STATIC

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
SHOTS = os.environ.get("SLIPSTREAM_SCREENSHOTS")  # a folder to keep pictures in, for whoever wants to look


class Browser:
    """One tab, driven over Chromium's own debugging pipe: messages are JSON with a NUL after each."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._is_loaded = False
        self.requested: list[str] = []
        self.complaints: list[str] = []

    async def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        if self._session is None:
            target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
            attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._is_loaded = False
        await self.call("Page.navigate", url=url)
        while not self._is_loaded:
            self._note(await self._read())

    async def run(self, code: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        done = await self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until an expression is true on the page; its value."""
        wait = f"""new Promise((yes, no) => {{
            const end = Date.now() + 8000;
            const look = () => {{
                let value = false;
                try {{ value = {condition}; }} catch {{ /* not there yet */ }}
                if (value) yes(value); else if (Date.now() > end) no(new Error('never')); else setTimeout(look, 20);
            }};
            look();
        }})"""
        return await self.run(wait)

    async def picture(self, name: str) -> bytes:
        image = base64.b64decode((await self.call("Page.captureScreenshot"))["data"])
        if SHOTS:
            await asyncio.to_thread(Path(SHOTS, f"{name}.png").write_bytes, image)
        return image

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        while True:
            told = await self._read()
            if told.get("id") == number:
                assert "error" not in told, told["error"]
                return told["result"]
            self._note(told)

    async def _read(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((await self._reader.readuntil(b"\0"))[:-1])
        return told

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        match told.get("method"):
            case "Page.loadEventFired":
                self._is_loaded = True
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(str(params["entry"]))


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium, which is not installed")
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4, whatever they are here.
    redirected = f'exec "$@" 3<&{commands_out} 4>&{answers_in} 2>/dev/null'
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", redirected, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}",
        pass_fds=(commands_out, answers_in),
    )  # fmt: skip
    os.close(commands_out)
    os.close(answers_in)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers_out, "rb")
    )
    outgoing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(commands_in, "wb"))
    driven = Browser(reader, asyncio.StreamWriter(outgoing, protocol, None, loop))
    yield driven
    process.terminate()
    outgoing.close()
    incoming.close()
    await process.wait()


async def test_the_page_and_all_that_it_loads_come_from_here_without_a_key(serving: Any) -> None:
    async with serving(api_key="secret") as served:
        page = await served.ask("GET", "/")
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        assert page.headers["x-request-id"]
        text = page.body.decode()
        loaded = set(re.findall(r'(?:src|href)="([^"]+)"', text))
        assert loaded == {"static/icon.svg", "static/page.css", "static/chat.js", "static/live.js"}
        for name in (*loaded, "static/sse.js"):
            answer = await served.ask("GET", f"/{name}")
            assert answer.status == 200, name
            assert answer.body == (STATIC / name.removeprefix("static/")).read_bytes()
        for outside in ("../web_page.py", "%2e%2e/web_page.py", "nope.js"):
            assert (await served.ask("GET", f"/static/{outside}")).status in (401, 404)
        assert (await served.ask("GET", "/live")).status == 401
        assert (await served.ask("GET", "/live", authorization="Bearer secret")).status == 200


def test_no_file_of_the_page_names_another_host() -> None:
    for path in STATIC.iterdir():
        found = set(re.findall(r"https?://[^\s\"'<>]+", path.read_text(encoding="utf-8")))
        assert found <= {"http://www.w3.org/2000/svg"}, (path.name, found)


async def test_the_live_numbers_tell_the_last_steps_and_their_phases(serving: Any) -> None:
    async with serving(Script(step_time_s=0.004), started=False) as served:
        assert (await served.ask("GET", "/live")).json["stats"] is None
        await served.engine.start()
        idle = (await served.ask("GET", "/live")).json
        assert (idle["state"], idle["model"], idle["ranges"]) == ("ready", "tiny", [])
        await served.post("/v1/completions", {"prompt": "the", "max_tokens": 20, "ignore_eos": True, "stream": True})
        live = (await served.ask("GET", "/live")).json
    assert live["stats"]["num_output_tokens"] == 20
    assert len(live["step_s"]) == len(live["host_s"]) == 20
    assert sorted(live["step_s"])[10] == pytest.approx(0.004, rel=0.6)
    assert all(0 <= host <= step for host, step in zip(live["host_s"], live["step_s"], strict=True))
    assert live["socket_gaps"]["count"] > 5
    ranges = live["ranges"]
    assert {name for name, *_ in ranges} == {"schedule", "launch", "sample", "await", "commit", "send"}
    assert all(start <= end <= 0 for _, _, start, end in ranges)
    launches = {step: start for name, step, start, _ in ranges if name == "launch"}
    awaits = {step: end for name, step, _, end in ranges if name == "await"}
    overlapped = [step for step in launches if step + 1 in launches and launches[step + 1] < awaits[step]]
    assert len(overlapped) >= 18, "each step is launched while the one before is in flight"


async def test_a_profile_takes_the_marks_and_the_live_view_gets_them_back(serving: Any) -> None:
    class Others:
        is_on = True

    async with serving() as served:
        switch = served.engine.marks
        mine = switch.marks
        switch.marks = Others()
        await served.ask("GET", "/live")
        assert isinstance(switch.marks, Others)
        switch.off()
        await served.ask("GET", "/live")
        assert switch.marks is mine


@pytest.mark.timeout(60)
async def test_a_chat_streams_in_the_browser_and_the_live_view_moves(
    serving: Any, scripted: Any, browser: Browser
) -> None:
    async with serving(Script(step_time_s=0.004), num_pages=2048, max_model_len=4096) as served:
        await browser.open(f"{served.url}/")
        await browser.until("document.querySelector('#state').dataset.state === 'ready'")
        assert await browser.run("document.querySelector('#model').textContent") == "tiny"
        await browser.run("document.querySelector('[name=seed]').value = '7'")
        await browser.run("document.querySelector('[name=max_tokens]').value = '400'")
        await browser.run("document.querySelector('.ideas button').click()")
        lengths = [
            await browser.until(f"(document.querySelector('.assistant .body') || {{}}).textContent.length > {size}")
            for size in (5, 50)
        ]
        assert lengths == [True, True], "the answer grows while it comes"
        await browser.until("+document.querySelector('#running').textContent === 1")
        await browser.picture("desktop-light")
        await browser.until("document.querySelector('.assistant .facts')")
        facts = await browser.run("document.querySelector('.assistant .facts').textContent")
        assert re.search(r"first token \d+ ms · [\d.]+ tokens/s · \d+ tokens · (length|stop)$", facts), facts
        shown = await browser.run("document.querySelector('.assistant .body').textContent")
        asked = {"seed": 7, "max_tokens": 400, "messages": [{"role": "user", "content": "Tell me about the sea."}]}
        whole = (await served.post("/v1/chat/completions", asked)).json["choices"][0]["message"]["content"]
        assert shown == whole
        await browser.until("+document.querySelector('#rate').textContent.replace(',', '') >= 0")
        await browser.until("document.querySelector('#gap').textContent !== '–'")
        assert await browser.run(f"{INKED}('timeline')") > 500
        assert await browser.run(f"{INKED}('rates')") > 20
    assert browser.complaints == []
    assert all(url.startswith((served.url, "about:")) for url in browser.requested), browser.requested


INKED = """(id => {
    const canvas = document.getElementById(id);
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let at = 3; at < pixels.length; at += 4) count += pixels[at] > 0;
    return count;
})"""


@pytest.mark.timeout(60)
async def test_it_fits_a_phone_in_the_dark_and_stop_aborts(serving: Any, browser: Browser) -> None:
    async with serving(Script(step_time_s=0.004), num_pages=4096, max_model_len=8192) as served:
        await browser.open(f"{served.url}/", width=390, height=844, dark=True)
        await browser.until("document.querySelector('#state').dataset.state === 'ready'")
        assert await browser.run("document.documentElement.scrollWidth <= 390")
        await browser.run("document.querySelector('[name=max_tokens]').value = '4000'")
        await browser.run("document.querySelector('#prompt').value = 'the stones'")
        await browser.run("document.querySelector('#composer').requestSubmit()")
        await browser.until("document.querySelector('.assistant .body').textContent.length > 40")
        await browser.picture("phone-dark-chat")
        await browser.run("document.querySelector('[data-show=live]').click()")
        await browser.until("document.querySelector('#rate').textContent !== '–'")
        await browser.picture("phone-dark-live")
        assert await browser.run("getComputedStyle(document.querySelector('.chat')).display") == "none"
        assert await browser.run(f"{INKED}('timeline')") > 500
        await browser.run("document.querySelector('[data-show=sampling]').click()")
        await browser.picture("phone-dark-sampling")
        await browser.run("document.querySelector('[data-show=chat]').click()")
        await browser.run("document.querySelector('#stop').click()")
        await browser.until("/stopped/.test(document.querySelector('.assistant .facts').textContent)")
        await served.idle()
        assert served.engine.num_aborted == 1
        background = await browser.run("getComputedStyle(document.body).backgroundColor")
        await browser.run("document.querySelector('#theme').click()")
        assert await browser.run("getComputedStyle(document.body).backgroundColor") != background
    assert browser.complaints == []


@pytest.mark.timeout(60)
async def test_what_a_model_writes_is_never_markup_and_errors_are_told(
    serving: Any, scripted: Any, browser: Browser
) -> None:
    text = "<img src=x onerror=alert(1)> see:\n```py\nprint(1)\n```\nso"
    async with serving(Script(token_of=scripted.saying(text)), api_key="k") as served:
        await browser.open(f"{served.url}/")
        await browser.until("document.querySelector('#state-text').textContent === 'no access'")
        await browser.run("document.querySelector('[name=key]').value = 'k'")
        await browser.until("document.querySelector('#state').dataset.state === 'ready'")
        await browser.run("document.querySelector('[name=mode]').value = 'completion'")
        await browser.run("document.querySelector('#prompt').value = 'PROMPT'")
        await browser.run("document.querySelector('#composer').requestSubmit()")
        await browser.until("document.querySelector('.assistant .facts')")
        assert await browser.run("document.querySelectorAll('.assistant img').length") == 0
        assert await browser.run("document.querySelector('.assistant pre').textContent") == "print(1)"
        assert "onerror" in await browser.run("document.querySelector('.assistant .body').textContent")
        await browser.run("document.querySelector('[name=max_tokens]').value = '99999'")
        await browser.run("document.querySelector('#prompt').value = 'again'")
        await browser.run("document.querySelector('#composer').requestSubmit()")
        told = await browser.until("document.querySelector('.failed .body').textContent")
        assert "99999" in told
