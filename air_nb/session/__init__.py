"""The user's session: one per process, owner of the launcher and of the runs."""
