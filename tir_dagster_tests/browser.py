"""Pages in a real browser, light and dark, narrow and wide; screenshots are kept in build/screenshots."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from tir_dagster_tests.project import ROOT

SCREENSHOTS = ROOT / "build" / "screenshots"
SCHEMES, WIDTHS = ("light", "dark"), {"wide": 1280, "narrow": 390}
# Of texts against what is behind them: below it, people with good eyes begin to guess.
CONTRAST = 3.0
_FAINT = """(least) => {
  const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number)
  const part = value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b)
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = numbers(getComputedStyle(at).backgroundColor)
      if (alpha > 0.5) return [r, g, b]
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255]
  }
  const faint = []
  for (const element of document.querySelectorAll("body *:not(svg *)")) {
    const own = [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("").trim()
    if (!own || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(behind(element))]
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    if (contrast < least) faint.push(`${own.slice(0, 40)}: contrast ${contrast.toFixed(1)}`)
  }
  return faint
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that this machine has."""
    search = subprocess.run([ROOT / "scripts" / "find-chromium"], capture_output=True, text=True, check=False)
    assert search.returncode == 0, search.stderr
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=search.stdout.strip(), args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def look(browser: Browser, url: str, name: str) -> list[str]:
    """Open the page in both colour schemes and widths, keep what is seen, and return what is wrong with it."""
    return [
        f"{scheme}, {width}: {problem}"
        for scheme, width in itertools.product(SCHEMES, WIDTHS)
        for problem in _look(browser, url, name, scheme, width)
    ]


def _look(browser: Browser, url: str, name: str, scheme: str, width: str) -> Iterator[str]:
    asked: list[str] = []
    errors: list[str] = []
    with browser.new_context(color_scheme=scheme, viewport={"width": WIDTHS[width], "height": 900}) as context:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.screenshot(path=SCREENSHOTS / f"{name} {scheme} {width}.png", full_page=True)
        yield from (f"asks for {address}" for address in asked if not address.startswith(("file:", "data:")))
        yield from errors
        yield from page.evaluate(_FAINT, CONTRAST)
        if (over := page.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
            yield f"{over} pixels too wide"
