"""The timestamp rules, as tensor operations, against openai-whisper's over random states."""

import pytest
import torch
import whisper
from reference import openai_model
from whisper.decoding import ApplyTimestampRules
from whisper.tokenizer import get_tokenizer

from chunk_audio import load_audio, log_mel, pad_or_trim
from decode import DecodeState, apply_timestamp_rules
from generate import CHECKPOINTS, GenerateOptions, transcribe


def random_history(tokenizer, generator: torch.Generator) -> list[int]:
    """Sampled tokens that obey the rules: text in pairs of timestamps that do not go back."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    begin, at, tokens = tokenizer.timestamp_begin, draw(40), []
    for _ in range(draw(4)):
        tokens.append(begin + at)
        tokens += [draw(50_000) for _ in range(1 + draw(4))]
        at = min(1500, at + 1 + draw(300))
        tokens.append(begin + at)
        at = min(1500, at + draw(20))
    cut = draw(len(tokens) + 1) if tokens else 0
    return tokens[:cut]


@pytest.mark.parametrize("seed", range(8))
def test_rules_equal_openai_over_random_states(tiny_en, seed):
    _, tokenizer = tiny_en
    oracle_tokenizer = get_tokenizer(multilingual=False)
    generator = torch.Generator().manual_seed(seed)
    n_rows, prompt = 16, [tokenizer.sot]
    rules = ApplyTimestampRules(oracle_tokenizer, sample_begin=1, max_initial_timestamp_index=50)
    state = DecodeState(n_rows, 448, tokenizer, [tokenizer.no_timestamps], timestamps=True)
    logits = 4 * torch.randn(n_rows, tokenizer.n_vocab, generator=generator)
    logits[::2, tokenizer.timestamp_begin :] += 4  # rows in which timestamps have the mass
    expected = logits.clone()
    for row in range(n_rows):
        history = random_history(tokenizer, generator)
        state.start_row(row, torch.tensor(prompt), 448, 0.0)
        state.tokens[row, 1 : 1 + len(history)] = torch.tensor(history)
        state.input_pos[row] = len(history)
        times = [token for token in history if token >= tokenizer.timestamp_begin]
        state.last_timestamp[row] = times[-1] if times else 0
        one = expected[row : row + 1]
        rules.apply(one, torch.tensor([prompt + history]))
        if len(history) >= 2 and min(history[-2:]) >= tokenizer.timestamp_begin:
            one[:, tokenizer.eot] = -torch.inf  # ours alone: what a window cuts has to be written
    got = apply_timestamp_rules(logits + state.suppress_mask[0], state)
    assert torch.equal(got == -torch.inf, expected == -torch.inf)
    kept = expected > -torch.inf
    assert torch.equal(got[kept], expected[kept])


def test_decoding_with_timestamps_equals_openai(tiny_en, samples):
    model, tokenizer = tiny_en
    waveform = load_audio(samples / "short.wav")
    reference = openai_model(CHECKPOINTS / "tiny.en" / "model.safetensors")
    mel = log_mel(pad_or_trim(waveform)[None], 80)[0]
    options = whisper.DecodingOptions(language="en", fp16=False)
    expected = whisper.decode(reference, mel, options)
    result = transcribe(model, tokenizer, waveform, GenerateOptions(language="en", timestamps=True))
    assert result.text == expected.text.strip()
    row = model.decode_state.tokens[0, 1:].tolist()
    assert row[: len(expected.tokens)] == expected.tokens
