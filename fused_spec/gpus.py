"""Facts of GPUs, from NVIDIA's data sheets and architecture whitepapers.

Memory is what the data sheets call it, in units of 10^9 bytes. What a program may allocate differs: drivers report more
for H100, H200, A100 and RTX 4090, and 47.8e9 bytes for an L40S, whose error correction takes some.
"""

import re
from dataclasses import dataclass

from fused_spec.errors import InvalidInput

_KIB = 1024


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        memory_bytes: size of its memory.
        bandwidth: of its memory, in GB/s (10^9 bytes per second).
        l2_bytes: size of its L2 cache.
        compute_capability: as in sm_90.
        multiprocessors: how many it has.
    """

    name: str
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    compute_capability: int
    multiprocessors: int

    def microseconds(self, num_bytes: float) -> float:
        """How long the memory takes to deliver this many bytes: bytes / bandwidth."""
        return num_bytes / (self.bandwidth * 1e3)


GPUS = {
    gpu.name: gpu
    for gpu in (
        # "NVIDIA H100 Tensor Core GPU" data sheet, column H100 SXM (80 GB, 3.35 TB/s); L2 and multiprocessors: "NVIDIA
        # H100 Tensor Core GPU Architecture" whitepaper, H100 SXM5.
        GPU("H100", 80 * 10**9, 3350, 51200 * _KIB, 90, 132),
        # "NVIDIA H200 Tensor Core GPU" data sheet, column H200 SXM (141 GB, 4.8 TB/s). It does not give the L2 and the
        # multiprocessors, which are what the CUDA runtime reports.
        GPU("H200", 141 * 10**9, 4800, 61440 * _KIB, 90, 132),
        # "NVIDIA A100 Tensor Core GPU" data sheet, column A100 80GB SXM (2,039 GB/s); L2 and multiprocessors: "NVIDIA
        # A100 Tensor Core GPU Architecture" whitepaper.
        GPU("A100", 80 * 10**9, 2039, 40960 * _KIB, 80, 108),
        # "NVIDIA L40S" data sheet (48 GB, 864 GB/s, 18,176 CUDA cores: 142 multiprocessors of 128). L2: "NVIDIA Ada GPU
        # Architecture" whitepaper 2.01, of the L40, the same chip with as many multiprocessors.
        GPU("L40S", 48 * 10**9, 864, 98304 * _KIB, 89, 142),
        # "NVIDIA Ada GPU Architecture" whitepaper 2.01, GeForce RTX 4090 (24 GB, 1008 GB/s).
        GPU("RTX 4090", 24 * 10**9, 1008, 73728 * _KIB, 89, 128),
    )
}
"""By name. H100 and H200 are the SXM modules, A100 the one of 80 GB."""


def gpu_of(name: str) -> GPU:
    """The GPU of this name; case, spaces and dashes do not matter.

    Raises:
        InvalidInput: there is none.
    """
    known = {_bare(each): gpu for each, gpu in GPUS.items()}
    if not isinstance(name, str) or _bare(name) not in known:
        raise InvalidInput(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return known[_bare(name)]


def _bare(name: str) -> str:
    return re.sub(r"[\s-]", "", name).lower()
