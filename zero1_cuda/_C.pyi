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
