from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    torch: str
    compiler: str
    cuda: bool
    cuda_archs: str
    nvcc: str
    cpu_levels: list[str]

def build_info() -> BuildInfo: ...
def cpu_levels() -> list[str]: ...
def cpu_level() -> str: ...
def set_cpu_level(name: str) -> None: ...

CHUNK: int
MAX_BUFFERS: int
SEGMENT_WORDS: int
SCALAR_WORDS: int
GROUP_WORDS: int
SCALAR_FLAGS: int
FLAG_ACTIVE: int
FLAG_AMSGRAD: int
FLAG_L2: int
NORM_WORDS: int
NORM_LIMBS: int
NORM_NON_FINITE: int
NORM_NAN: int
NORM_OVERFLOW: int
CONTROL_CONDITIONS: int
CONTROL_FOUND_INF: int
CONTROL_SCALE: int
CONTROL_MODIFIED: int
CONTROL_IN_BACKWARD: int
CONTROL_IN_CLIP: int
CONTROL_NON_FINITE_GRADS: int
CONTROL_BACKWARD_RANKS: int
CONTROL_BACKWARDS: int
CONTROL_FACTS: int
CONTROL_FLAGS: int
FACT_WORDS: int
SKIPPED_WORDS: int
GROUP_MODE: int
GROUP_AMSGRAD: int
GROUP_MAXIMIZE: int
GROUP_DECOUPLED: int
GROUP_LR_AT: int
GROUP_LR_IS_FP64: int
