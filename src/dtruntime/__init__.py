"""The runtime's names as existing scripts import them. Everything lives in `strata`."""
