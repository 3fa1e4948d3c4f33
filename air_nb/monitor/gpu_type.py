"""Whether a GPU is of the type that was asked for. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["GpuType", "parse_gpu_type"]

# AWS serves the documented type A10 with A10G cards: the same chip with the same 24 GB and lower clocks, and nobody can
# choose. So code written for an A10 runs there; who asks for an A10G gets just that.
_SERVED_BY = {"A10": ("A10G",)}


@dataclass(frozen=True, slots=True)
class GpuType:
    """A type as it was asked for.

    Attributes:
        text: What the user wrote.
        model: The model in it, words in capitals, such as "H100" or "RTX 4090".
        count: The number of GPUs that it names ("GPU_8xH100"), if any.
    """

    text: str
    model: str
    count: int | None = None

    def matches(self, name: str | None) -> bool:
        """Whether a GPU with this product name is one of these.

        Every word of the model must be there as a whole word or as neighbouring words run together ("RTX4090"), so that
        A10 is no A100, L4 no L40 and H200 no GH200.

        Args:
            name: NVML's product name; an unknown one never matches.
        """
        words = _words(name or "")
        joined = {run for start in range(len(words)) for run in accumulate(words[start:])}
        return all(joined.intersection((word, *_SERVED_BY.get(word, ()))) for word in self.model.split())


def parse_gpu_type(text: str) -> GpuType:
    """Read a type such as "H100", "a100", "RTX 4090", "GPU_1xA10" or "GPU_8xH100".

    Args:
        text: What the user wrote.

    Raises:
        ValueError: if no model is named.
    """
    counted = re.fullmatch(r"\s*(?:GPU_)?(\d+)x_?(.+)", text, flags=re.IGNORECASE)
    count, rest = (int(counted[1]), counted[2]) if counted else (None, text)
    words = [word for word in _words(rest) if word != "NVIDIA"]
    if not words or count == 0:
        raise ValueError(f"{text!r} is no GPU type: write one such as 'H100', 'A10' or 'GPU_8xH100'")
    return GpuType(text, " ".join(words), count)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Z0-9]+", text.upper())
