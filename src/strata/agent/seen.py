"""Imported by a second fork server: imports what workers were seen to import (`strata.agent.preload`)."""

from strata.agent.preload import import_seen

import_seen()
