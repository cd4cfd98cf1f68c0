"""`decode_one_token`, compiled: once for a kind of model, and kept on disk.

On a CPU the step is exported and compiled ahead of time into a package without weights. Later runs
load it in milliseconds, bind it to the tensors of their model, and never import the compiler, which
would take them seconds and 0.2 GB. It serves every model of the same shapes, types and code.
On other devices `torch.compile` does it, with CUDA graphs, in every process.

Leaves what a step is to `decode.py`, and when to compile to `long_audio.py`.
Source: torch's AOTInductor.
"""

import hashlib
import inspect
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

from cpu_kernels import SOURCES, processor_id
from decode import DecodeState, DecodeStep, decode_one_token
from model import Whisper


def compile_decode_step(device: torch.device) -> DecodeStep:
    """`decode_one_token` compiled: one graph for all steps, files and prompts of a batch size."""
    if device.type == "cpu":
        return AheadOfTimeStep()
    options = None
    if device.type == "cuda":  # tuning also lets int8 weights be read without a 16-bit copy
        options = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    return torch.compile(decode_one_token, options=options, fullgraph=True, dynamic=False)


def warm_up(model: Whisper, decode_step: DecodeStep, top_k: int | None) -> None:
    """Have a compiled step compile itself, on idle rows, before anything is timed; once."""
    state = model.decode_state
    if state.warm != (decode_step, top_k):
        for _ in range(3):  # CUDA graphs are recorded in the second call and played from the third
            decode_step(model, state, top_k)
        state.warm = (decode_step, top_k)


class _Step(nn.Module):
    """A step that is given the tensors of a model and its state, which it reads and writes.

    As inputs they are nothing that the compiler knows values of: any weights fit its package.
    """

    def __init__(self, model: Whisper, state: DecodeState, top_k: int | None):
        super().__init__()
        self.decoder, self.state, self.top_k = model.decoder, state, top_k

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def forward(self) -> None:
        decode_one_token(self, self.state, self.top_k)


class _Stateless(nn.Module):
    def __init__(self, step: _Step):
        super().__init__()
        self.call = lambda tensors: torch.func.functional_call(step, tensors, ())
        self.names = list(step.tensors())

    def forward(self, tensors: list[torch.Tensor]) -> None:
        self.call(dict(zip(self.names, tensors, strict=True)))


class AheadOfTimeStep:
    """A DecodeStep that runs a package, which is made where it is not on disk yet.

    Where it cannot be made (no C++ compiler, say), one warning is given and the eager step runs.
    """

    def __init__(self):
        self.bound: tuple[DecodeState, int | None] | None = None  # what `tensors` belong to
        self.tensors: list[torch.Tensor] = []
        self.package: torch._C._aoti.AOTIModelPackageLoader | None = None

    def __call__(self, model: Whisper, state: DecodeState, top_k: int | None = None) -> None:
        if self.bound is None or self.bound[0] is not state or self.bound[1] != top_k:
            self._bind(model, state, top_k)
        if self.package is None:
            decode_one_token(model, state, top_k)
        else:
            self.package.run(self.tensors)

    def _bind(self, model: Whisper, state: DecodeState, top_k: int | None) -> None:
        step = _Step(model, state, top_k)
        self.bound, self.tensors = (state, top_k), list(step.tensors().values())
        self.package = None
        path = package_path(step)
        try:
            if not path.exists():
                _compile(step, path)
            # What torch._inductor.aoti_load_package wraps, without importing the compiler.
            self.package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        except (RuntimeError, OSError, ImportError) as error:
            path.unlink(missing_ok=True)  # a broken one would fail for ever
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"warning: decoding runs without --compile: {reason}", file=sys.stderr)


def package_path(step: nn.Module) -> Path:
    """Where the package of a step lies: named after everything that its code depends on."""
    parts = [torch.__version__, torch.get_num_threads(), processor_id()]
    for name, module in step.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, torch.dtype))}
        parts += [name, type(module).__name__, plain]
    parts += [
        (name, tensor.shape, tensor.dtype, tensor.stride())
        for name, tensor in step.tensors().items()
    ]
    files = {inspect.getfile(type(module)) for module in step.modules()} | {__file__}
    files |= {str(Path(__file__).with_name(source)) for source in SOURCES}
    parts += [Path(file).read_bytes() for file in sorted(files)]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "whisper_fast" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.pt2"


def _compile(step: nn.Module, path: Path) -> None:
    """Export a step, compile it for this CPU, and write the package to `path`, whole or not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    import torch._inductor  # late: half a second and 0.2 GB

    with tempfile.TemporaryDirectory(dir=path.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about its own code
        package = f"{folder}/{path.name}"
        exported = torch.export.export(_Stateless(step), (list(step.tensors().values()),))
        torch._inductor.aoti_compile_and_package(exported, package_path=package)
        os.replace(package, path)
