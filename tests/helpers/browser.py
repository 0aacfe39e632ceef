"""A headless Chromium, Debian's own: pages as people see them, and what they ask for."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """A browser that keeps what the page says and what it asks the network for."""
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
    """Show the page as wide as that, as a phone does where it is narrow."""
    size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": pixels < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def asked(page: webdriver.Chrome) -> list[str]:
    """The addresses of all that was asked for since this was asked last."""
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
