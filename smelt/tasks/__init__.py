"""The tasks. A file is one task: its class derives from `smelt.tasks.spec.TaskSpec`, its instance is TASK."""
