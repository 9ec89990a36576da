"""GPUs by the names that ``rl-megatron scale`` takes, and constants for the formulas of `time`.

GPUs have memory, links and power; `flops.PEAKS` has their peaks. Sources, all NVIDIA's: the data sheets of A100, H100,
H200 and of the DGX B200, B300, GB200 NVL72 and GB300 NVL72 systems; of H800 and H20, which have none in public,
arXiv:2505.09343 and press. Rates are of one direction. The network is that of the usual system: 400 Gb/s for each GPU,
800 for B300 and GB300, 200 for A100. So is a host's memory: 2 TB of a DGX, 960 GB of a tray of 4 GPUs in an NVL72 rack
(17 TB in 18 trays). The constants are fitted to published runs by bench/step_time.py (docs/cluster.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rl_megatron.config import yaml_text
from rl_megatron.errors import ConfigError
from rl_megatron.training.flops import Peak, find_peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU and its links: GB and GB/s of 1e9 bytes, W; ``domain`` is the number of GPUs that NVLink joins.

    ``cuda_name`` is CUDA's name of it, by which its peak is found; ``per_node`` GPUs are a node of Slurm's, and a host
    has ``host`` GB of memory. The three speeds of files are assumed. ``node_file`` is for each process that writes or
    reads a file in a node's memory (/dev/shm) or on its own disk. ``storage_node`` and ``storage`` are those of the
    shared file system, for one node and for all together.
    """

    cuda_name: str
    memory: float
    hbm: float
    nvlink: float
    network: float
    watts: float
    domain: int = 8
    per_node: int = 8
    host: float = 2000
    node_file: float = 10
    storage_node: float = 5
    storage: float = 100

    @property
    def peak(self) -> Peak:
        """Its peak. Raises ConfigError if the table of peaks has no such GPU."""
        found = find_peak(self.cuda_name)
        if found is None:
            raise ConfigError(f"cuda_name={self.cuda_name}: no peak is known of this GPU; name one that has its chip")
        return found


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(cuda_name="A100", memory=80, hbm=2039, nvlink=300, network=25, watts=400),
    "h100": Gpu(cuda_name="H100", memory=80, hbm=3350, nvlink=450, network=50, watts=700),
    "h800": Gpu(cuda_name="H800", memory=80, hbm=3350, nvlink=200, network=50, watts=700),
    "h20": Gpu(cuda_name="H20", memory=96, hbm=4000, nvlink=450, network=50, watts=500),
    "h200": Gpu(cuda_name="H200", memory=141, hbm=4800, nvlink=450, network=50, watts=700),
    "b200": Gpu(cuda_name="B200", memory=180, hbm=8000, nvlink=900, network=50, watts=1000),
    "b300": Gpu(cuda_name="B300", memory=270, hbm=8000, nvlink=900, network=100, watts=1100),
    "gb200": Gpu(
        cuda_name="GB200", memory=186, hbm=8000, nvlink=900, network=50, watts=1200, domain=72, per_node=4, host=960
    ),
    "gb300": Gpu(
        cuda_name="GB300", memory=278, hbm=8000, nvlink=900, network=100, watts=1400, domain=72, per_node=4, host=960
    ),
}


def gpu_named(name: str, key: str = "gpu") -> Gpu:
    """Returns a GPU of the table, or of a YAML file: ``like``, a name of the table, and fields of `Gpu` that differ.

    Raises ConfigError, which names ``key``, for an unknown name, and for invalid keys and values of a file.
    """
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{key}={name}: neither a known GPU nor a file; known: {', '.join(GPUS)}")
    tree = yaml_text.read(path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a file of a GPU has keys: like, which names a known GPU, and what differs from it")
    given = dict(tree)
    like = given.pop("like", None)
    if like not in GPUS:
        raise ConfigError(f"{path}: like={like} must name the GPU that the file differs from: {', '.join(GPUS)}")
    base = GPUS[str(like)]
    kinds = [field.name for field in fields(Gpu)]
    for key, value in given.items():
        if key not in kinds:
            raise ConfigError(f"{path}: {key!r} is not a GPU's; keys: like, {', '.join(kinds)}")
        whole = key in ("domain", "per_node")
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and value > 0
        if not (isinstance(value, str) if key == "cuda_name" else right):
            what = "a name" if key == "cuda_name" else f"a{' whole' * whole} number above 0"
            raise ConfigError(f"{path}: {key}={value!r} must be {what}")
    changed: Gpu = replace(base, **given)
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of the formulas: shares of peaks, and costs that follow from no data sheet.

    ``gemm`` and ``gemm_fp8``: shares of the peak of large products; of ``tile`` rows or columns a product has half of
    that. ``power``: exponent of a GPU's watts per TFLOP/s, as Blackwell's clocks fall under load. ``attention``: share
    of the peak. ``passes``: reads or writes of a layer's hidden states between products. ``links``: share of NVLink's
    and the network's rates; ``plain``: of those, by an all-to-all without kernels of its own. ``hidden``: share of
    messages that overlapping hides. ``host``: seconds to launch one layer's forward pass. ``imbalance``: rows of the
    fullest experts over the mean, with natural routing. ``age``: share of time a month that an older stack takes more.
    ``fixed``: seconds that every step adds to the others.
    """

    gemm: float
    gemm_fp8: float
    tile: float
    power: float
    attention: float
    passes: float
    links: float
    plain: float
    hidden: float
    host: float
    imbalance: float
    age: float
    fixed: float


PRIOR = Constants(
    gemm=0.75,
    gemm_fp8=0.65,
    tile=100.0,
    power=0.5,
    attention=0.55,
    passes=15.0,
    links=0.6,
    plain=0.6,
    hidden=0.6,
    host=8e-4,
    imbalance=1.15,
    age=0.015,
    fixed=0.3,
)
"""Physical values, towards which the fit is drawn; constants that are not fitted keep these values."""
FITTED = replace(PRIOR, gemm=0.648, gemm_fp8=0.842, attention=0.589, links=0.659, imbalance=1.156, fixed=0.328)
"""Constants fitted to bench/published_runs.json by bench/step_time.py, which free six of them."""
RANGE = (0.75, 1.3)
"""The factors of the predicted rate of training between which a measured one is expected (docs/cluster.md)."""
MEMORY = 0.8  # share of a GPU's memory rate that kernels reach; not fitted: ``passes`` would take it back
