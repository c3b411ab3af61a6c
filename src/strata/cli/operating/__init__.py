"""Commands for whoever runs a coordinator: starting it, access, certificates, notifications, quarantine, its journal."""
