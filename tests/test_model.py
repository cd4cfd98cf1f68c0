"""The network against openai-whisper with the same real weights, and its caches by themselves."""

import pytest
import torch
import whisper
from conftest import random_model
from reference import openai_model

from chunk_audio import load_audio, log_mel, pad_or_trim
from generate import CHECKPOINTS
from model import MODEL_SIZES, ModelArgs, Whisper, sinusoids

# fp32 sums of up to 2048 terms in another order than the reference's
LOGITS_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def mel(samples) -> torch.Tensor:
    """Three different windows of the bundled samples, [3, 80, 3000]."""
    long = load_audio(samples / "long.flac")
    windows = [load_audio(samples / "short.wav"), long[:480_000], long[480_000:]]
    return log_mel(torch.stack([pad_or_trim(window) for window in windows]), 80)


def positions(B: int, S: int) -> torch.Tensor:
    return torch.arange(S).expand(B, S)


@pytest.mark.parametrize("name", ["tiny.en", "base"])
@pytest.mark.parametrize("B", [1, 3])
def test_encoder_and_teacher_forced_logits_equal_openai(name, B, mel, request):
    model, tokenizer = request.getfixturevalue(name.replace(".", "_"))
    reference = openai_model(CHECKPOINTS / name / "model.safetensors")
    text = tokenizer.encode(" The tide came in slowly that morning, and then it left.")
    prompt = tokenizer.sot_sequence("en", "transcribe", timestamps=False)
    tokens = torch.tensor([*prompt, *text]).expand(B, -1)
    with torch.no_grad():
        audio_features = model.encoder(mel[:B])
        expected_features = reference.encoder(mel[:B])
        assert (audio_features - expected_features).abs().max() <= LOGITS_TOLERANCE
        model.setup_caches(B)
        model.decoder.start_window(audio_features)
        logits = model.decoder.logits(model.decoder(tokens, positions(*tokens.shape)))
        expected = reference.decoder(tokens, expected_features)
    assert (logits - expected).abs().max() <= LOGITS_TOLERANCE


def test_prefill_and_single_steps_equal_one_pass():
    """Rows stand at different positions, as they do once one has taken a new window."""
    model = random_model()
    model.setup_caches(2)
    tokens = torch.randint(0, 50_000, (2, 12), generator=torch.Generator().manual_seed(1))
    audio_features = torch.randn(2, 1500, 64, generator=torch.Generator().manual_seed(2))
    model.decoder.start_window(audio_features)
    full = model.decoder.logits(model.decoder(tokens, positions(2, 12)))

    model.decoder.start_window(audio_features)
    begin = [5, 3]  # tokens of each row that are read in one pass
    for row, S in enumerate(begin):
        rows = slice(row, row + 1)
        model.decoder(tokens[rows, :S], positions(1, S), rows)
    for step in range(7):
        pos = torch.tensor(begin)[:, None] + step
        logits = model.decoder.logits(model.decoder(tokens.gather(1, pos), pos))
        for row in range(2):
            expected = full[row, begin[row] + step]
            assert torch.allclose(logits[row, 0], expected, atol=1e-4), (row, step)


def test_a_new_window_leaves_nothing_of_the_old_one():
    model = random_model()
    model.setup_caches(1)
    tokens, first = torch.tensor([[7, 8, 9]]), torch.randn(1, 1500, 64)
    model.decoder.start_window(first)
    expected = model.decoder(tokens, positions(1, 3)).clone()
    model.decoder.start_window(torch.randn(1, 1500, 64))
    model.decoder(torch.randint(0, 50_000, (1, 400)), positions(1, 400))
    model.decoder.start_window(first)
    assert torch.equal(model.decoder(tokens, positions(1, 3)), expected)


def test_starting_one_row_leaves_the_others_alone():
    model = random_model()
    model.setup_caches(3)
    model.decoder.start_window(torch.randn(3, 1500, 64))
    tokens = torch.randint(0, 50_000, (3, 4))
    before = model.decoder(tokens, positions(3, 4)).clone()
    model.decoder.start_window(torch.randn(1, 1500, 64), slice(1, 2))
    after = model.decoder(tokens, positions(3, 4))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.allclose(before[1], after[1])


def test_position_beyond_the_context_raises():
    model = random_model()
    model.setup_caches(1)
    with pytest.raises(IndexError):
        model.decoder(torch.tensor([[1]]), torch.tensor([[448]]))


# Source: parameter counts published with the models (OpenAI model card, distil-whisper README), M
PUBLISHED_M = {
    "tiny": 39, "base": 74, "small": 244, "medium": 769, "large-v2": 1550, "large-v3": 1550,
    "large-v3-turbo": 809, "distil-small.en": 166, "distil-medium.en": 394,
    "distil-large-v2": 756, "distil-large-v3": 756,
}  # fmt: skip


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_every_size_builds_with_the_published_parameter_count(name):
    args = ModelArgs.from_name(name)
    assert args.head_dim == 64
    with torch.device("meta"):
        model = Whisper(args)
    expected = PUBLISHED_M.get(name.removesuffix(".en"), PUBLISHED_M.get(name))
    if expected:
        # the published figures of the small sizes count the key biases that Whisper lacks
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert count == pytest.approx(expected, rel=0.04)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'distil-large'.*large-v3-turbo"):
        ModelArgs.from_name("distil-large")


def test_dimensions_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of n_head"):
        ModelArgs(n_mels=80, n_vocab=51865, dim=100, n_head=6, n_audio_layer=1, n_text_layer=1)


def test_sinusoids_equal_openai():
    assert torch.allclose(sinusoids(1500, 384), whisper.model.sinusoids(1500, 384), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close(dtype, base, mel):
    """Tolerance: half precision keeps 11 (fp16) or 8 (bf16) bits of logits of about 30."""
    model, tokenizer = base
    prompt = torch.tensor([tokenizer.sot_sequence("en", "transcribe", timestamps=False)])
    half = Whisper(model.args)
    half.load_state_dict(model.state_dict())
    half = half.to(dtype).eval().requires_grad_(False)
    logits = []
    for network in (model, half):
        network.setup_caches(1)
        network.decoder.start_window(network.encoder(mel[:1].to(network.dtype)))
        hidden = network.decoder(prompt, positions(*prompt.shape))
        logits.append(network.decoder.logits(hidden)[0, -1])
    assert logits[1].dtype == torch.float32
    assert (logits[0] - logits[1]).abs().max() < (0.2 if dtype == torch.float16 else 1.5)
    assert logits[0].argmax() == logits[1].argmax()
