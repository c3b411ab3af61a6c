"""Imported by a second fork server: imports what workers were seen to import (`strata.rendezvous.preload`)."""

from strata.rendezvous.preload import import_seen

import_seen()
