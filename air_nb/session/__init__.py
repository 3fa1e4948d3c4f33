"""The user's session: one per process, owner of the launcher and of the runs."""

from air_nb.session.session import Launch, Session, close_session, get_session

__all__ = ["Launch", "Session", "close_session", "get_session"]
