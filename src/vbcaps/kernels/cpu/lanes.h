// The code that the C++ kernels share: vectors of lanes, functions of numbers, scratch memory, and the votes' inputs.
//
// A vector is K lanes of four numbers: a row of the poses of K images or, if there is only one image, of K types.
// Row p of a vote is sum_q M[p, q] W[q, :]: every lane multiplies an entry of M by a row of W.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

using Long = int64_t;

inline Long least(Long a, Long b) { return a < b ? a : b; }
inline Long most(Long a, Long b) { return a > b ? a : b; }
inline Long parts(Long a, Long size) { return (a + size - 1) / size; }

// --- vectors ---------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int K = 4;
#elif defined(__AVX__)
constexpr int K = 2;
#else
constexpr int K = 1;
#endif

constexpr int WIDTH = 4 * K;

constexpr float SMALLEST_WEIGHT = 1.0842021724855044e-19f;  // the least sum of responsibilities in a divisor

typedef float vec __attribute__((vector_size(4 * WIDTH)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
typedef int32_t order __attribute__((vector_size(4 * WIDTH)));
#define SHUFFLE(v, ...) __builtin_shuffle(v, order{__VA_ARGS__})
#endif

// Selects the same entries in every lane.
#if defined(__AVX512F__)
#define IN_LANE(v, a, b, c, d) \
  SHUFFLE(v, a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d, 8 + a, 8 + b, 8 + c, 8 + d, 12 + a, 12 + b, 12 + c, 12 + d)
#elif defined(__AVX__)
#define IN_LANE(v, a, b, c, d) SHUFFLE(v, a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d)
#else
#define IN_LANE(v, a, b, c, d) SHUFFLE(v, a, b, c, d)
#endif

INLINE vec load(const float* x) {
  vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

INLINE void store(float* x, vec v) { std::memcpy(x, &v, sizeof v); }

INLINE vec fill(float x) {
  vec v;
  for (int k = 0; k < WIDTH; k++) v[k] = x;
  return v;
}

// Returns four numbers in every lane.
INLINE vec tile(const float* x) {
#if defined(__AVX512F__)
  return (vec)_mm512_broadcast_f32x4(_mm_loadu_ps(x));
#elif defined(__AVX__)
  return (vec)_mm256_broadcast_ps((const __m128*)x);
#else
  return load(x);
#endif
}

// Returns K numbers, the k-th in all entries of lane k.
INLINE vec spread(const float* x) {
#if defined(__AVX512F__)
  return SHUFFLE(tile(x), 0, 0, 0, 0, 5, 5, 5, 5, 10, 10, 10, 10, 15, 15, 15, 15);
#elif defined(__AVX__)
  return SHUFFLE((vec)_mm256_castpd_ps(_mm256_broadcast_sd((const double*)x)), 0, 0, 0, 0, 5, 5, 5, 5);
#else
  return fill(x[0]);
#endif
}

// Stores the first number of every lane.
INLINE void store_firsts(float* x, vec v) {
#if defined(__AVX512F__)
  v = SHUFFLE(v, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
#elif defined(__AVX__)
  v = SHUFFLE(v, 0, 4, 0, 4, 0, 4, 0, 4);
#endif
  std::memcpy(x, &v, 4 * K);
}

// Returns the sum of every lane, in all of its entries.
INLINE vec sum_of_lanes(vec v) {
  v += IN_LANE(v, 1, 0, 3, 2);
  return v + IN_LANE(v, 2, 3, 0, 1);
}

// In the next two functions only `live` lanes exist in memory; `spread` sets the others to 0.
INLINE vec spread(const float* x, int live) {
  if (live == K) return spread(x);
  const float y[4] = {x[0], live > 1 ? x[1] : 0.0f, live > 2 ? x[2] : 0.0f, 0.0f};
  return spread(y);
}

INLINE void store_firsts(float* x, vec v, int live) {
  float y[K];
  store_firsts(y, v);
  std::memcpy(x, y, 4 * (size_t)live);
}

// --- functions of numbers, without branches, so that the compiler vectorises loops over them -------------------------

INLINE int32_t bits(float x) {
  int32_t i;
  std::memcpy(&i, &x, 4);
  return i;
}

INLINE float number(int32_t i) {
  float x;
  std::memcpy(&x, &i, 4);
  return x;
}

// Returns e^x for x <= 0, or 0 where e^x would be subnormal.
INLINE float exp_(float x) {
  const float t = x * 1.44269504f + 12582912.0f;  // its last bits are round(x / ln 2)
  const float n = t - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  y = number(bits(y) + (int32_t)((uint32_t)bits(t) << 23));
  y = x < -87.0f ? 0.0f : y;
  return x == x ? y : x;
}

// Returns ln x for x >= 0.
INLINE float log_(float x) {
  const bool small = x < 1.17549435e-38f;
  const int32_t i = bits(small ? x * 8388608.0f : x);
  const int32_t e = (i - 0x3f3504f3) >> 23;  // so that the mantissa lies in [sqrt(1/2), sqrt(2))
  const float n = (float)(small ? e - 23 : e);
  const float f = number(i - (int32_t)((uint32_t)e << 23)) - 1.0f;
  float y = 7.0376836292e-2f;
  y = y * f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  const float square = f * f;
  y = y * f * square - n * 2.12194440e-4f - 0.5f * square;
  y = f + y + n * 0.693359375f;
  y = x == 0.0f ? -INFINITY : y;
  return x < INFINITY ? y : x;  // infinity and NaN are returned unchanged
}

// --- memory ----------------------------------------------------------------------------------------------------------

// Memory that a thread keeps between calls: `take` returns parts of what `reserve` allocated, aligned to cache lines.
struct Scratch {
  char* start = nullptr;
  size_t size = 0, used = 0;
  ~Scratch() { std::free(start); }

  void reserve(size_t floats, size_t takes) {
    used = 0;
    const size_t bytes = floats * 4 + takes * 64;
    if (bytes <= size) return;
    std::free(start);
    size = (bytes + 4095) / 4096 * 4096;
    start = static_cast<char*>(std::aligned_alloc(64, size));
    if (!start) std::abort();
  }

  float* take(Long floats) {
    float* const part = reinterpret_cast<float*>(start + used);
    used += ((size_t)floats * 4 + 63) / 64 * 64;
    return part;
  }
};

inline thread_local Scratch scratch;

// The inputs of the votes; cpu/launch.py has the same structure.
struct Votes {
  const float *a, *pose, *W, *coordinates;  // c n; c p n r; g j p r; i 2 or null
  const Long* child;                  // l i
  const int32_t *parents, *seen;      // c s; c
  Long C, N, L, I, J, G, S, types, threads;
};

// How images or types are assigned to lanes: `blocks` of K images, and `units` of one type; or units of K types.
struct Lanes {
  Long J, N;
  bool types;  // lanes are types
  Long units, blocks;
  Long unit_scalars;           // from a unit to the next, among the scalars j n of a slot or field
  Long unit_rows, row, lane;   // from a unit to the next, a row, a lane, among the rows j p n r of a field

  Lanes(Long J, Long N, bool types) : J(J), N(N), types(types) {
    units = types ? parts(J, K) : J;
    blocks = types ? 1 : parts(N, K);
    unit_scalars = types ? K : N;
    unit_rows = types ? 16 * K : 16 * N;
    row = 4 * N;
    lane = types ? 16 : 4;
  }

  int live(Long u, Long b) const { return (int)(types ? least(K, J - K * u) : least(K, N - K * b)); }
  Long scalar(Long slot, Long u, Long b) const { return slot * J * N + u * unit_scalars + b * K; }
  Long rows(Long l, Long u, Long b) const { return l * J * 16 * N + u * unit_rows + b * WIDTH; }
};

// For votes, lanes are types if there is only one image.
inline Lanes lanes_of_votes(Long J, Long N) { return Lanes(J, N, K > 1 && N == 1 && J > 1); }

// Loads four rows of a unit and block; inactive lanes are 0.
inline void load_rows(vec (&X)[4], const float* x, const Lanes& s, int live) {
  if (s.lane == 4 && live == K) {
    for (int p = 0; p < 4; p++) X[p] = load(x + p * s.row);
    return;
  }
  for (int p = 0; p < 4; p++) {
    float y[WIDTH] = {};
    for (int k = 0; k < live; k++) std::memcpy(y + 4 * k, x + p * s.row + k * s.lane, 16);
    X[p] = load(y);
  }
}

inline void store_rows(float* x, const vec (&X)[4], const Lanes& s, int live) {
  if (s.lane == 4 && live == K) {
    for (int p = 0; p < 4; p++) store(x + p * s.row, X[p]);
    return;
  }
  for (int p = 0; p < 4; p++) {
    float y[WIDTH];
    store(y, X[p]);
    for (int k = 0; k < live; k++) std::memcpy(x + p * s.row + k * s.lane, y + 4 * k, 16);
  }
}

// Loads K float64 numbers as a vector; inactive lanes are 1, so that divisions by them are safe.
INLINE vec spread_of(const double* x, int live) {
  float y[4];
  for (int k = 0; k < K; k++) y[k] = k < live ? (float)x[k] : 1.0f;
  return spread(y);
}

// Computes sum_d ln X_d of each lane.
inline void sum_of_logs(double* sums, const vec (&X)[4], int live) {
  float x[4 * WIDTH];
  for (int p = 0; p < 4; p++) store(x + p * WIDTH, X[p]);
#pragma omp simd
  for (int k = 0; k < 4 * WIDTH; k++) x[k] = log_(x[k]);
  for (int n = 0; n < live; n++) {
    sums[n] = 0;
    for (int d = 0; d < 16; d++) sums[n] += x[d / 4 * WIDTH + 4 * n + d % 4];
  }
}

// Stores the k-th of the terms that each parent adds to the gradient of votes, as grad_votes reads them: for each
// field, unit and block the rows of E_0, C_0, E_1, ..., m, `cell` numbers in all.
inline void store_terms(float* terms, Long cell, Long k, const vec (&X)[4], const Lanes& s, Long l, Long j, Long b) {
  const Lanes t = lanes_of_votes(s.J, s.N);
  const Long u = t.types ? j / K : j;
  float* const x = terms + ((l * t.units + u) * t.blocks + b) * cell + k * 4 * WIDTH;
  for (int p = 0; p < 4; p++)
    if (t.types)
      std::memcpy(x + p * WIDTH + j % K * 4, &X[p], 16);
    else
      store(x + p * WIDTH, X[p]);
}

// Asks the system to back large new memory, which nothing has touched yet, with huge pages.
inline void expect_large(float* x, Long floats) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 1 << 21;
  const uintptr_t from = ((uintptr_t)x + PAGE - 1) / PAGE * PAGE, to = (uintptr_t)(x + floats) / PAGE * PAGE;
  if (from < to) madvise((void*)from, to - from, MADV_HUGEPAGE);
#else
  (void)x, (void)floats;
#endif
}

// Returns how many threads are worth waking for `work` vectors.
inline int threads_for(Long threads, Long work) { return (int)most(1, least(threads, work / 8192)); }
