"""Other Whisper programs behind one signature, for `eval.py` and `benchmark.py`.

Each runs the same weights on the same device (whisper.cpp: on the one that it was built for),
greedy, with its own defaults for fallback and no carried context. They are development
dependencies, imported only when asked for. As a script, this file is the process behind
`RivalProcess`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import soundfile
import soxr

from host_memory import peak_host_memory_gb

# (file, language code) -> text, encoder runs and retries; None where a program does not tell
System = Callable[[Path, str], tuple[str, int | None, int | None]]
_WEIGHTS = {  # the option that gives each rival its weights
    "faster-whisper": "ct2_path",
    "faster-whisper-batched": "ct2_path",
    "openai-whisper": "openai_path",
    "transformers": "hf_path",
    "whisper.cpp": "ggml_path",
}
RIVALS = tuple(_WEIGHTS)


def add_rival_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ct2_path", help="CTranslate2 folder of the same weights, for faster-whisper")
    add("--ct2_type", default="int8", help="compute type of faster-whisper")
    add("--openai_path", help="OpenAI .pt file of the same weights, for openai-whisper")
    add("--hf_path", help="Hugging Face folder of the same weights, for transformers")
    add("--ggml_path", help="ggml file of the same weights, for whisper.cpp (pywhispercpp)")


def _check_weights(name: str, args: argparse.Namespace) -> None:
    """Raises: ValueError where a rival's weights were not given."""
    option = _WEIGHTS[name]
    if not getattr(args, option):
        raise ValueError(f"{name} needs --{option}")


def load_rival(name: str, args: argparse.Namespace) -> System:
    """Load a rival. Raises: ValueError where its weights were not given; ImportError."""
    _check_weights(name, args)
    if name == "openai-whisper":
        return _openai(args.openai_path, args.device)
    if name == "transformers":
        return _transformers(args.hf_path, args.device)
    if name == "whisper.cpp":
        return _whisper_cpp(args.ggml_path)
    batch_size = args.batch_size if name.endswith("batched") else 1
    return _faster_whisper(args.ct2_path, args.ct2_type, batch_size, args.device)


class RivalProcess:
    """A rival in a process of its own, so that its threads and memory are not those of ours.

    Raises: ValueError where its weights were not given; RuntimeError with what went wrong there.
    """

    def __init__(self, name: str, args: argparse.Namespace):
        _check_weights(name, args)
        names = {*_WEIGHTS.values(), "ct2_type", "batch_size", "device"}
        options = {name: getattr(args, name) for name in names}
        command = [sys.executable, __file__, name, json.dumps(options, default=str)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.memory_gb = 0.0  # peak so far
        self._answer()

    def __call__(self, path: Path, language: str) -> tuple[str, None, None]:
        print(json.dumps([str(path), language]), file=self._process.stdin, flush=True)
        return self._answer(), None, None

    def _answer(self) -> str:
        answer = json.loads(self._process.stdout.readline() or '{"error": "its process died"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.memory_gb = answer["memory_gb"]
        return answer["text"]


def _serve(name: str, options: dict) -> None:
    """Load a rival, then answer each line [path, language] of stdin; what it prints is not ours."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        text, system = "", load_rival(name, argparse.Namespace(**options))
        while True:
            answer = {"text": text, "memory_gb": peak_host_memory_gb()}
            print(json.dumps(answer), file=out, flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            text, *_ = system(*json.loads(line))
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)


def _faster_whisper(folder: str, compute_type: str, batch_size: int, device: str) -> System:
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    model = WhisperModel(folder, device=device, compute_type=compute_type)
    batched = BatchedInferencePipeline(model)

    def run(path: Path, language: str) -> tuple[str, None, None]:
        common = {"language": language, "beam_size": 1}
        if batch_size > 1:
            segments, _ = batched.transcribe(str(path), batch_size=batch_size, **common)
        else:
            segments, _ = model.transcribe(str(path), condition_on_previous_text=False, **common)
        return "".join(segment.text for segment in segments), None, None

    return run


def _openai(pt_path: str, device: str) -> System:
    import whisper

    model = whisper.load_model(pt_path, device=device)
    common = {"fp16": device != "cpu", "condition_on_previous_text": False}

    def run(path: Path, language: str) -> tuple[str, None, None]:
        return model.transcribe(str(path), language=language, **common)["text"], None, None

    return run


def _transformers(folder: str, device: str) -> System:
    import transformers

    pipe = transformers.pipeline("automatic-speech-recognition", folder, device=device)

    def run(path: Path, language: str) -> tuple[str, None, None]:
        kwargs = {"language": language, "num_beams": 1}
        return pipe(str(path), return_timestamps=True, generate_kwargs=kwargs)["text"], None, None

    return run


def _whisper_cpp(ggml_path: str) -> System:
    from pywhispercpp.model import Model

    model = Model(ggml_path, redirect_whispercpp_logs_to=None, print_progress=False)

    def run(path: Path, language: str) -> tuple[str, None, None]:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        samples = soxr.resample(samples.mean(axis=1), rate, 16_000)
        segments = model.transcribe(samples, language=language, no_context=True)
        return " ".join(segment.text for segment in segments), None, None

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve one rival to benchmark.py, over a pipe.")
    parser.add_argument("name", choices=RIVALS)
    parser.add_argument("options", type=json.loads, help="paths of weights and so on, as JSON")
    args = parser.parse_args()
    _serve(args.name, args.options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
