"""The way of a window on a device that is not the CPU.

Where there is no GPU, the `meta` device stands in for one. Nothing is computed, but torch's fake
tensors refuse an operation that mixes devices as a GPU would. The rest skips.
"""

import dataclasses

import pytest
import torch
from conftest import ROOT, TINY_ARGS, random_model
from jiwer import wer
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import compile_step
from align import alignment_attention
from chunk_audio import Chunk, mel_filters
from compile_step import compile_decode_step, compile_encoder
from decode import Stats, _read_prompt, decode_one_token, encode_chunks, setup_decoding
from generate import GenerateOptions, build_model, load_model, transcribe
from kv_cache import make_cache
from model import Whisper
from quantize import QuantizeOptions, quantize_checkpoint, quantize_state_dict
from tokenizer import Tokenizer

FORMATS = [None, QuantizeOptions("int8"), QuantizeOptions("int4")]
IDS = ["fp16", "int8", "int4"]


def model_on_meta(options: QuantizeOptions | None) -> Whisper:
    """A network as generate.py loads it for another device, in float16, without values."""
    state_dict, settings = random_model(TINY_ARGS).state_dict(), None
    if options is not None:
        state_dict, settings, _ = quantize_state_dict(state_dict, TINY_ARGS, options)
    model = build_model(state_dict, TINY_ARGS, settings, torch.device("meta"))
    model.set_alignment_heads([(1, 0)])
    return model


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8], ids=["cache16", "cache8"])
@pytest.mark.parametrize("options", FORMATS, ids=IDS)
@torch.no_grad()
def test_nothing_is_left_on_the_cpu(options, cache_dtype, tiny_en):
    model = model_on_meta(options)
    mel_filters(80)  # kept for the process: not the fake one
    with FakeTensorMode(allow_non_fake_inputs=True):
        decode_on_meta(model, tiny_en[1], cache_dtype)


def decode_on_meta(model: Whisper, tokenizer: Tokenizer, cache_dtype: torch.dtype) -> None:
    model.make_cache, model.cache_dtype = make_cache, cache_dtype
    setup_decoding(model, tokenizer, 2, timestamps=True)
    chunks = [Chunk(0, 480_000), Chunk(320_000, 500_000)]
    for window in encode_chunks(model, torch.zeros(500_000), chunks, Stats()):
        model.decoder.start_window(window.audio_features, slice(1, 2))
    state, prompt = model.decode_state, torch.tensor([tokenizer.sot], device="meta")
    logits = _read_prompt(model, 1, prompt)
    state.start_row(1, prompt, 40, 0.5)
    for top_k in (None, 5):
        decode_one_token(model, state, top_k)
    attention = alignment_attention(model, 1, 0, 2, 750)
    tensors = [logits, attention, *model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert window.audio_features.dtype == torch.float16 and logits.dtype == torch.float32


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def test_compiled_encoder_equals_eager(monkeypatch, fresh_compiler):
    """One graph for all blocks and each size of a group: the compiler is on the CPU here."""
    monkeypatch.setattr(compile_step, "GPU_WINDOWS", 2)
    model = random_model(dataclasses.replace(TINY_ARGS, n_audio_layer=3))
    mel = torch.randn(3, 80, 3000)
    expected = torch.cat([model.encoder(mel[:2]), model.encoder(mel[2:])])
    counters.clear()
    compile_encoder(model)
    compile_encoder(model)  # no more is done
    ours = torch.cat([model.encoder(mel[:2]), model.encoder(mel[2:])])
    assert counters["stats"]["unique_graphs"] == 2
    assert torch.allclose(ours, expected, atol=1e-4)  # sums in another order


# ---- on a GPU --------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA")
SHORT, ENGLISH = ROOT / "samples" / "short.wav", GenerateOptions(language="en")


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", FORMATS, ids=IDS)
def test_text_on_a_gpu(options, compiled, tiny_en, tmp_path):
    """float16 and 8 bits round in other places than the CPU does: a word in ten may differ."""
    expected = transcribe(*tiny_en, SHORT, ENGLISH).text
    path = ROOT / "checkpoints" / "tiny.en" / "model.safetensors"
    if options is not None:
        for name in ("model.safetensors", "tokenizer.model"):
            (tmp_path / name).symlink_to(path.with_name(name))
        path = quantize_checkpoint(tmp_path / "model.safetensors", options)
    model, tokenizer = load_model(path, "cuda", cache_dtype="int8" if options else None)
    step = compile_decode_step(model.device) if compiled else decode_one_token
    result = transcribe(model, tokenizer, SHORT, ENGLISH, step)
    assert wer(expected, result.text) <= (0.3 if options and options.mode == "int4" else 0.1)
    assert {"mel", "encoder", "prefill", "decode"} <= result.stats.seconds.keys()
    assert not result.stats.pending
    n_graphs = counters["stats"]["unique_graphs"]
    assert transcribe(model, tokenizer, SHORT, ENGLISH, step).text == result.text
    assert counters["stats"]["unique_graphs"] == n_graphs  # nothing compiles any more


@needs_gpu
def test_float32_on_a_gpu_equals_the_cpu(tiny_en, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # 10 bits in the convolutions
    expected = transcribe(*tiny_en, ROOT / "samples" / "long.flac", ENGLISH)
    model, tokenizer = load_model("tiny.en", "cuda", precision="fp32")
    result = transcribe(model, tokenizer, ROOT / "samples" / "long.flac", ENGLISH)
    assert result.text == expected.text
    for ours, theirs in zip(result.segments, expected.segments, strict=True):
        assert ours.start_s == pytest.approx(theirs.start_s, abs=0.1)
