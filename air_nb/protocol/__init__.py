"""What crosses a process border: messages, tasks, events, and Python objects as bundles. Frozen, and versioned."""
