"""Where the page of a run is: on its tracking server, behind the Jupyter server, or where ``%air ui`` says. Pure.

A store that is a file or a database has no page of its own: an ``mlflow server`` has to run for it. Jupyter's server
starts one on the first click (``air_nb.tracking.opener``); where there is none, ``%air ui`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from air_nb.protocol.tracking import TrackedRun

__all__ = [
    "OPENER",
    "UI_COMMAND",
    "JupyterServer",
    "Link",
    "is_database",
    "is_server",
    "page_of",
    "root_of",
    "run_page",
]

OPENER = "air-nb-mlflow"
"""Entry point for jupyter-server-proxy, which makes it the first part of the path below the base URL."""

UI_COMMAND = "%air ui"

_DATABASES = frozenset({"file", "sqlite", "mysql", "postgresql", "mssql"})


@dataclass(frozen=True, slots=True)
class Link:
    """Something to open.

    Attributes:
        text: What to open, for where nothing can be clicked: a whole URL, or a command to type.
        href: What a page links to; None if there is nothing to click.
        label: What it is called there.
    """

    text: str
    href: str | None = None
    label: str = "MLflow"


@dataclass(frozen=True, slots=True)
class JupyterServer:
    """The Jupyter server of this kernel, if it can open pages for us (``air_nb.tracking.jupyter_server``).

    Attributes:
        base_url: Path below which it answers, as the browser sees it; begins and ends with a slash.
        url: The same with scheme and host. A browser may know the server by another name: a hub's, a tunnel's.
    """

    base_url: str
    url: str


def is_server(tracking_uri: str) -> bool:
    """Whether the URI is that of a tracking server, with pages of its own."""
    return _scheme(tracking_uri) in {"http", "https"}


def is_database(tracking_uri: str) -> bool:
    """Whether the URI is that of a store which an ``mlflow server`` can be started for."""
    return tracking_uri.startswith("/") or _scheme(tracking_uri).partition("+")[0] in _DATABASES


def root_of(tracking_uri: str) -> str:
    """Root of a tracking server's pages: its URI without name and password, which must not be shown in a notebook."""
    parts = urlsplit(tracking_uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/") + "/"


def page_of(tracked: TrackedRun) -> str | None:
    """The run's page, relative to the root of a server; None as long as there is no such run.

    It is the address that MLflow itself prints when a run ends.
    """
    if tracked.mlflow_run_id is None or tracked.experiment_id is None:
        return None
    return f"#/experiments/{quote(tracked.experiment_id, safe='')}/runs/{quote(tracked.mlflow_run_id, safe='')}"


def run_page(tracked: TrackedRun, run_id: str, server: JupyterServer | None) -> Link | None:
    """What the cell of a run shows, for its page in MLflow.

    Args:
        tracked: The MLflow run, as far as it has got.
        run_id: Id of our own run.
        server: None if no Jupyter server can open pages for us: in a terminal, a script, another front end.

    Returns:
        None if there is no page yet, or none that we know how to find (``databricks``, plugins).
    """
    page = page_of(tracked)
    if page is None:
        return None
    if is_server(tracked.tracking_uri):
        url = root_of(tracked.tracking_uri) + page
        return Link(url, url)
    if not is_database(tracked.tracking_uri):
        return None
    if server is None:
        return Link(UI_COMMAND)
    path = f"{OPENER}/open?run={quote(run_id, safe='')}"
    return Link(server.url + path, server.base_url + path)


def _scheme(uri: str) -> str:
    scheme, colon, _ = uri.partition(":")
    return scheme.lower() if colon else ""
