"""The C++ operators of quantized models on a CPU: compile them once, load them, describe them.

int8_kernels.cpp: attend_one, a decode step's attention over fp32 or int8 caches, and int8_linear;
attention_kernel.cpp: attend_all, the encoder's attention, for AVX-512 with VNNI and BF16. Where
they cannot be compiled, the same arithmetic runs as plain torch.
"""

import functools
import os
import platform
import re
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, library

SOURCES = ("int8_kernels.cpp", "attention_kernel.cpp")
STALE_LOCK_S = 300  # s, several times what a build takes


@functools.cache
def load_kernels() -> bool:
    """Compile and load the operators; False, with one warning, where that is impossible.

    The first call takes half a minute; the result stays in a cache folder, named after this
    processor, whose own instructions it uses.
    """
    from torch.utils import cpp_extension  # late: it adds to the module search path

    try:
        folder = _build_folder()
        cpp_extension.load(
            name=folder.name,
            sources=[str(Path(__file__).with_name(source)) for source in SOURCES],
            build_directory=str(folder),
            extra_cflags=["-O3", "-march=native", "-fopenmp"],
            is_python_module=False,
        )
    except (OSError, RuntimeError, ImportError) as error:
        remedy = "quantized weights and caches run as plain, slower torch; g++ and ninja help"
        print(f"warning: cannot compile {SOURCES} ({first_line(error)}): {remedy}", file=sys.stderr)
        return False
    _describe_results()
    return True


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
    return f"{zlib.crc32((flags[0] if flags else platform.machine()).encode()):08x}"


def _build_folder() -> Path:
    """Where the operators are built, without the lock of a build that was killed long ago."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = Path(root) / f"whisper_fast_{processor_id()}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"  # torch waits for it for ever
    if lock.exists() and time.time() - lock.stat().st_mtime > STALE_LOCK_S:
        lock.unlink()
    return folder


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
