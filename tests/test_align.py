"""Word times against openai-whisper's alignment, part by part and as a whole."""

import numpy as np
import pytest
import torch
import whisper.timing
from reference import openai_model
from whisper.tokenizer import get_tokenizer

from align import median_filter, split_words, token_begins
from chunk_audio import load_audio
from generate import CHECKPOINTS, GenerateOptions, transcribe


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (7, 7), (30, 200), (90, 1500)])
def test_path_equals_openai(shape):
    attention = np.random.default_rng(shape[0]).normal(size=shape).astype(np.float32)
    rows, positions = whisper.timing.dtw_cpu(-attention.astype(np.float64))
    expected = [positions[rows == row].min() for row in range(shape[0])]
    assert token_begins(attention).tolist() == expected


@pytest.mark.parametrize("n", [3, 4, 7, 100])
def test_median_filter_equals_openai(n):
    x = torch.randn(2, 3, n, generator=torch.Generator().manual_seed(n))
    assert torch.equal(median_filter(x), whisper.timing.median_filter(x, 7))


def test_word_times_equal_openai(tiny_en, samples):
    """Tolerance: two encoder positions (40 ms) for all but a few words, where fp32 sums in another
    order tip the path over a plateau."""
    model, tokenizer = tiny_en
    waveform = load_audio(samples / "short.wav")
    options = GenerateOptions(language="en")
    words = [
        word
        for segment in transcribe(model, tokenizer, waveform, options).segments
        for word in segment.words
    ]
    reference = openai_model(CHECKPOINTS / "tiny.en" / "model.safetensors")
    text = "".join(word.text for word in words)
    timings = whisper.timing.find_alignment(
        reference,
        get_tokenizer(multilingual=False),
        tokenizer.encode(text),
        whisper.log_mel_spectrogram(whisper.pad_or_trim(waveform)),
        len(waveform) // whisper.audio.HOP_LENGTH,
    )
    expected = {}  # punctuation is a word of its own there
    for timing in timings:
        if any(map(str.isalnum, timing.word)):
            expected[len(expected)] = (timing.word, timing.start, timing.probability)
    assert [word.text.rstrip(".,") for word in words] == [e[0] for e in expected.values()]
    differences = [abs(w.start_s - e[1]) for w, e in zip(words, expected.values(), strict=True)]
    assert sum(difference > 0.041 for difference in differences) <= 2
    probs = [abs(w.prob - e[2]) for w, e in zip(words, expected.values(), strict=True)]
    assert np.median(probs) < 0.01  # ours count the punctuation with the word


def test_times_stay_inside_a_short_clip(tiny_en, samples):
    """A 3 s clip with words at 18-23 s in another program: padding has to be cut off first."""
    model, tokenizer = tiny_en
    waveform = load_audio(samples / "short.wav")[:48_000]
    segments = transcribe(model, tokenizer, waveform, GenerateOptions(language="en")).segments
    words = [word for segment in segments for word in segment.words]
    assert len(words) >= 5
    assert all(0 <= word.start_s < word.end_s <= 3.0 for word in words)


@pytest.mark.parametrize(
    "text, by_character, expected",
    [
        (' He said, "no way" — twice.', False,
         [" He", " said,", ' "no', ' way"', " —", " twice."]),
        (" don't 3.5 e-mail", False, [" don't", " 3.5", " e-mail"]),
        ("你好，世界。", True, ["你", "好，", "世", "界。"]),
        ("これは🙂です", True, None),
    ],
)  # fmt: skip
def test_words_of_tokens(base, text, by_character, expected):
    _, tokenizer = base
    tokens = tokenizer.encode(text)
    words = split_words(tokenizer, tokens, by_character)
    assert "".join(word for word, _ in words) == text
    assert sum(n_tokens for _, n_tokens in words) == len(tokens)
    if expected and not by_character:
        assert [word for word, _ in words] == expected
    assert all("\N{REPLACEMENT CHARACTER}" not in word for word, _ in words)


def test_a_character_that_was_cut_off_stays(base):
    _, tokenizer = base
    tokens = tokenizer.encode("a🙂")[:-1]
    words = split_words(tokenizer, tokens, False)
    assert sum(n_tokens for _, n_tokens in words) == len(tokens)


def test_timestamps_are_no_words(base):
    _, tokenizer = base
    begin = tokenizer.timestamp_begin
    tokens = [begin, *tokenizer.encode(" Hello there."), begin + 50, begin + 60]
    assert split_words(tokenizer, tokens, False) == [
        ("", 1), (" Hello", 1), (" there.", 2), ("", 2)
    ]  # fmt: skip
