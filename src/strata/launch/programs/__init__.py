"""What the built-in recipes run. Each is a module that reads its task with `strata.launch.context.current_task`."""
