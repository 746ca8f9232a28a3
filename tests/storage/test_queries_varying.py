"""Equal causes of failure are one text."""

from __future__ import annotations

import pytest

from insitu.storage.queries import varying


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("0 of 10 cases pass; case 3 raised NameError", "# of # cases pass; case # raised NameError"),
        ("no such file, access '/work/my.dir/mill.py'", "no such file, access 'FILE'"),
        ("no such text in src/a/shop.test.ts. The old text", "no such text in FILE. The old text"),
        ("cannot open ~/x and ./y and ../z", "cannot open FILE and FILE and FILE"),
        ("3/4 and/or http://127.0.0.1:80/v1", "#/# and/or http://#.#.#.#:#/v#"),
        ("module.attribute is None at 0x7f00", "module.attribute is None at #"),
    ],
)  # fmt: skip
def test_numbers_and_paths_are_replaced(text: str, group: str) -> None:
    assert varying(text) == group
