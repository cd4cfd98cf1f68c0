// Operator for the encoder on a CPU with AVX-512, loaded by cpu_kernels.py:
//   attend_all(q, k, v) -> [B, H, S, 64] float32, full attention of all queries over all keys
//
// A block of 32 queries passes over the keys, some at a time, so that all lies in the first cache;
// a running maximum and sum make the softmax, as in FlashAttention. Queries lie side by side in a
// register and keys follow one another: maximum, exp and sum of a query never leave its lane.
// Scores are int8 products. Probabilities and values are bfloat16, summed in float32: a query may
// look at a thousand keys, each far below the largest, and 8-bit steps would round them all to 0.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

using at::Tensor;

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
constexpr bool kHasAttendAll = true;
constexpr int kQueries = 32;  // two registers of 16 lanes
constexpr int kRows = 8;      // keys, or channels of values, that share a pass
constexpr int kKeys = 64;     // keys between two looks at the maximum
constexpr float kLowest = -1e30f;  // below every score; not infinite, which 2^x would make a NaN

// Keys and values of one head. Both are padded to whole passes, with zeros.
template <int D>
struct PackedHead {
  std::vector<int8_t> keys;       // [S, D]
  std::vector<float> key_scales;  // [S]
  std::vector<int32_t> offsets;   // [S], -128 * the sum of the key: queries lie as value + 128
  std::vector<uint32_t> values;   // [S / 2, D] pairs of bfloat16, of an even and an odd position
};

INLINE uint32_t to_bfloat16(float x) {  // the nearest one, in the high half; halves go away from 0
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x8000) & 0xffff0000;
}

// x [D] -> whole numbers up to 127 and their step
template <int D>
INLINE float quantize_row(const float* x, int32_t* whole) {
  float largest = 1e-20f;
#pragma omp simd reduction(max : largest)
  for (int d = 0; d < D; d++) largest = std::max(largest, std::abs(x[d]));
  const float inverse = 127.0f / largest;
#pragma omp simd
  for (int d = 0; d < D; d++) whole[d] = static_cast<int32_t>(std::nearbyint(x[d] * inverse));
  return largest / 127.0f;
}

template <int D>
void pack_head(const float* k, int64_t k_stride, const float* v, int64_t v_stride, int64_t S,
               PackedHead<D>& head) {
  const int64_t S_padded = (S + kRows - 1) / kRows * kRows;
  head.keys.resize(S_padded * D), head.key_scales.resize(S_padded), head.offsets.resize(S_padded);
  head.values.resize(S_padded / 2 * D);
  for (int64_t s = 0; s < S; s++) {
    int32_t whole[D], sum = 0;
    head.key_scales[s] = quantize_row<D>(k + s * k_stride, whole);
    for (int d = 0; d < D; d++) head.keys[s * D + d] = static_cast<int8_t>(whole[d]);
    for (int d = 0; d < D; d++) sum += whole[d];
    head.offsets[s] = -128 * sum;
  }
  for (int64_t s = 0; s < S; s += 2) {
    const float *even = v + s * v_stride, *odd = even + v_stride;
    uint32_t* pairs = head.values.data() + s / 2 * D;
    for (int d = 0; d < D; d++) pairs[d] = to_bfloat16(even[d]) >> 16;
    if (s + 1 < S)
      for (int d = 0; d < D; d++) pairs[d] |= to_bfloat16(odd[d]);
  }
}

// 2^x of x <= 0, relative error 1e-4: a part of what rounding to bfloat16 costs
INLINE __m512 exp2_negative(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.07802452f);
  p = p * r + _mm512_set1_ps(0.22606717f);
  p = p * r + _mm512_set1_ps(0.69583353f);
  p = p * r + _mm512_set1_ps(0.99992522f);
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

// scores of kRows keys with all queries, which lie as [D / 4, kQueries, 4]. Times a query's scale
// they are exponents of 2.
template <int D>
INLINE void score_keys(const uint8_t* q, const int8_t* keys, const int32_t* offsets,
                       const float* key_scales, __m512 scores[kRows][2]) {
  __m512i sums[kRows][2];
  for (int i = 0; i < kRows; i++) sums[i][0] = sums[i][1] = _mm512_set1_epi32(offsets[i]);
  for (int d = 0; d < D; d += 4) {
    const __m512i q0 = _mm512_loadu_si512(q + d * kQueries);
    const __m512i q1 = _mm512_loadu_si512(q + d * kQueries + 64);
    for (int i = 0; i < kRows; i++) {
      int32_t four;
      std::memcpy(&four, keys + i * D + d, 4);
      sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], q0, _mm512_set1_epi32(four));
      sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], q1, _mm512_set1_epi32(four));
    }
  }
  for (int i = 0; i < kRows; i++)
    for (int half = 0; half < 2; half++)
      scores[i][half] = _mm512_cvtepi32_ps(sums[i][half]) * _mm512_set1_ps(key_scales[i]);
}

// out = out * shrink + values . probs, for kRows channels, over n pairs of positions
template <int D>
INLINE void add_values(const __m512i probs[][2], const uint32_t* values, int64_t n,
                       const __m512 shrink[2], __m512 out[kRows][2]) {
  __m512 sums[kRows][2];
  for (int i = 0; i < kRows; i++)
    for (int half = 0; half < 2; half++) sums[i][half] = out[i][half] * shrink[half];
  for (int64_t t = 0; t < n; t++) {
    const __m512bh p0 = (__m512bh)probs[t][0], p1 = (__m512bh)probs[t][1];
    for (int i = 0; i < kRows; i++) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(values[t * D + i]);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], p0, pair);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], p1, pair);
    }
  }
  for (int i = 0; i < kRows; i++)
    for (int half = 0; half < 2; half++) out[i][half] = sums[i][half];
}

// One block: q [n_queries, D] over a head's S keys -> out [n_queries, D]
template <int D>
void attend_block(const float* q, int64_t q_stride, int64_t n_queries, const PackedHead<D>& head,
                  int64_t S, float* out, int64_t out_stride) {
  uint8_t packed[D * kQueries];
  float scales[kQueries] = {};
  std::memset(packed, 128, sizeof(packed));
  for (int64_t i = 0; i < n_queries; i++) {
    int32_t whole[D];
    const float step = quantize_row<D>(q + i * q_stride, whole);
    scales[i] = step * 1.44269504f / std::sqrt(static_cast<float>(D));
    for (int d = 0; d < D; d++)
      packed[(d / 4 * kQueries + i) * 4 + d % 4] = static_cast<uint8_t>(whole[d] + 128);
  }

  __m512 scale[2], largest[2], total[2], shrink[2], sums[D][2];
  for (int half = 0; half < 2; half++) {
    scale[half] = _mm512_loadu_ps(scales + 16 * half);
    largest[half] = _mm512_set1_ps(kLowest);
    total[half] = _mm512_setzero_ps();
  }
  for (int d = 0; d < D; d++) sums[d][0] = sums[d][1] = _mm512_setzero_ps();
  int16_t order[kQueries];  // 16 of even keys, then 16 of odd ones: to pairs, even ones first
  for (int i = 0; i < kQueries; i++) order[i] = i / 2 + i % 2 * 16;
  const __m512i interleave = _mm512_loadu_si512(order);
  for (int64_t begin = 0; begin < S; begin += kKeys) {
    const int64_t n = std::min<int64_t>(kKeys, S - begin);
    __m512 scores[kKeys][2];
    __m512i probs[kKeys / 2][2];
    for (int64_t t = 0; t < n; t += kRows)
      score_keys<D>(packed, head.keys.data() + (begin + t) * D, head.offsets.data() + begin + t,
                    head.key_scales.data() + begin + t, scores + t);
    for (int half = 0; half < 2; half++) {
      __m512 top = largest[half];
      for (int64_t t = 0; t < n; t++) top = _mm512_max_ps(top, scores[t][half]);
      shrink[half] = exp2_negative((largest[half] - top) * scale[half]);
      largest[half] = top;
      __m512 sum = total[half] * shrink[half];
      const __m512 shift = top * scale[half];
      if (n % 2) scores[n][half] = _mm512_set1_ps(kLowest);  // padding of a pair
      for (int64_t t = 0; t < n; t += 2) {
        const __m512 even = exp2_negative(scores[t][half] * scale[half] - shift);
        const __m512 odd = exp2_negative(scores[t + 1][half] * scale[half] - shift);
        sum += even + odd;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        probs[t / 2][half] = _mm512_permutexvar_epi16(interleave, both);
      }
      total[half] = sum;
    }
    for (int d = 0; d < D; d += kRows)
      add_values<D>(probs, head.values.data() + begin / 2 * D + d, (n + 1) / 2, shrink, sums + d);
  }
  float result[D][kQueries];
  for (int d = 0; d < D; d++)
    for (int half = 0; half < 2; half++)
      _mm512_storeu_ps(result[d] + 16 * half, sums[d][half] / total[half]);
  for (int64_t i = 0; i < n_queries; i++)
    for (int d = 0; d < D; d++) out[i * out_stride + d] = result[d][i];
}

template <int D>
void attend_heads(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out) {
  const int64_t H = k.size(1), S = k.size(2), n_heads = k.size(0) * H, n_queries = q.size(2);
  const int64_t n_blocks = (n_queries + kQueries - 1) / kQueries;
  auto head_data = [&](const Tensor& x, int64_t i) {
    return x.const_data_ptr<float>() + i / H * x.stride(0) + i % H * x.stride(1);
  };
  std::vector<PackedHead<D>> heads(n_heads);
  at::parallel_for(0, n_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      pack_head<D>(head_data(k, i), k.stride(2), head_data(v, i), v.stride(2), S, heads[i]);
  });
  float* out_data = out.mutable_data_ptr<float>();
  at::parallel_for(0, n_heads * n_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t head = i / n_blocks, row = i % n_blocks * kQueries;
      attend_block<D>(head_data(q, head) + row * q.stride(2), q.stride(2),
                      std::min<int64_t>(kQueries, n_queries - row), heads[head], S,
                      out_data + ((head / H * n_queries + row) * H + head % H) * D, H * D);
    }
  });
}
#else
constexpr bool kHasAttendAll = false;
template <int D>
void attend_heads(const Tensor&, const Tensor&, const Tensor&, Tensor&) {
  TORCH_CHECK(false, "attend_all needs AVX-512 with VNNI and BF16");
}
#endif

// q [B, H, S, 64] over k, v [B, H, S, 64] -> [B, H, S, 64] float32, without a mask. Heads may be
// views of a fused projection.
Tensor attend_all(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK(q.size(3) == 64 && k.size(3) == 64 && k.sizes() == v.sizes(), "head dimension");
  TORCH_CHECK(q.size(0) == k.size(0) && q.size(1) == k.size(1), "q and k differ");
  for (const Tensor& x : {q, k, v})
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.stride(3) == 1, "layout of q, k or v");
  Tensor out = at::empty({q.size(0), q.size(2), q.size(1), 64}, q.options());
  attend_heads<64>(q, k, v, out);
  return out.transpose(1, 2);  // so that merging the heads moves nothing
}

bool has_attend_all() { return kHasAttendAll; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(whisper_fast, m) {
  m.def("attend_all(Tensor q, Tensor k, Tensor v) -> Tensor");
  m.def("has_attend_all() -> bool", has_attend_all);
}

TORCH_LIBRARY_IMPL(whisper_fast, CPU, m) { m.impl("attend_all", attend_all); }
