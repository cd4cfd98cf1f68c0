"""Quantized weights, caches and the CPU's operators: errors, files, batches, compiling."""

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SMALL, quantized, random_model, rebuilt
from torch._dynamo.testing import CompileCounter

import kv_cache
import quantize
from chunk_audio import load_audio, log_mel, pad_or_trim
from convert_hf_checkpoint import Metadata, load_checkpoint, save_checkpoint
from cpu_kernels import FLAGS, SOURCES, attend_all_keys, cache_path, load_kernels
from generate import CHECKPOINTS
from kv_cache import Int8KVCache, StepCache, make_cache
from model import KVCache, ModelArgs, Whisper, split_heads
from quantize import (
    Int4Embedding,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    QuantizeOptions,
    quantize_checkpoint,
    quantize_int4,
    quantize_int8,
    quantize_state_dict,
    swap_modules,
)

MODES = [
    QuantizeOptions("int8"),
    QuantizeOptions("int4", 32, "rtn"),
    QuantizeOptions("int4", 64, "hqq"),
]
WIDTHS = ModelArgs(n_mels=80, n_vocab=501, dim=36, n_head=2, n_audio_layer=1, n_text_layer=1)


@pytest.fixture
def no_kernels(monkeypatch):
    hide_kernels(monkeypatch)


def hide_kernels(monkeypatch) -> None:
    for module in (quantize, kv_cache):
        monkeypatch.setattr(module, "load_kernels", lambda: False)


needs_kernels = pytest.mark.skipif(not load_kernels(), reason="no C++ compiler or no ninja")


def use_caches(model: Whisper, n_rows: int, dtype: torch.dtype | None) -> None:
    """Caches of a dtype; None: the network's own."""
    model.setup_caches(n_rows)
    args = model.args
    for layer in model.decoder.layers if dtype else ():
        sizes = ((layer.attn, args.n_text_ctx), (layer.cross_attn, args.n_audio_ctx))
        for attn, n_ctx in sizes:
            attn.kv_cache = make_cache(n_rows, n_ctx, args.n_head, args.head_dim, dtype)


def greedy(model: Whisper, audio_features: torch.Tensor, n_tokens: int = 12) -> torch.Tensor:
    """Tokens [B, n_tokens] of single steps, and the logits of the last one."""
    B = len(audio_features)
    model.decoder.start_window(audio_features)
    tokens = torch.full((B, 1), 7)
    for step in range(n_tokens):
        input_pos = torch.full((B, 1), step)
        logits = model.decoder.logits(model.decoder(tokens[:, -1:], input_pos))
        tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens, logits


# ---- weights ---------------------------------------------------------------------------------


def test_int8_error_is_at_most_half_a_step():
    weight = torch.randn(33, 50, generator=torch.Generator().manual_seed(0))
    q, scales = quantize_int8(weight)
    assert q.dtype == torch.int8 and q.abs().max() == 127
    error = (q * scales[:, None] - weight).abs()
    assert (error <= scales[:, None] * 0.5001).all()


def int4_layer(weight: torch.Tensor, groupsize: int, scheme: str) -> Int4Linear:
    layer = Int4Linear(weight.shape[1], weight.shape[0], False, groupsize)
    layer.weight, layer.scales, layer.zeros = quantize_int4(weight, groupsize, scheme)
    return layer


@pytest.mark.parametrize("groupsize", [32, 64, 128, 256])
@pytest.mark.parametrize("width", [384, 36])
def test_int4_rounding_error_is_at_most_half_a_step(groupsize, width):
    """Beside half a step: the zero's own rounding to float16, 2^-8 of a step at 8 to 15."""
    weight = torch.randn(20, width, generator=torch.Generator().manual_seed(0))
    layer = int4_layer(weight, groupsize, "rtn")
    error = (layer.dequantize().float() - weight).abs()
    steps = layer.scales.float().repeat_interleave(groupsize, 1)[:, :width]
    assert (error <= steps * 0.52).all()
    assert layer.weight.shape == (20, -(-width // groupsize) * groupsize // 2)


def test_hqq_beats_rounding_on_heavy_tails_and_never_gives_nan():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 512, generator=generator) ** 3 / 30
    weight[0], weight[1, :64], weight[2] = 0.0, 0.25, weight[2].abs()
    errors = {}
    for scheme in ("rtn", "hqq"):
        difference = (int4_layer(weight, 64, scheme).dequantize() - weight).abs().float()
        errors[scheme] = (difference.square().mean().item(), difference.pow(0.7).mean().item())
    assert torch.tensor([*errors.values()]).isfinite().all()
    assert errors["hqq"][0] < 0.95 * errors["rtn"][0]
    assert errors["hqq"][1] < 0.95 * errors["rtn"][1]


@pytest.mark.parametrize("options", MODES, ids=lambda o: f"{o.mode}-{o.scheme}")
@pytest.mark.parametrize("args", [SMALL, WIDTHS], ids=["tiny", "odd widths"])
def test_every_linear_layer_is_swapped_and_keeps_its_bias(options, args):
    """gpt-fast's swap dropped the bias and missed the tied head. Widths need not divide."""
    model, small = quantized(options, args)
    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert not any(isinstance(m, torch.nn.Linear) for m in small.modules())
    for name in linears:
        old, new = model.get_submodule(name), small.get_submodule(name)
        x = y = torch.randn(2, 3, old.in_features)
        if norm := quantize._norm_before(name):  # scale may have moved from one to the other
            x, y = model.get_submodule(norm)(x), small.get_submodule(norm)(x)
        zeros = torch.zeros(1, old.in_features)
        assert torch.allclose(new(zeros)[0], old.bias, atol=2e-3), name  # kept as float16
        mode = "int8" if name.startswith("encoder.") else options.mode
        bound = 0.02 if mode == "int8" else 0.2  # of values with 8 and 4 bits
        assert (new(y) - old(x)).norm() < bound * old(x).norm(), name
    assert isinstance(small.decoder.embedding, Int8Embedding)  # int4 runs as int8 on a CPU


@pytest.mark.parametrize("options", MODES, ids=lambda o: f"{o.mode}-{o.scheme}")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_tied_table_gives_the_same_rows_to_lookup_and_head(options, packed):
    """501 tokens are no whole block of 16: the padding must not become logits."""
    model, small = quantized(options, WIDTHS, packed)
    tokens = torch.arange(501)[None]
    rows = small.decoder.embedding(tokens)[0].float()
    table = model.decoder.embedding.weight
    assert (rows - table).norm() < (0.01 if options.mode == "int8" else 0.15) * table.norm()
    hidden = torch.randn(3, 1, 36)
    scales = getattr(small.decoder.embedding, "lookup_scales", torch.ones(36))
    logits = small.decoder.logits(hidden * scales.float())  # as the norm gives them
    assert logits.shape == (3, 1, 501)
    assert torch.allclose(logits, F.linear(hidden, rows), atol=0.02 * logits.abs().max().item())


def test_frequent_and_special_tokens_keep_int8_rows_in_int4():
    """By id, in a vocabulary of Whisper's size, as the file holds them and as a CPU runs them."""
    generator, n_vocab = torch.Generator().manual_seed(0), 51865
    weight = torch.randn(n_vocab, 32, generator=generator)
    table = Int4Embedding(32, n_vocab, False, 64)
    table.load_state_dict(Int4Embedding.quantize(weight, None, QuantizeOptions("int4")))
    is_int4 = torch.zeros(n_vocab, dtype=torch.bool)
    is_int4[4096:50256] = True
    hidden, ids = torch.randn(2, 1, 32, generator=generator), torch.arange(n_vocab)[None]
    for module in (table, table.as_int8()):
        rows = module(ids)[0].float()
        error = (rows - weight).norm(dim=-1) / weight.norm(dim=-1)  # [n_vocab]
        assert error[~is_int4].max() < 0.02 < 0.03 < error[is_int4].min()
        logits = module.project(hidden)
        bound = 0.03 * logits.abs().max()  # activations of 8 bits
        assert (logits - hidden @ rows.T).abs().max() < bound


def test_int8_products_fit_float16():
    """What a GPU does: sums over 8-bit values reach 1.3 million here, float16 65,504."""
    weight, x = torch.ones(3, 512), torch.full((2, 512), 20.0)
    layer = Int8Linear(512, 3, False)
    layer.load_state_dict(Int8Linear.quantize(weight, None, QuantizeOptions()))
    y = layer.half().expand(x.half())
    assert torch.allclose(y.float(), F.linear(x, weight), rtol=2e-3)  # float16 has 11 bits


def test_loud_channels_give_scale_to_the_weights():
    """The product stays what it was; a row's step no longer follows three loud channels."""
    torch.manual_seed(0)
    norm, linear = torch.nn.LayerNorm(64), torch.nn.Linear(64, 32)
    norm.weight.data[:3] = 30.0
    linear.weight.data[:, :3] /= 10
    before = {"mlp_norm.weight": norm.weight, "mlp_norm.bias": norm.bias}
    squares, result = quantize._mean_squares("mlp.fc1", before), dict(before)
    weight = quantize._smooth("mlp.fc1", linear.weight, squares, result)
    x, errors = torch.randn(100, 64), []
    expected = F.linear(norm(x), linear.weight)
    for w, b in ((linear.weight, before), (weight, result)):
        y = F.layer_norm(x, (64,), b["mlp_norm.weight"], b["mlp_norm.bias"])
        assert torch.allclose(F.linear(y, w), expected, atol=1e-4)
        (q, q_scales), (p, p_scales) = quantize_int8(y), quantize_int8(w)
        rounded = (q.float() * q_scales[:, None]) @ (p.float() * p_scales[:, None]).T
        errors.append((rounded - expected).norm())
    assert errors[1] < 0.7 * errors[0]


def test_decoder_alone_leaves_the_encoder_and_says_so():
    state_dict = random_model(SMALL).state_dict()
    options = QuantizeOptions("int8", encoder=False)
    result, settings, skipped = quantize_state_dict(state_dict, SMALL, options)
    reasons = dict(skipped)
    assert reasons["encoder.layers.0.mlp.fc1"] == "--no-encoder" and "encoder.conv1" in reasons
    assert not any(name.startswith("encoder.") for name in settings["modules"])
    model = rebuilt(SMALL, result, settings)
    assert isinstance(model.encoder.layers[0].mlp.fc1, torch.nn.Linear)
    assert isinstance(model.decoder.layers[0].mlp.fc1, Int8Linear)


def test_unknown_settings_are_errors():
    for settings in (
        {"mode": "int3"},
        {"mode": "int8", "rounds": 2},
        {"modules": {"encoder.x": "int8"}},
    ):
        with pytest.raises(ValueError, match="int3|rounds|encoder.x|has no attribute"):
            swap_modules(random_model(SMALL), settings)
    for wrong in ({"mode": "fp4"}, {"groupsize": 48}, {"scheme": "awq"}):
        with pytest.raises(ValueError, match="allowed"):
            QuantizeOptions(**wrong)


# ---- files -----------------------------------------------------------------------------------


def write_random(path, dtype=torch.float32) -> Whisper:
    model = random_model(SMALL)
    metadata = Metadata(SMALL, dtype, None, (), None, "tiny", "random")
    save_checkpoint(path, {k: v.to(dtype) for k, v in model.state_dict().items()}, metadata)
    return model


def read_back(path) -> Whisper:
    state_dict, metadata = load_checkpoint(path)
    return rebuilt(metadata.model_args, state_dict, metadata.quantization)


@pytest.mark.parametrize("options", MODES, ids=lambda o: f"{o.mode}-{o.scheme}")
def test_saved_file_gives_equal_logits_under_any_name(options, tmp_path):
    """The header decides; gpt-fast read the mode from the file name."""
    model = write_random(tmp_path / "model.safetensors")
    path = quantize_checkpoint(tmp_path / "model.safetensors", options)
    other = path.with_name("model_int4_g128.safetensors")
    shutil.copy(path, other)
    state_dict, settings, _ = quantize_state_dict(model.state_dict(), SMALL, options)
    features = torch.randn(1, 1500, 64)
    results = []
    for small in (rebuilt(SMALL, state_dict, settings), read_back(path), read_back(other)):
        use_caches(small, 1, torch.int8)
        results.append(greedy(small, features)[1])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_command_line_names_files_and_refuses_to_quantize_twice(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    write_random(path, torch.float16)
    common = ["--checkpoint_path", str(path)]
    assert quantize.main([*common, "--mode", "int8"]) == 0
    assert quantize.main([*common, "--mode", "int4", "--groupsize", "32", "--scheme", "rtn"]) == 0
    out, err = capsys.readouterr()
    names = ["model_int8.safetensors", "model_int4_rtn_g32.safetensors"]
    assert out.split() == [str(tmp_path / name) for name in names]
    assert "encoder.conv1" in err and "of float32" in err
    quantization = load_checkpoint(tmp_path / names[1])[1].quantization
    assert json.dumps(quantization) and quantization["groupsize"] == 32
    assert quantize.main(["--checkpoint_path", str(tmp_path / names[0])]) == 1
    assert "quantized already" in capsys.readouterr().err
    assert quantize.main(["--checkpoint_path", str(tmp_path / "none.safetensors")]) == 1


def test_files_are_told_apart_by_their_names(tmp_path):
    """A folder is its model.safetensors; --no-encoder wrote over the file with the encoder."""
    metadata = Metadata(SMALL, torch.float32, None, ((0, 0),), None, "small", "test")
    save_checkpoint(tmp_path / "model.safetensors", random_model(SMALL).state_dict(), metadata)
    settings = [("int8",), ("int8", 64, "hqq", False), ("int4", 64, "rtn"), ("int4", 32, "hqq")]
    names = [quantize_checkpoint(tmp_path, QuantizeOptions(*how)).name for how in settings]
    ends = ["int8", "int8_decoder", "int4_rtn_g64", "int4_g32"]
    assert names == [f"model_{end}.safetensors" for end in ends]


@pytest.mark.parametrize("mode, share", [("int8", 0.30), ("int4", 0.20)])
def test_real_files_are_small(mode, share, tiny_en, tmp_path):
    shutil.copy(CHECKPOINTS / "tiny.en" / "model.safetensors", tmp_path)
    options = QuantizeOptions(mode, 64, "rtn")  # hqq gives as many bytes, and takes longer
    path = quantize_checkpoint(tmp_path / "model.safetensors", options)
    n_values = sum(parameter.numel() for parameter in tiny_en[0].parameters())
    assert path.stat().st_size < share * 4 * n_values


# ---- batches and compiling -------------------------------------------------------------------


@pytest.mark.parametrize("options", MODES, ids=lambda o: f"{o.mode}-{o.scheme}")
@pytest.mark.parametrize("cache", [torch.float32, torch.int8], ids=str)
def test_rows_of_a_batch_equal_the_same_rows_alone(options, cache):
    """An activation scale for the whole tensor, as torch's own dynamic int8 has, breaks this."""
    _, model = quantized(options)
    scale = torch.tensor([1.0, 30.0, 0.1])[:, None, None]
    features = torch.randn(3, 1500, 64, generator=torch.Generator().manual_seed(3)) * scale
    use_caches(model, 3, cache)
    tokens, logits = greedy(model, features)
    use_caches(model, 1, cache)
    for row in range(3):
        alone, alone_logits = greedy(model, features[row : row + 1])
        assert torch.equal(tokens[row], alone[0])
        assert torch.equal(logits[row], alone_logits[0])


@pytest.mark.parametrize("options", [None, *MODES[::2]], ids=["fp32", "int8", "int4"])
@pytest.mark.parametrize("cache", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain"])
def test_a_step_compiles_to_one_frame(options, cache, plain, request):
    if plain:
        request.getfixturevalue("no_kernels")
    model = quantized(options)[1] if options else random_model(SMALL)
    use_caches(model, 2, cache)
    model.decoder.start_window(torch.randn(2, 1500, 64))

    def step(tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        return model.decoder.logits(model.decoder(tokens, input_pos))

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=False)
    for pos in range(6):
        input_pos = torch.tensor([[pos], [pos + 40]])
        tokens = torch.tensor([[pos], [pos + 9]])
        with torch.no_grad():
            logits = compiled(tokens, input_pos)
            assert torch.equal(logits, step(tokens, input_pos))
    assert counter.frame_count == 1


@needs_kernels
def test_compiled_code_equals_eager():
    """inductor knows the operators' shapes and strides only from what is declared for them."""
    _, model = quantized(MODES[0])
    use_caches(model, 2, torch.int8)
    model.decoder.start_window(torch.randn(2, 1500, 64))
    tokens, input_pos = torch.tensor([[3], [4]]), torch.tensor([[0], [7]])
    with torch.no_grad():
        expected = model.decoder(tokens, input_pos)
        torch._dynamo.reset()
        hidden = torch.compile(model.decoder, fullgraph=True, dynamic=False)(tokens, input_pos)
    # float32 sums in another order may move a value to the next of 255 steps
    assert (hidden - expected).abs().max() < 0.05 * expected.abs().max()


# ---- operators and caches --------------------------------------------------------------------


def filled(kind: type[KVCache], head_dim: int, n_ctx: int = 200, n_rows: int = 3):
    generator = torch.Generator().manual_seed(head_dim)
    cache = kind(n_rows, n_ctx, 2, head_dim, torch.float32)
    shape = (n_rows, 2, n_ctx, head_dim)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    cache.write(slice(None), k, v)
    q = torch.randn(n_rows, 1, 2, head_dim, generator=generator).transpose(1, 2) * 2
    return cache, q, k, v


@needs_kernels
@pytest.mark.parametrize("head_dim", [64, 32, 18])
@pytest.mark.parametrize("kind", [StepCache, Int8KVCache])
def test_kernel_equals_torch_on_what_is_stored(kind, head_dim):
    """Tolerance: float32 sums of 200 terms; the int8 kernel rounds queries to 16 bits."""
    cache, q, k, v = filled(kind, head_dim)
    y = cache.attend(slice(1, 3), q[1:])
    k = cache.keys(slice(1, 3))
    if kind is Int8KVCache:
        v = cache.v_cache * cache.v_scales[..., None]
    expected = F.scaled_dot_product_attention(q[1:], k, v[1:])
    assert y.shape == expected.shape
    assert torch.allclose(y, expected, atol=2e-6 if kind is StepCache else 3e-4)


@needs_kernels
@pytest.mark.parametrize("kind", [StepCache, Int8KVCache])
def test_kernel_reads_only_what_the_mask_shows(kind):
    cache, q, _, _ = filled(kind, 64)
    lengths = torch.tensor([1, 77, 200])
    mask = (torch.arange(200) < lengths[:, None])[:, None, None]  # [B, 1, 1, n_ctx]
    y = cache.attend(slice(None), q, mask)
    for row, n in enumerate(lengths.tolist()):
        k = cache.keys(slice(row, row + 1))[:, :, :n]
        v = cache.v_cache[row : row + 1, :, :n]
        if kind is Int8KVCache:
            v = v * cache.v_scales[row : row + 1, :, :n, None]
        expected = F.scaled_dot_product_attention(q[row : row + 1], k, v)
        assert torch.allclose(y[row], expected[0], atol=3e-4), n
    before = y.clone()
    cache.k_cache[0, :, 1:], cache.v_cache[0, :, 1:] = 99, 99
    assert torch.equal(cache.attend(slice(None), q, mask), before)


@needs_kernels
def test_softmax_of_the_kernel_holds_for_large_scores():
    cache, q, k, v = filled(StepCache, 64)
    expected = F.scaled_dot_product_attention(q * 100, k, v)
    assert torch.allclose(cache.attend(slice(None), q * 100, None), expected, atol=1e-4)


def test_int8_cache_is_close_to_float32():
    """8 bits for each of keys and values: about 1 % of the result on random data."""
    cache, q, k, v = filled(Int8KVCache, 64)
    expected = F.scaled_dot_product_attention(q, k, v)
    for queries in (q, q.expand(-1, -1, 2, -1)):  # one step; several at once
        y = cache.attend(slice(None), queries)
        assert (y[:, :, :1] - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("cache", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("options", MODES[::2], ids=["int8", "int4"])
def test_without_a_compiler_the_logits_are_the_same(cache, options, monkeypatch):
    """Both paths do the same integer sums; only float32 rounding may move a value one step."""
    features = torch.randn(2, 1500, 64, generator=torch.Generator().manual_seed(5))
    logits = []
    for has_compiler in (True, False):
        if not has_compiler:
            hide_kernels(monkeypatch)
        _, model = quantized(options)
        use_caches(model, 2, cache)
        logits.append(greedy(model, features, n_tokens=3)[1])
    spread = logits[0].std()
    assert (logits[0] - logits[1]).abs().max() < 0.1 * spread


def test_missing_compiler_is_named_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*args, **kwargs):
        raise RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setattr("torch.utils.cpp_extension.load", fail)
    fresh = functools.cache(load_kernels.__wrapped__)
    assert not fresh() and not fresh()
    assert capsys.readouterr().err.count("Ninja is required") == 1


@needs_kernels
@pytest.mark.parametrize("M", [1, 3, 4, 8, 13, 70])
@pytest.mark.parametrize("N, K", [(5, 36), (48, 64), (501, 384)])
def test_int8_linear_equals_exact_integer_sums(M, N, K):
    """Every tile size of the operator. Tolerance: one float32 rounding of scale and sum."""
    generator = torch.Generator().manual_seed(M + N)
    layer = Int8Linear(K, N, bias=True)
    layer.weight, layer.scales = quantize_int8(torch.randn(N, K, generator=generator))
    layer.bias = torch.randn(N, generator=generator)
    x, x_scales = quantize_int8(torch.randn(M, K, generator=generator))
    sums = x.long() @ layer.weight.long().T
    expected = sums * (x_scales[:, None] * layer.scales) + layer.bias
    layer.pack()
    assert torch.allclose(layer(x * x_scales[:, None]), expected, atol=1e-5)


# ---- real weights ----------------------------------------------------------------------------


def test_real_logits_stay_close(tiny_en, samples):
    """On real speech. Tolerance: four times the divergence that was measured, 0.0015 nats."""
    model, tokenizer = tiny_en
    state_dict, settings, _ = quantize_state_dict(
        model.state_dict(), model.args, QuantizeOptions("int8")
    )
    small = rebuilt(model.args, state_dict, settings)
    mel = log_mel(pad_or_trim(load_audio(samples / "short.wav"))[None], 80)
    tokens = torch.tensor([tokenizer.sot_sequence("en", "transcribe", timestamps=False)])
    logits = []
    for network, dtype in ((model, None), (small, torch.int8)):
        use_caches(network, 1, dtype)
        network.decoder.start_window(network.encoder(mel))
        input_pos = torch.arange(tokens.shape[1])[None]
        logits.append(network.decoder.logits(network.decoder(tokens, input_pos))[0, -1])
    assert logits[0].argmax() == logits[1].argmax()
    old, new = (row.log_softmax(dim=-1) for row in logits)
    divergence = (old.exp() * (old - new)).sum()
    assert divergence < 0.006


@pytest.mark.parametrize("S", [1, 3, 65, 127, 1500])
def test_encoder_attention_is_close_and_batch_independent(S):
    """Tolerance: int8 steps of queries and keys, 1 / 254 of a row's largest value each."""
    if not (load_kernels() and torch.ops.whisper_fast.has_attend_all()):
        pytest.skip("no AVX-512 with VNNI and BF16")
    qkv = torch.randn(2, S, 3 * 4 * 64, generator=torch.Generator().manual_seed(S))
    q, k, v = (split_heads(t, 4) for t in qkv.chunk(3, dim=-1))
    expected = F.scaled_dot_product_attention(q, k, v)
    for attend in (attend_all_keys, torch.ops.whisper_fast.attend_all):  # other than it with AMX
        got = attend(q, k, v)
        assert (got - expected).square().mean().sqrt() < 0.01 * expected.square().mean().sqrt()
        assert torch.equal(attend(q[1:], k[1:], v[1:])[0], got[1])


@needs_kernels
def test_operators_are_compiled_over_half_a_file(monkeypatch, tmp_path):
    """And without the environment's programs on the PATH: ninja was looked for there alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = os.environ["PATH"].split(os.pathsep)
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", os.pathsep.join(part for part in folders if part != scripts))
    path = cache_path([FLAGS, *(Path(source).read_bytes() for source in SOURCES)], ".so")
    path.parent.mkdir()
    path.write_bytes(b"not a library")
    for _ in range(2):  # compile, then load
        command = [sys.executable, "-c", "import cpu_kernels as c; print(c.load_kernels())"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("True\n", "")
        assert list(path.parent.iterdir()) == [path] and path.stat().st_size > 50_000
