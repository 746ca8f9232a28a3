"""axe finds nothing serious on any page, in both schemes, wide and narrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import axe
import pytest
from addresses import addresses, task_of
from browser_lab import Served, open_tab

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(1280, "light", marks=pytest.mark.full),
        pytest.param(1280, "dark", marks=pytest.mark.full),
        pytest.param(320, "light", marks=pytest.mark.full),
        (320, "dark"),
    ],
)
def test_no_page_has_serious_faults(
    browser: Any, served: Served, runs: Path, scheme: str, width: int
) -> None:
    if not axe.SCRIPT.exists():
        pytest.skip("axe-core is not installed: scripts/setup test")
    found = {}
    # axe is injected by the test, which the page's own policy forbids.
    for tab in open_tab(browser, served, color_scheme=scheme, bypass_csp=True):
        tab.page.set_viewport_size({"width": width, "height": 800})
        for name, address in addresses("lab", task_of(runs / "lab")).items():
            tab.open(address)
            if not tab.page.evaluate("'axe' in window"):
                tab.page.add_script_tag(path=axe.SCRIPT)
            result = tab.page.evaluate("() => axe.run({resultTypes: ['violations']})")
            for fault in result["violations"]:
                if fault["impact"] in ("serious", "critical"):
                    found[f"{name}: {fault['id']}"] = fault["nodes"][0]["html"][:200]
    assert found == {}
