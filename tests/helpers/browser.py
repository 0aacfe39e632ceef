"""Pages in a headless Chromium from Debian's packages."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """A browser that records the page's messages and its network requests."""
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    assert None not in (chromium, driver), "there is no Chromium here: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield made
    finally:
        made.quit()


def width(page: webdriver.Chrome, pixels: int) -> None:
    """Show the page this wide, for example as wide as a phone."""
    size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": pixels < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def asked(page: webdriver.Chrome) -> list[str]:
    """The addresses requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
