"""Run directories: record, logs, retention; and what keeps processes honest about each other."""
