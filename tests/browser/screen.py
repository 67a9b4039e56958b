"""What the tests of pages do with a browser: load, resize, click, read, and measure how well texts stand out."""

import json
from pathlib import Path

from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

# Every text that is seen, with the contrast of its colour to the nearest ground below it (WCAG 2's formula).
CONTRASTS = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => channels(colour).slice(0, 3).map((one) => one / 255)
  .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
  .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const { backgroundColor } = getComputedStyle(at);
    if ((channels(backgroundColor)[3] ?? 1) > 0) return backgroundColor;
  }
  throw new Error("no ground below " + element.outerHTML);
};
const said = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
return [...document.body.querySelectorAll("*")].filter((element) => said(element) && element.getClientRects().length).map((element) => {
  const style = getComputedStyle(element);
  const [one, other] = [light(element instanceof SVGElement ? style.fill : style.color), light(ground(element))];
  return [element.textContent.slice(0, 40), (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)];
});
"""


def load(browser, file: Path):
    show(browser)
    browser.get(file.as_uri())
    return browser


def show(browser, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
    """Give the page so many pixels, a colour scheme and a medium."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def texts(browser, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements(By.CSS_SELECTOR, selector)]


def click(browser, selector: str) -> None:
    element = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def asked_for(browser) -> set[str]:
    """Everything that was asked of a network or a disk since the last call, but for what the page itself holds."""
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in asked if event["method"] == "Network.requestWillBeSent"}
    return {url for url in urls if not url.startswith("data:")}


def contrasts(browser) -> list[tuple[str, float]]:
    """Every text that is seen, with its contrast."""
    return [(text, round(contrast, 2)) for text, contrast in browser.execute_script(CONTRASTS)]


def widths(browser) -> list[int]:
    """The width of the screen and that of what is on it."""
    return browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]")


def column(browser, number: int) -> list[str]:
    """A column of the table of cells: the first line of each value."""
    return [text.split("\n")[0] for text in texts(browser, f"#cells tbody tr > :nth-child({number})")]


def choose(browser, **wanted: str) -> None:
    """Choose which single answers are listed."""
    for name, value in wanted.items():
        Select(browser.find_element(By.CSS_SELECTOR, f"#choose [name={name}]")).select_by_value(value)
