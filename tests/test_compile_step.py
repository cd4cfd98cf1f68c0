"""Steps compiled ahead of time: the eager results, for any weights, kept on disk."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY_ARGS, decode_chunks, quantized, random_model

import compile_step
import cpu_kernels
import long_audio
from chunk_audio import Chunk, load_audio
from compile_step import AheadOfTimeStep, compile_decode_step, package_path
from decode import decode_one_token, setup_decoding
from generate import GenerateOptions, transcribe
from kv_cache import make_cache
from quantize import QuantizeOptions

SAYS = "compiling the decode step for this batch size, once; it takes about half a minute"
HAS_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))
pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory):
    """An empty folder for packages, for this file's tests and the processes they start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "whisper_fast"


@pytest.fixture
def step() -> AheadOfTimeStep:
    return compile_decode_step(torch.device("cpu"))


def decoded(model, tokenizer, step, n_rows: int, **options) -> list[tuple[list[int], list[float]]]:
    """Tokens and word probabilities of each 4 s of a sample."""
    waveform = load_audio(ROOT / "samples" / "short.wav")
    chunks = [Chunk(start, start + 64_000) for start in range(0, 160_000, 32_000)]
    results = decode_chunks(model, tokenizer, waveform, chunks, n_rows, step, **options)
    return [(r.tokens, [word.prob for word in r.words]) for (r,) in results]


def assert_same(ours: list, expected: list) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
    for (_, a), (_, b) in zip(ours, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-4)  # float32 sums in another order


def moved(model, by: float) -> torch.nn.Module:
    """Another fine-tuning of a model: each weight of the decoder a little larger."""
    for parameter in model.decoder.layers.parameters():
        parameter.mul_(1 + by)
    return model


@pytest.mark.parametrize("n_rows", [1, 3])
def test_compiled_equals_eager(tiny_en, step, n_rows, cache_home):
    """One row is the size at which the compiler would take small tensors for constants."""
    model, tokenizer = tiny_en
    expected = decoded(model, tokenizer, decode_one_token, n_rows)
    assert_same(decoded(model, tokenizer, step, n_rows), expected)
    assert step.package is not None
    n_packages = len(list(cache_home.iterdir()))
    drawn = {"temperature": 0.8, "seed": 3}
    ours = decoded(model, tokenizer, step, n_rows, **drawn)
    assert_same(ours, decoded(model, tokenizer, decode_one_token, n_rows, **drawn))
    assert len(list(cache_home.iterdir())) == n_packages


def test_a_package_serves_other_weights(tiny_en, step, cache_home):
    model, tokenizer = tiny_en
    before = decoded(model, tokenizer, step, 3)
    packages = set(cache_home.iterdir())
    try:
        moved(model, 0.01)
        expected = decoded(model, tokenizer, decode_one_token, 3)
        assert expected != before
        for again in (step, compile_decode_step(model.device)):
            assert_same(decoded(model, tokenizer, again, 3), expected)
    finally:
        moved(model, 1 / 1.01 - 1)
    assert set(cache_home.iterdir()) == packages


def test_a_later_process_does_not_import_the_compiler(tiny_en, samples):
    """It costs seconds and 0.2 GB; the text is the eager one."""
    model, tokenizer = tiny_en
    options = GenerateOptions(language="en")
    expected = transcribe(model, tokenizer, samples / "short.wav", options, decode_one_token).text
    transcribe(model, tokenizer, samples / "short.wav", options, compile_decode_step(model.device))
    code = """if True:
        import sys, generate
        generate.main(sys.argv[1:])
        print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
    """
    flags = ["--model", "tiny.en", "--audio", str(samples / "short.wav"), "--compile"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [expected, "[]"]
    assert "warning" not in done.stderr and SAYS not in done.stderr


def small_int8() -> torch.nn.Module:
    _, model = quantized(QuantizeOptions("int8"), TINY_ARGS)
    model.make_cache, model.cache_dtype = make_cache, torch.int8
    return model


def test_int8_weights_and_caches(tiny_en, step):
    """The compiled step calls the C++ operators, or plain torch where they cannot be built."""
    model, tokenizer = small_int8(), tiny_en[1]
    logprobs = []
    for run in (decode_one_token, step):
        model.decode_state, model.n_rows = None, 0
        setup_decoding(model, tokenizer, 2)
        torch.manual_seed(0)
        model.decoder.start_window(torch.randn(2, 1500, model.args.dim))
        prompt = torch.tensor([tokenizer.sot])
        for row in range(2):
            model.decode_state.start_row(row, prompt, 448, 0.0)
        for _ in range(3):
            run(model, model.decode_state, None)
        logprobs.append(model.decode_state.logprobs[:, 1:4].clone())
    assert step.package is not None
    # float32 sums in another order may move an activation to the next of 255 steps
    assert torch.allclose(*logprobs, atol=0.05)


def test_packages_differ_where_their_code_does(tiny_en, monkeypatch):
    def path(n_rows=2, timestamps=False, top_k=None, model=None):
        model = model or random_model()
        setup_decoding(model, tiny_en[1], n_rows, timestamps)
        return package_path(compile_step.Step(model, model.decode_state, top_k))

    first = path()
    assert path() == first
    heads = random_model()
    heads.set_alignment_heads([(1, 0)])
    others = [path(3), path(timestamps=True), path(top_k=5), path(model=heads)]
    others.append(path(model=small_int8()))
    code = [(torch, "get_num_threads", lambda: 64), (torch, "__version__", "2.99")]
    code += [(cpu_kernels, "processor_id", lambda: "other"), (compile_step, "SOURCES", ())]
    for owner, name, value in code:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            others.append(path())
    assert len({first, *others}) == 10
    assert path() == first


def test_a_broken_package_is_made_anew(tiny_en, cache_home, capsys):
    model, tokenizer = random_model(), tiny_en[1]
    setup_decoding(model, tokenizer, 2)
    path = package_path(compile_step.Step(model, model.decode_state, None))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"not a package")
    step = compile_decode_step(model.device)
    step(model, model.decode_state, None)
    assert step.package is not None
    assert capsys.readouterr().err.splitlines() == [SAYS]
    assert path.stat().st_size > 100_000
    assert [path] == [p for p in path.parent.iterdir() if p.name.startswith(("tmp", path.name))]


def test_without_a_cache_folder_one_warning_is_given(tiny_en, tmp_path, monkeypatch, capsys):
    """A home that cannot be written, say: the tokens come all the same."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model, tokenizer = random_model(), tiny_en[1]
    step = compile_decode_step(model.device)
    for n_rows in (2, 3):
        setup_decoding(model, tokenizer, n_rows)
        model.decoder.start_window(torch.randn(n_rows, 1500, model.args.dim))
        model.decode_state.start_row(0, torch.tensor([tokenizer.sot]), 448, 0.0)
        step(model, model.decode_state, None)
        assert model.decode_state.input_pos[0] == 1
    assert capsys.readouterr().err.count("warning: decoding runs without --compile") == 1


def test_without_a_compiler_the_text_is_there_all_the_same(tiny_en, tmp_path, samples):
    """The flag asks for speed, so that one line on stderr is all that it may cost."""
    command = [sys.executable, "generate.py", "--model", "tiny.en", "--compile"]
    command += ["--audio", str(samples / "short.wav")]
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert done.returncode == 0
    assert done.stderr.count("warning: decoding runs without --compile") == 1
    expected = transcribe(*tiny_en, samples / "short.wav", GenerateOptions(language="en"))
    assert done.stdout.strip() == expected.text


def test_state_and_caches_have_the_same_rows(tiny_en):
    """Caches may be made anew between, as benchmark.py does for one window."""
    model, tokenizer = random_model(), tiny_en[1]
    setup_decoding(model, tokenizer, 8)
    model.setup_caches(1)
    setup_decoding(model, tokenizer, 1)
    assert len(model.decode_state.tokens) == model.n_rows == 1


def test_an_hour_is_compiled_by_default(tiny_en, monkeypatch):
    """The rule is the length alone, so that a command does the same in every run."""
    made = []

    def note(device):
        made.append(device)
        return decode_one_token

    monkeypatch.setattr(long_audio, "compile_decode_step", note)
    silence = torch.zeros(3600 * 16_000)
    transcribe(*tiny_en, silence[:-1])
    assert made == []
    transcribe(*tiny_en, silence)
    assert made == [torch.device("cpu")]
