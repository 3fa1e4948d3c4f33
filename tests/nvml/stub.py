"""Builds the pretend libnvidia-ml.so.1 and writes the machine that it reports (see fake_nvml.c for the statements)."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


def build_stub(folder: Path) -> Path:
    """Compile the library into a folder, which is then what LD_LIBRARY_PATH needs."""
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run(["cc", *flags, "-o", str(folder / LIBRARY), str(SOURCE)], check=True)
    return folder


class FakeNvml:
    """The machine that the stub reports; a running sampler sees a change at its next sample."""

    def __init__(self, library_folder: Path, state: Path) -> None:
        self._state = state
        earlier = os.environ.get("LD_LIBRARY_PATH")
        self.environment = {
            "LD_LIBRARY_PATH": f"{library_folder}:{earlier}" if earlier else str(library_folder),
            "FAKE_NVML_STATE": str(state),
        }
        self.describe()

    def describe(self, *statements: str) -> None:
        """Replace the whole state: 8 idle H100s, changed by these statements."""
        new = self._state.with_suffix(".new")
        new.write_text("\n".join(statements) + "\n")
        new.rename(self._state)

    @staticmethod
    def uuid(index: int) -> str:
        return f"GPU-{index:08d}-0000-4000-8000-000000000000"
