"""What can't cross a process border, and what to do instead: one entry per kind of object.

These kinds are refused before pickle is asked, which would take some of them and send something else (the contents of a
file that is open for reading), and would blame a part of others (a lock in a thread).

Classes are named, not imported: an object of a class exists only where its module is loaded already. Pure; used in the
kernel for captured names and on ranks for results.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OTHER", "TOO_DEEP", "Refusal", "refusal_for"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an object can't travel.

    Attributes:
        what: What it is, with its article: "an open file".
        advice: What to do instead, a sentence.
    """

    what: str
    advice: str


_FILE = Refusal("an open file", "Open it inside the cell.")
_LOCK = Refusal("a lock of this process", "Make it inside the cell.")
_QUEUE = Refusal("tied to the processes that this one started", "Make it inside the cell.")
_DATABASE = Refusal("a database connection", "Connect inside the cell.")
_CUDA = Refusal("tied to this process's GPU context", "Make it inside the cell.")
_AWAITABLE = Refusal("waiting on this process's event loop", "Make and await it inside the cell.")
_POOL = Refusal("a pool of threads or processes", "Make it inside the cell.")
_NETWORK = Refusal("a network connection", "Connect inside the cell.")

OTHER = Refusal("nothing that pickle can send", "Make it inside the cell.")
TOO_DEEP = Refusal("nested too deeply to be pickled", "Build it inside the cell, or store its parts in a flat list.")

# Looked up for each class in the MRO, nearest first; None: may travel although a base class may not.
_BY_CLASS: dict[str, Refusal | None] = {
    "_io.BytesIO": None,
    "_io.StringIO": None,
    "_io._IOBase": _FILE,
    "h5py._hl.base.HLObject": _FILE,
    "zipfile.ZipFile": _FILE,
    "tarfile.TarFile": _FILE,
    "mmap.mmap": Refusal("a mapped file", "Map it inside the cell."),
    "_thread.lock": _LOCK,
    "_thread.RLock": _LOCK,
    "threading.Condition": _LOCK,
    "threading.Event": _LOCK,
    "threading.Semaphore": _LOCK,
    "threading.Barrier": _LOCK,
    "threading.Thread": Refusal("a thread of this process", "Start it inside the cell."),
    "_thread._local": Refusal("data of one thread", "Make it inside the cell."),
    "multiprocessing.synchronize.SemLock": _QUEUE,
    "multiprocessing.synchronize.Condition": _QUEUE,
    "multiprocessing.synchronize.Event": _QUEUE,
    "multiprocessing.queues.Queue": _QUEUE,
    "multiprocessing.queues.SimpleQueue": _QUEUE,
    "multiprocessing.connection._ConnectionBase": _QUEUE,
    "multiprocessing.process.BaseProcess": _QUEUE,
    "multiprocessing.managers.BaseManager": _QUEUE,
    "subprocess.Popen": Refusal("a child of this process", "Start it inside the cell."),
    "multiprocessing.pool.Pool": _POOL,
    "concurrent.futures._base.Executor": _POOL,
    "concurrent.futures._base.Future": Refusal("work of this process under way", "Send its result() instead."),
    "_socket.socket": _NETWORK,
    "requests.sessions.Session": None,
    "builtins.generator": Refusal("a running generator", "Call its function inside the cell, or send list(...) of it."),
    "builtins.async_generator": Refusal("a running generator", "Call its function inside the cell."),
    "builtins.coroutine": _AWAITABLE,
    "_asyncio.Future": _AWAITABLE,
    "asyncio.events.AbstractEventLoop": _AWAITABLE,
    "builtins.frame": Refusal("a frame of this process's stack", "Send the values that you need from it."),
    "builtins.traceback": Refusal("a traceback of this process", "Send traceback.format_exc(), a text."),
    "builtins.memoryview": Refusal(
        "a view of another object's memory", "Send the object itself, or bytes(...) of the view."
    ),
    "builtins.PyCapsule": Refusal("a pointer into this process", "Make it inside the cell."),
    "sqlite3.Connection": _DATABASE,
    "sqlite3.Cursor": _DATABASE,
    "sqlalchemy.engine.base.Engine": _DATABASE,
    "sqlalchemy.engine.base.Connection": _DATABASE,
    "psycopg.BaseConnection": _DATABASE,
    "psycopg2.extensions.connection": _DATABASE,
    "duckdb.duckdb.DuckDBPyConnection": _DATABASE,
    "_duckdb.DuckDBPyConnection": _DATABASE,
    "ipywidgets.widgets.widget.Widget": Refusal(
        "a widget, which lives in the kernel", "Read its value before the cell."
    ),
    "comm.base_comm.BaseComm": Refusal("a connection to the page", "Use it in the kernel."),
    "IPython.core.interactiveshell.InteractiveShell": Refusal(
        "the kernel's own IPython shell", "Call get_ipython() inside the cell: each rank has a shell of its own."
    ),
    "torch.cuda.streams.Stream": _CUDA,
    "torch.cuda.streams.Event": _CUDA,
    "torch.cuda.graphs.CUDAGraph": _CUDA,
    "torch.distributed.distributed_c10d.ProcessGroup": Refusal(
        "a process group of this process", "Call air_nb.runtime.init_process_group() or new_group() inside the cell."
    ),
    "torch.distributed.tensor.DTensor": Refusal("a tensor spread over ranks", "Send its full_tensor() instead."),
    "torch.nn.parallel.distributed.DistributedDataParallel": Refusal(
        "a model tied to its process group", "Send its .module instead."
    ),
    "torch.utils.data.dataloader._BaseDataLoaderIter": Refusal(
        "a running iterator of a DataLoader", "Call iter(...) inside the cell."
    ),
}


def refusal_for(kind: type) -> Refusal | None:
    """Why objects of this class can't travel, None if nothing is known against it."""
    for cls in kind.__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in _BY_CLASS:
            return _BY_CLASS[name]
    return None
