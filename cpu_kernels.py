"""The C++ operators of quantized models on a CPU: compile them once, load them, describe them.

int8_kernels.cpp: attend_one, a decode step's attention over fp32 or int8 caches, and int8_linear;
attention_kernel.cpp: attend_all, the encoder's attention, for AVX-512 with VNNI and BF16. Where
they cannot be compiled, plain torch runs instead, with other roundings.
"""

import functools
import hashlib
import os
import platform
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, library

SOURCES = tuple(
    str(Path(__file__).with_name(name)) for name in ("int8_kernels.cpp", "attention_kernel.cpp")
)
FLAGS = ("-O3", "-march=native", "-fopenmp")


@functools.cache
def load_kernels() -> bool:
    """Load the operators; False, with one warning, where that is impossible.

    The first call takes half a minute to compile them; the result stays on disk.
    """
    try:
        path = cache_path([FLAGS, *(Path(source).read_bytes() for source in SOURCES)], ".so")
        try:
            torch.ops.load_library(path)
        except OSError:  # not there yet, or half a file
            _build(path)
    except (OSError, RuntimeError, ImportError) as error:
        names = ", ".join(Path(source).name for source in SOURCES)
        remedy = "quantized weights and caches run as plain, slower torch; g++ and ninja help"
        print(f"warning: cannot compile {names} ({first_line(error)}): {remedy}", file=sys.stderr)
        return False
    _describe_results()
    return True


def _build(path: Path) -> None:
    """Compile and load the operators, and keep them at `path`, whole or not.

    In a folder of its own, so that no process waits for another, or for one that was killed.
    """
    from torch.utils import cpp_extension  # late: it adds to the module search path

    scripts = sysconfig.get_path("scripts")  # where pip puts ninja
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + scripts
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = cpp_extension.load(
            name="whisper_fast",
            sources=list(SOURCES),
            build_directory=folder,
            extra_cflags=list(FLAGS),
            is_python_module=False,
        )
        os.replace(built, path)


def cache_path(parts: list, suffix: str) -> Path:
    """Where something compiled for this processor is kept, named after what it depends on."""
    parts = [torch.__version__, processor_id(), *parts]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(repr(parts).encode()).hexdigest() + suffix
    return Path(root) / "whisper_fast" / name


def first_line(error: Exception) -> str:
    """What a compiler's long error says first, or its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def processor_id() -> str:
    """Names the instructions that this processor has, as code made for it may use them all.

    Only its family where the system does not list them (not Linux).
    """
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^(flags|Features)\b.*", text, re.M)  # on x86, on ARM
    return flags[0] if flags else platform.machine()


def _describe_results() -> None:
    """What the operators return, for torch.compile, which does not run them."""

    @library.register_fake("whisper_fast::attend_one")
    def _(q, k, v, k_scales, v_scales, mask):
        return q.new_empty(q.shape, dtype=torch.float32)

    @library.register_fake("whisper_fast::int8_linear")
    def _(x, packed, scales, bias):
        return x.new_empty((*x.shape[:-1], len(scales)), dtype=torch.float32)

    @library.register_fake("whisper_fast::attend_all")
    def _(q, k, v):
        B, H, S, D = q.shape
        return q.new_empty((B, S, H, D)).transpose(1, 2)


def attend_all_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a mask, [B, H, S, D] each, as `F.scaled_dot_product_attention`.

    In bfloat16 on a processor with AMX. Elsewhere with int8 queries and keys and bfloat16
    probabilities and values where the operator is there: 0.2 to 0.7 % error of a layer's output on
    speech (Whisper base), 2.7 times as fast.
    """
    fits = q.dtype == torch.float32 and q.device.type == "cpu" and q.shape[-1] == 64
    if fits and load_kernels():
        if torch.ops.whisper_fast.has_tiles():
            return F.scaled_dot_product_attention(*(x.bfloat16() for x in (q, k, v))).float()
        if torch.ops.whisper_fast.has_attend_all():
            return torch.ops.whisper_fast.attend_all(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)
