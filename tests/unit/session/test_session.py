"""The session apart from its processes."""

from __future__ import annotations

import pytest

from air_nb.errors import LauncherError
from air_nb.session import session as module
from air_nb.session.session import Session


@pytest.fixture
def session():
    session = Session()
    yield session
    session.close()


def test_no_trouble_of_the_panel_fails_a_run(session, monkeypatch):
    def fail(_self: Session) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_is_kernel", lambda: True)
    monkeypatch.setattr(Session, "sidebar", property(fail))
    with session.live_run():
        pass


def test_a_closed_session_lends_no_launcher(session):
    session.close()
    with pytest.raises(LauncherError, match="unloaded"):
        session.borrow_launcher(cold=False)
