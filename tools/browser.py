"""Open the explorer in a headless Chromium, for its tests, its benchmark and its screenshots.

It takes the system's Chromium and driver (Debian: `apt-get install chromium chromium-driver`) and the Python package
selenium, which the extra `test` installs.
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from vbcaps.explore.answers import Explorer
from vbcaps.explore.networks import Networks
from vbcaps.explore.server import app_of, listen

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"


def missing() -> str | None:
    """Return which program is missing, and how to get it; None where everything is there."""
    if not any(map(shutil.which, CHROMIUM)) or not shutil.which(DRIVER):
        return "Chromium and its driver are not installed: apt-get install chromium chromium-driver"
    return None


@contextmanager
def serving(networks: Networks) -> Iterator[str]:
    """Serve the explorer in a thread; yield its address."""
    with listen(None) as one:
        server = uvicorn.Server(uvicorn.Config(app_of(Explorer(networks)), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs=dict(sockets=[one]), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{one.getsockname()[1]}/"
        server.should_exit = True
        thread.join(10)


@contextmanager
def chromium(width: int = 1280, height: int = 720, downloads: Path | None = None) -> Iterator[Any]:
    """Start a headless Chromium whose page has this size; yield Selenium's driver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(next(filter(None, map(shutil.which, CHROMIUM))))
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    # Nothing but the explorer is reached: a page that asked for a font or a script elsewhere would show it.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if downloads is not None:
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    driver = webdriver.Chrome(options, Service(shutil.which(DRIVER)))
    try:
        driver.set_script_timeout(60)
        resize(driver, width, height)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Give the page this size, whatever the window around it takes."""
    metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


WAIT = """
const [names, done] = arguments;
const ready = () => window.explorer?.model && !window.explorer.loading && window.explorer.answers.look
  && names.every((name) => Number(document.body.dataset[name]) === window.explorer.sequence);
const check = () => (ready() ? requestAnimationFrame(() => done(true)) : setTimeout(check, 20));
check();
"""


def settle(driver: Any, *names: str) -> None:
    """Wait until the page shows the answers to its present state: "shown", "routed", "swept" or "decoded"."""
    driver.execute_async_script(WAIT, list(names or ("shown", "routed")))


def visit(driver: Any, address: str, link: str = "", *names: str) -> None:
    """Open a link of the explorer in a fresh page, and wait until it is drawn."""
    driver.get("about:blank")
    driver.get(f"{address}{link}")
    settle(driver, *names)
