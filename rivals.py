"""Other Whisper programs behind one signature, for `eval.py` and `benchmark.py`.

Each runs the same weights, greedy, with its own defaults for fallback and no carried context. They
are development dependencies, imported only when asked for.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

# (file, language code) -> text, encoder runs and retries; None where a program does not tell
System = Callable[[Path, str], tuple[str, int | None, int | None]]
RIVALS = (
    "faster-whisper",
    "faster-whisper-batched",
    "openai-whisper",
    "transformers",
    "whisper.cpp",  # known by name only: nothing here writes its weights
)


def add_rival_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ct2_path", help="CTranslate2 folder of the same weights, for faster-whisper")
    add("--ct2_type", default="int8", help="compute type of faster-whisper")
    add("--openai_path", help="OpenAI .pt file of the same weights, for openai-whisper")
    add("--hf_path", help="Hugging Face folder of the same weights, for transformers")


def load_rival(name: str, args: argparse.Namespace) -> System:
    """Load a rival. Raises: ValueError where its weights were not given; ImportError."""
    if name == "whisper.cpp":
        raise ImportError("it has no Python package that reads the weights used here")
    option = {"openai-whisper": "openai_path", "transformers": "hf_path"}.get(name, "ct2_path")
    if not getattr(args, option):
        raise ValueError(f"{name} needs --{option}")
    if name == "openai-whisper":
        return _openai(args.openai_path)
    if name == "transformers":
        return _transformers(args.hf_path)
    batch_size = args.batch_size if name.endswith("batched") else 1
    return _faster_whisper(args.ct2_path, args.ct2_type, batch_size)


class RivalProcess:
    """A rival in a process of its own, so that its threads and memory are not those of ours.

    Raises what loading or transcribing raised there.
    """

    def __init__(self, name: str, args: argparse.Namespace, peak_memory_gb: Callable[[], float]):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        serve = (name, args, peak_memory_gb, theirs)
        self._process = context.Process(target=_serve, args=serve, daemon=True)
        self._process.start()
        self.memory_gb = 0.0  # peak so far
        self._answer()

    def __call__(self, path: Path, language: str) -> tuple[str, None, None]:
        self._connection.send((path, language))
        return self._answer()

    def _answer(self):
        answer, self.memory_gb = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(
    name: str, args: argparse.Namespace, peak_memory_gb: Callable[[], float], pipe: Connection
) -> None:
    """Load a rival and answer every (path, language) until the other side is gone."""
    system: System | None = None
    while True:
        try:
            if system is None:
                answer, system = None, load_rival(name, args)
            else:
                answer = system(*pipe.recv())
        except EOFError:
            return
        except (ImportError, ValueError, OSError, RuntimeError) as error:
            answer = type(error)(str(error))
        pipe.send((answer, peak_memory_gb()))
        if system is None:
            return


def _faster_whisper(folder: str, compute_type: str, batch_size: int) -> System:
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    model = WhisperModel(folder, device="cpu", compute_type=compute_type)
    batched = BatchedInferencePipeline(model)

    def run(path: Path, language: str) -> tuple[str, None, None]:
        common = {"language": language, "beam_size": 1}
        if batch_size > 1:
            segments, _ = batched.transcribe(str(path), batch_size=batch_size, **common)
        else:
            segments, _ = model.transcribe(str(path), condition_on_previous_text=False, **common)
        return "".join(segment.text for segment in segments), None, None

    return run


def _openai(pt_path: str) -> System:
    import whisper

    model = whisper.load_model(pt_path, device="cpu")

    def run(path: Path, language: str) -> tuple[str, None, None]:
        result = model.transcribe(
            str(path), language=language, fp16=False, condition_on_previous_text=False
        )
        return result["text"], None, None

    return run


def _transformers(folder: str) -> System:
    import transformers

    pipe = transformers.pipeline("automatic-speech-recognition", folder, device="cpu")

    def run(path: Path, language: str) -> tuple[str, None, None]:
        kwargs = {"language": language, "num_beams": 1}
        return pipe(str(path), return_timestamps=True, generate_kwargs=kwargs)["text"], None, None

    return run
