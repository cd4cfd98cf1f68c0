"""`decode_one_token`, compiled: once for a kind of model, and kept on disk.

On a CPU the step is exported and compiled ahead of time into a package without weights. Later runs
load it in milliseconds, bind it to the tensors of their model, and never import the compiler, which
would take them seconds and 0.2 GB. It serves every model of the same shapes, types and code.
On other devices `torch.compile` does it in every process; on CUDA with CUDA graphs, and the blocks
of the encoder as well.

Leaves what a step is to `decode.py`, and when to compile to `long_audio.py`.
Source: torch's AOTInductor.
"""

import inspect
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from cpu_kernels import SOURCES, cache_path, first_line
from decode import GPU_WINDOWS, DecodeState, DecodeStep, decode_one_token
from model import Whisper


def compile_decode_step(device: torch.device) -> DecodeStep:
    """`decode_one_token` compiled: one graph for all steps, files and prompts of a batch size."""
    if device.type == "cpu":
        return AheadOfTimeStep()
    options = None
    if device.type == "cuda":
        options = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    return torch.compile(decode_one_token, options=options, fullgraph=True, dynamic=False)


def warm_up(model: Whisper, decode_step: DecodeStep, top_k: int | None) -> None:
    """Have a compiled step compile or load itself before anything is timed; once."""
    state = model.decode_state
    if isinstance(decode_step, AheadOfTimeStep):
        decode_step.bind(model, state, top_k)
    elif decode_step is not decode_one_token and state.warm != (decode_step, top_k):
        with torch._dynamo.config.patch(recompile_limit=64):  # of 8, for all models of a process
            for _ in range(3):  # CUDA graphs are recorded in the second call, then played
                decode_step(model, state, top_k)
            if model.device.type == "cuda":
                compile_encoder(model)
        state.warm = (decode_step, top_k)


def compile_encoder(model: Whisper) -> None:
    """Compile the encoder's blocks for the groups that `encode_chunks` makes on a GPU; once.

    All blocks share one graph a group size, so that 32 of them compile as fast as one. On a CPU it
    is not worth its time (NOTES.md).
    """
    if model.encoder.layers[0]._compiled_call_impl is not None:
        return
    for layer in model.encoder.layers:
        layer.compile(fullgraph=True, dynamic=False)
    n_ctx, dim = model.encoder.positions.shape
    for n in (1 << i for i in range(GPU_WINDOWS.bit_length())):
        model.encoder.layers[0](torch.zeros(n, n_ctx, dim, dtype=model.dtype, device=model.device))


class AheadOfTimeStep:
    """A DecodeStep that runs a package, which is made where it is not on disk yet.

    It is bound to the tensors that a model and a state have when they are first given; weights may
    then be changed in place only. Where no package can be made (no C++ compiler, say), one warning
    is given and the eager step runs.
    """

    def __init__(self):
        self.bound: tuple[DecodeState, int | None] | None = None  # what `tensors` belong to
        self.tensors: list[torch.Tensor] = []
        self.package: torch._C._aoti.AOTIModelPackageLoader | None = None
        self.has_failed = False

    def __call__(self, model: Whisper, state: DecodeState, top_k: int | None = None) -> None:
        self.bind(model, state, top_k)
        if self.package is None:
            decode_one_token(model, state, top_k)
        else:
            self.package.run(self.tensors)

    def bind(self, model: Whisper, state: DecodeState, top_k: int | None) -> None:
        """Load the package for this model and state, if another is loaded."""
        if self.bound == (state, top_k):
            return
        step = Step(model, state, top_k)
        self.bound, self.tensors, self.package = (state, top_k), list(step.tensors().values()), None
        if self.has_failed:
            return
        try:
            self.package = load_package(step)
        except Exception as error:  # noqa: BLE001 torch raises many kinds, and eager always works
            self.has_failed = True
            _say(f"warning: decoding runs without --compile: {first_line(error)}")


# ---- packages --------------------------------------------------------------------------------


class Step(nn.Module):
    """`decode_one_token` of one model and state, without inputs and outputs."""

    def __init__(self, model: Whisper, state: DecodeState, top_k: int | None):
        super().__init__()
        self.decoder, self.state, self.top_k = model.decoder, state, top_k

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a step reads and writes."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def forward(self) -> None:
        decode_one_token(self, self.state, self.top_k)


class _StepOfTensors(nn.Module):
    """The same with the tensors as inputs: the compiler must not take their values for constants.

    In a closure the step is no submodule, whose tensors would be constants again.
    """

    def __init__(self, step: Step):
        super().__init__()
        names = list(step.tensors())
        self.run = lambda tensors: torch.func.functional_call(
            step, dict(zip(names, tensors, strict=True)), ()
        )

    def forward(self, tensors: list[torch.Tensor]) -> None:
        self.run(tensors)


def load_package(step: Step) -> torch._C._aoti.AOTIModelPackageLoader:
    """The compiled step, made where it is not on disk or cannot be loaded; `run` it on tensors."""
    path = package_path(step)
    if path.exists():
        try:
            return _load(path)
        except RuntimeError:
            pass  # half a file, say: it is made anew
    _say("compiling the decode step for this batch size, once; it takes about half a minute")
    _compile(step, path)
    return _load(path)


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)  # not into the middle of a progress bar


def _load(path: Path) -> torch._C._aoti.AOTIModelPackageLoader:
    """What torch._inductor.aoti_load_package wraps, without importing the compiler."""
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)


def package_path(step: Step) -> Path:
    """Where the package of a step lies: named after everything that its code depends on."""
    parts = [torch.get_num_threads()]
    for name, module in step.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, torch.dtype))}
        parts += [name, type(module).__name__, plain]
    parts += [(name, t.shape, t.dtype, t.stride()) for name, t in step.tensors().items()]
    files = {inspect.getfile(type(module)) for module in step.modules()} | {__file__, *SOURCES}
    files |= {str(Path(__file__).with_name(name)) for name in ("cpu_kernels.py", "quantize.py")}
    parts += [Path(file).read_bytes() for file in sorted(files)]
    return cache_path(parts, ".pt2")


def _compile(step: Step, path: Path) -> None:
    """Export a step, compile it for this CPU, and write the package to `path`, whole or not."""
    import torch._inductor  # late: half a second and 0.2 GB
    from torch._inductor.utils import fresh_cache

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about its own code
        exported = torch.export.export(_StepOfTensors(step), (list(step.tensors().values()),))
        package = f"{folder}/{path.name}"
        with fresh_cache(dir=folder):  # or another process may build in the same folder
            torch._inductor.aoti_compile_and_package(
                exported,
                package_path=package,
                # 150 MB a piece, of use only to somebody who compiles often
                inductor_configs={"aot_inductor.precompile_headers": False},
            )
        os.replace(package, path)
