"""The names of all targets. Apart, so that whoever starts a child has loaded nothing yet."""

from __future__ import annotations

TARGETS = (
    "wire",
    "events",
    "manifest",
    "index",
    "settings",
    "trainer_config",
    "image",
    "import",
    "journal",
    "http",
)
