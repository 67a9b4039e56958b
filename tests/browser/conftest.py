"""One Chromium for all tests of pages."""

import os
import shutil
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="the pages' tests drive Chromium with selenium, which is not installed"
    )
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in found.items() if not path]:
        pytest.skip(f"{' and '.join(missing)} not found: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # A sandbox cannot be made by root, nor in a container with little shared memory.
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    for word in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", *root):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found["chromedriver"]))
    yield driver
    driver.quit()
