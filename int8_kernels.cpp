// The CPU's operators of quantize.py and kv_cache.py, compiled when first used:
//   attend_one: attention of one query a row over cached keys and values, float32 or int8
//   int8_linear: a linear layer with int8 weights, activations rounded to int8 row by row;
//     in AMX tiles where the processor has them and the rows are many
// Every row is computed by itself, so its result does not depend on its batch. The plain torch
// versions of both, which the tests compare with, are in those files.
// Softmax in one pass over scores kept in cache: as FlashAttention's single-query case.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Ask for the n values that a loop will read 4 KB later. Some processors do not look ahead that far,
// least of all over the end of a page, and then wait for every line (NOTES.md).
template <typename T>
INLINE void fetch_ahead(const T* data, int64_t n) {
  constexpr int64_t kPage = 4096 / sizeof(T), kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(data + kPage + i);
}

// ---- attend_one ----

constexpr int64_t kMaxHeadDim = 512;

// exp of x <= 0, relative error below 1e-6. Loops over it become vector code; std::exp does not.
INLINE float exp_negative(float x) {
  const float round_shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  x = std::max(x, -87.0f);
  float n = x * 1.44269504f + round_shift;
  int32_t bits;
  std::memcpy(&bits, &n, 4);
  n -= round_shift;
  const float r = x - n * 0.693145752f - n * 1.42860677e-6f;  // x - n ln 2, ln 2 in two parts
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t power_bits = (bits << 23) + (127 << 23);  // the low bits of `bits` are n
  float power;
  std::memcpy(&power, &power_bits, 4);
  return p * power;
}

// scores[t] = scale * q . k[t], for keys in float32
INLINE void dot_all(const float* q, const float* k, const float*, float scale, int64_t n,
                    int64_t D, float* scores) {
  for (int64_t t = 0; t < n; t++) {
    fetch_ahead(k + t * D, D);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < D; d++) sum += q[d] * k[t * D + d];
    scores[t] = sum * scale;
  }
}

// The same for keys in int8. The query goes to 16 bits: beside 8-bit keys that loses nothing, and
// every x86 processor multiplies and adds pairs of 16-bit numbers in one instruction.
INLINE void dot_all(const float* q, const int8_t* k, const float* k_scales, float scale, int64_t n,
                    int64_t D, float* scores) {
  const float steps = 32000.0f;
  float largest = 1e-30f;
  for (int64_t d = 0; d < D; d++) largest = std::max(largest, std::abs(q[d]));
  int16_t q16[kMaxHeadDim];
  for (int64_t d = 0; d < D; d++) q16[d] = static_cast<int16_t>(q[d] / largest * steps);
  scale *= largest / steps;
  for (int64_t t = 0; t < n; t++) {
    fetch_ahead(k + t * D, D);
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < D; d++) sum += static_cast<int32_t>(q16[d]) * k[t * D + d];
    scores[t] = static_cast<float>(sum) * (scale * k_scales[t]);
  }
}

// One head of one row: q [D] over the first n of k, v [n_ctx, D] -> out [D].
template <typename T>
INLINE void attend_head(const float* q, const T* k, const T* v, const float* k_scales,
                        const float* v_scales, int64_t n, int64_t D, float* scores, float* out) {
  dot_all(q, k, k_scales, 1.0f / std::sqrt(static_cast<float>(D)), n, D, scores);
  float largest = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : largest)
  for (int64_t t = 0; t < n; t++) largest = std::max(largest, scores[t]);
#pragma omp simd reduction(+ : total)
  for (int64_t t = 0; t < n; t++) total += scores[t] = exp_negative(scores[t] - largest);
  if (v_scales)
    for (int64_t t = 0; t < n; t++) scores[t] *= v_scales[t];
  float sum[kMaxHeadDim] = {};
  for (int64_t t = 0; t < n; t++) {
    fetch_ahead(v + t * D, D);
#pragma omp simd
    for (int64_t d = 0; d < D; d++) sum[d] += scores[t] * static_cast<float>(v[t * D + d]);
  }
  for (int64_t d = 0; d < D; d++) out[d] = sum[d] / total;
}

template <typename T>
void attend_rows(const Tensor& q, const Tensor& k, const Tensor& v, const float* k_scales,
                 const float* v_scales, const bool* mask, Tensor& out) {
  const int64_t H = k.size(1), n_ctx = k.size(2), D = k.size(3);
  const float* q_data = q.const_data_ptr<float>();
  const T *k_data = k.const_data_ptr<T>(), *v_data = v.const_data_ptr<T>();
  float* out_data = out.mutable_data_ptr<float>();
  at::parallel_for(0, k.size(0) * H, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(n_ctx);
    for (int64_t i = begin; i < end; i++) {
      int64_t n = n_ctx;
      if (mask) {
        const bool* row = mask + i / H * n_ctx;
        n = std::find(row, row + n_ctx, false) - row;
      }
      const float* ks = k_scales ? k_scales + i * n_ctx : nullptr;
      const float* vs = v_scales ? v_scales + i * n_ctx : nullptr;
      const T *k_head = k_data + i * n_ctx * D, *v_head = v_data + i * n_ctx * D;
      const float* q_head = q_data + i * D;
      if (D == 64)  // of all released sizes; a constant lets the compiler unroll
        attend_head(q_head, k_head, v_head, ks, vs, n, 64, scores.data(), out_data + i * D);
      else
        attend_head(q_head, k_head, v_head, ks, vs, n, D, scores.data(), out_data + i * D);
    }
  });
}

// q [B, H, 1, D] over k, v [B, H, n_ctx, D] -> [B, H, 1, D] float32. int8 caches come with scales
// [B, H, n_ctx]. A row reads the positions before the first false of its mask [B, 1, 1, n_ctx].
Tensor attend_one(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& k_scales,
                  const OptionalTensor& v_scales, const OptionalTensor& mask) {
  TORCH_CHECK(k.is_contiguous() && v.is_contiguous() && k.sizes() == v.sizes(), "cache layout");
  TORCH_CHECK(q.size(2) == 1 && q.size(3) == k.size(3) && k.size(3) <= kMaxHeadDim, "query shape");
  const Tensor q_rows = q.to(at::kFloat).contiguous();
  const Tensor mask_rows = mask ? mask->contiguous() : Tensor();
  TORCH_CHECK(!mask || mask_rows.numel() == k.size(0) * k.size(2), "mask shape");
  const bool* mask_data = mask ? mask_rows.const_data_ptr<bool>() : nullptr;
  Tensor out = at::empty(q.sizes(), q_rows.options());
  if (k.scalar_type() == at::kChar) {
    TORCH_CHECK(k_scales->is_contiguous() && v_scales->is_contiguous(), "scales layout");
    attend_rows<int8_t>(q_rows, k, v, k_scales->const_data_ptr<float>(),
                        v_scales->const_data_ptr<float>(), mask_data, out);
  } else {
    attend_rows<float>(q_rows, k, v, nullptr, nullptr, mask_data, out);
  }
  return out;
}

// ---- int8_linear ----
// Weights lie as [N / 16, K / 4, 16, 4] bytes of value + 128: four input channels of 16 outputs
// side by side, which is what one instruction multiplies and adds.

constexpr int64_t kLanes = 16;
#ifdef __AVX512VNNI__
constexpr int kRows = 12;  // rows that share one pass over a block: as the registers allow
#else
constexpr int kRows = 4;
#endif

constexpr int64_t kManyRows = 64;  // from which on threads share the rows, not the weights
constexpr int64_t kTileRows = 32;  // rows of x, and outputs, of four AMX tiles

struct Int8Rows {  // activations: values [M, K], with one scale per row; many: zeros to whole tiles
  std::vector<int8_t> values;
  std::vector<int32_t> sums;
  std::vector<float> scales;
};

INLINE int64_t tiles_of(int64_t M) { return (M + kTileRows - 1) / kTileRows; }

struct Outputs {
  const float *scales, *bias;
  float* data;  // [M, N]
  int64_t N;
};

// sums[m][lane] = x[m] . weights[lane], for M rows of x [M, K] and one block of 16 outputs
template <int M>
INLINE void dot_block(const int8_t* x, const int32_t* x_sums, const uint8_t* w, int64_t K,
                      int32_t sums[M][kLanes]) {
#if defined(__AVX512VNNI__)
  __m512i acc[M];
  for (int m = 0; m < M; m++) acc[m] = _mm512_set1_epi32(-128 * x_sums[m]);
  for (int64_t k = 0; k < K; k += 4) {
    if (M < kRows) fetch_ahead(w + k * kLanes, 4 * kLanes);  // else the next rows find them cached
    const __m512i block = _mm512_loadu_si512(w + k * kLanes);
    for (int m = 0; m < M; m++) {
      int32_t four;
      std::memcpy(&four, x + m * K + k, 4);
      acc[m] = _mm512_dpbusd_epi32(acc[m], block, _mm512_set1_epi32(four));
    }
  }
  for (int m = 0; m < M; m++) _mm512_storeu_si512(sums[m], acc[m]);
#elif defined(__AVX2__)
  const __m256i offset = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  __m256i acc[M][2] = {};
  for (int64_t k = 0; k < K; k += 4) {
    if (M < kRows) fetch_ahead(w + k * kLanes, 4 * kLanes);  // else the next rows find them cached
    const __m256i* block = reinterpret_cast<const __m256i*>(w + k * kLanes);
    const __m256i weight[2] = {_mm256_xor_si256(_mm256_loadu_si256(block), offset),
                               _mm256_xor_si256(_mm256_loadu_si256(block + 1), offset)};
    for (int m = 0; m < M; m++) {
      int32_t four;
      std::memcpy(&four, x + m * K + k, 4);
      const __m256i value = _mm256_set1_epi32(four), size = _mm256_abs_epi8(value);
      for (int half = 0; half < 2; half++) {
        // |x| times w with the sign of x: a pair of products fits 16 bits, so nothing saturates.
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(weight[half], value));
        acc[m][half] = _mm256_add_epi32(acc[m][half], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[m] + 8 * half), acc[m][half]);
#else
  TORCH_CHECK(false, "int8_linear needs AVX2");  // torch._int_mm is faster than plain loops
#endif
}

// Rows m to m + M of the outputs n and on, from their integer sums.
INLINE void write_block(const int32_t (*sums)[kLanes], int64_t M, const Int8Rows& x, int64_t m,
                        int64_t n, const Outputs& out) {
  const int64_t lanes = std::min(kLanes, out.N - n);  // the last block may hold padding
#ifdef __AVX512F__
  const __mmask16 mask = static_cast<__mmask16>((1u << lanes) - 1);
  const __m512 scales = _mm512_maskz_loadu_ps(mask, out.scales + n);
  const __m512 bias = out.bias ? _mm512_maskz_loadu_ps(mask, out.bias + n) : _mm512_setzero_ps();
  for (int64_t i = 0; i < M; i++) {
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums[i]));
    const __m512 y = sum * (scales * _mm512_set1_ps(x.scales[m + i])) + bias;
    _mm512_mask_storeu_ps(out.data + (m + i) * out.N + n, mask, y);
  }
#else
  for (int64_t i = 0; i < M; i++) {
    float* row = out.data + (m + i) * out.N + n;
    for (int64_t lane = 0; lane < lanes; lane++) {
      const float scale = x.scales[m + i] * out.scales[n + lane];
      row[lane] = static_cast<float>(sums[i][lane]) * scale;
      if (out.bias) row[lane] += out.bias[n + lane];
    }
  }
#endif
}

template <int M>
void linear_block(const Int8Rows& x, int64_t m, const uint8_t* w, int64_t K, int64_t n,
                  const Outputs& out) {
  int32_t sums[M][kLanes];
  dot_block<M>(x.values.data() + m * K, x.sums.data() + m, w, K, sums);
  write_block(sums, M, x, m, n, out);
}

// Whether the processor has AMX. Linux gives its tiles to a process that asks for them.
bool has_tiles() {
#ifdef __AMX_INT8__
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

#ifdef __AMX_INT8__
// Rows m to m_end of all outputs, 32 x 32 at a time: tiles 0-3 are sums, 4 and 5 rows of x, 6 and 7
// weights, whose layout is the one that the instruction wants. K is a multiple of 64.
void linear_tiles(const Int8Rows& x, int64_t m_begin, int64_t m_end, const uint8_t* weights,
                  int64_t K, int64_t n_blocks, const Outputs& out) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t n_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
  alignas(64) int32_t sums[2][kTileRows][kLanes];  // of two blocks
  for (int64_t block = 0; block < n_blocks; block += 2) {
    const uint8_t* w = weights + block * kLanes * K;
    const uint8_t* w_next = block + 1 < n_blocks ? w + kLanes * K : w;  // then it counts for nothing
    for (int64_t m = m_begin; m < m_end; m += kTileRows) {
      const int8_t* rows = x.values.data() + m * K;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < K; k += 64) {
        _tile_loadd(4, rows + k, K);
        _tile_loadd(5, rows + 16 * K + k, K);
        _tile_loadd(6, w + k * kLanes, 64);
        _tile_loadd(7, w_next + k * kLanes, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 5, 6);
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 5, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[0][16], 64);
      _tile_stored(2, sums[1], 64);
      _tile_stored(3, sums[1][16], 64);
      const int64_t n_rows = std::min(kTileRows, m_end - m);
      for (int64_t i = 0; i < 2 && block + i < n_blocks; i++) {
        for (int64_t row = 0; row < n_rows; row++)  // weights lie as value + 128
          for (int64_t lane = 0; lane < kLanes; lane++) sums[i][row][lane] -= 128 * x.sums[m + row];
        write_block(sums[i], n_rows, x, m, (block + i) * kLanes, out);
      }
    }
  }
  _tile_release();
}
#endif

// As many rows from m on as share a pass, against a range of blocks. Returns how many rows.
int64_t linear_pass(const Int8Rows& x, int64_t m, int64_t m_end, const uint8_t* weights, int64_t K,
                    int64_t block, int64_t block_end, const Outputs& out) {
  const int64_t left = m_end - m;
  const int64_t M = left >= kRows ? kRows : left >= 8 ? 8 : left >= 4 ? 4 : 1;
  for (; block < block_end; block++) {
    const uint8_t* w = weights + block * kLanes * K;
    if (M == kRows) linear_block<kRows>(x, m, w, K, block * kLanes, out);
    else if (M == 8) linear_block<8>(x, m, w, K, block * kLanes, out);
    else if (M == 4) linear_block<4>(x, m, w, K, block * kLanes, out);
    else linear_block<1>(x, m, w, K, block * kLanes, out);
  }
  return M;
}

Int8Rows quantize_rows(const float* x, int64_t M, int64_t K, int64_t K_padded) {
  const int64_t M_padded = M < kManyRows ? M : tiles_of(M) * kTileRows;
  Int8Rows rows{std::vector<int8_t>(M_padded * K_padded), std::vector<int32_t>(M),
                std::vector<float>(M)};
  at::parallel_for(0, M, 32, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      const float* row = x + m * K;
      int8_t* values = rows.values.data() + m * K_padded;
      float largest = 1e-20f;
#pragma omp simd reduction(max : largest)
      for (int64_t k = 0; k < K; k++) largest = std::max(largest, std::abs(row[k]));
      const float inverse = 127.0f / largest;
      int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < K; k++) {
        const int32_t value = static_cast<int32_t>(std::nearbyint(row[k] * inverse));
        values[k] = static_cast<int8_t>(value);
        sum += value;
      }
      rows.sums[m] = sum;
      rows.scales[m] = largest / 127.0f;
    }
  });
  return rows;
}

// x [..., K] -> x @ (weight * scales).T + bias [..., N] float32
Tensor int8_linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   const OptionalTensor& bias) {
  const int64_t K = x.size(-1), N = scales.size(0), K_padded = packed.size(1) * 4;
  const int64_t M = x.numel() / K, n_blocks = packed.size(0);
  TORCH_CHECK(packed.is_contiguous() && K <= K_padded && N <= n_blocks * kLanes, "weight layout");
  const Tensor x_rows = x.to(at::kFloat).contiguous();
  auto shape = x.sizes().vec();
  shape.back() = N;
  Tensor y = at::empty(shape, x_rows.options());
  const Int8Rows rows = quantize_rows(x_rows.const_data_ptr<float>(), M, K, K_padded);
  const Outputs out{scales.const_data_ptr<float>(), bias ? bias->const_data_ptr<float>() : nullptr,
                    y.mutable_data_ptr<float>(), N};
  const uint8_t* weights = packed.const_data_ptr<uint8_t>();
  auto run = [&](int64_t m, int64_t m_end, int64_t block, int64_t block_end) {
    while (m < m_end)
      m += linear_pass(rows, m, m_end, weights, K_padded, block, block_end, out);
  };
  if (M >= kManyRows) {  // threads share the rows, and each reads all weights
#ifdef __AMX_INT8__
    if (K_padded % 64 == 0 && has_tiles()) {
      at::parallel_for(0, tiles_of(M), 1, [&](int64_t begin, int64_t end) {
        const int64_t m_end = std::min(end * kTileRows, M);
        linear_tiles(rows, begin * kTileRows, m_end, weights, K_padded, n_blocks, out);
      });
      return y;
    }
#endif
    at::parallel_for(0, M, 32, [&](int64_t begin, int64_t end) { run(begin, end, 0, n_blocks); });
  } else {  // threads share the weights; for less than 256 KB another thread does not pay
    const int64_t grain = std::max<int64_t>(1, (1 << 18) / (kLanes * K_padded));
    at::parallel_for(0, n_blocks, grain,
                     [&](int64_t begin, int64_t end) { run(0, M, begin, end); });
  }
  return y;
}

}  // namespace

TORCH_LIBRARY(whisper_fast, m) {
  m.def(
      "attend_one(Tensor q, Tensor k, Tensor v, Tensor? k_scales, Tensor? v_scales, Tensor? mask)"
      " -> Tensor");
  m.def("int8_linear(Tensor x, Tensor packed, Tensor scales, Tensor? bias) -> Tensor");
  m.def("has_tiles() -> bool", has_tiles);
}

TORCH_LIBRARY_IMPL(whisper_fast, CPU, m) {
  m.impl("attend_one", attend_one);
  m.impl("int8_linear", int8_linear);
}
