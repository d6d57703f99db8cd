// The code that the C++ kernels share: vectors, functions of numbers, scratch memory, and the votes' inputs.
//
// A vector holds one number for each of WIDTH images or, where that wastes fewer entries, for each of WIDTH types of
// one image. An entry of a vote is sum_q M[p, q] W[q, r]: the pose differs from image to image and the weight is the
// same for all, or the weight differs from type to type and the pose is the same for all.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

using Long = int64_t;

inline Long least(Long a, Long b) { return a < b ? a : b; }
inline Long most(Long a, Long b) { return a > b ? a : b; }
inline Long parts(Long a, Long size) { return (a + size - 1) / size; }

// --- vectors ---------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

constexpr int D = 16;         // entries of a pose
constexpr int ROWS = 4 * WIDTH;  // floats of the vectors of a row
constexpr int POSE = D * WIDTH;  // floats of the vectors of a pose

constexpr float SMALLEST_WEIGHT = 1.0842021724855044e-19f;  // the least sum of responsibilities in a divisor

typedef float vec __attribute__((vector_size(4 * WIDTH)));

INLINE vec load(const float* x) {
  vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

INLINE void store(float* x, vec v) { std::memcpy(x, &v, sizeof v); }

INLINE vec fill(float x) { return x - vec{}; }

// Loads a vector of which only `live` numbers exist in memory; the others become 0.
INLINE vec load(const float* x, int live) {
  if (live == WIDTH) return load(x);
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << live) - 1), x);
#else
  vec v = {};
  for (int k = 0; k < WIDTH; k++)
    if (k < live) v[k] = x[k];
  return v;
#endif
}

INLINE void store(float* x, vec v, int live) {
  if (live == WIDTH) return store(x, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(x, (__mmask16)((1u << live) - 1), (__m512)v);
#else
  for (int k = 0; k < WIDTH; k++)
    if (k < live) x[k] = v[k];
#endif
}

// Returns, for each group of 2 `size` numbers, its lower (or upper) half in a and then its lower (or upper) half in b.
template <int size, bool upper, size_t... k>
INLINE vec halves_of(vec a, vec b, std::index_sequence<k...>) {
#define FROM ((int)(k % size + k / (2 * size) * (2 * size) + (upper ? size : 0) + (k / size % 2 ? WIDTH : 0)))...
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, FROM);
#else
  typedef int32_t order __attribute__((vector_size(4 * WIDTH)));
  return __builtin_shuffle(a, b, order{FROM});
#endif
#undef FROM
}

template <int size, bool upper>
INLINE vec halves(vec a, vec b) {
  return halves_of<size, upper>(a, b, std::make_index_sequence<WIDTH>());
}

template <int size>
INLINE void add_halves(vec* x) {
  for (int k = 0; k < size; k++) x[k] = halves<size, false>(x[k], x[k + size]) + halves<size, true>(x[k], x[k + size]);
  if constexpr (size > 1) add_halves<size / 2>(x);
}

// Adds the sums of the WIDTH vectors' numbers to WIDTH numbers: the k-th vector's to the k-th number.
INLINE void add_sums(float* sums, vec (&x)[WIDTH]) {
  add_halves<WIDTH / 2>(x);
  store(sums, load(sums) + x[0]);
}

// Exchanges rows and columns of WIDTH vectors: first in groups of 2 `size`.
template <int size = WIDTH / 2>
INLINE void transpose(vec (&x)[WIDTH]) {
  for (int k = 0; k < WIDTH; k++) {
    if (k & size) continue;
    const vec lower = halves<size, false>(x[k], x[k + size]), upper = halves<size, true>(x[k], x[k + size]);
    x[k] = lower;
    x[k + size] = upper;
  }
  if constexpr (size > 1) transpose<size / 2>(x);
}

// --- functions of numbers and vectors, without branches, so that the compiler vectorises loops over them -------------

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

typedef uint32_t ints __attribute__((vector_size(4 * WIDTH)));

// Returns e^x for x <= 0, or 0 where e^x would be subnormal; X is float or vec, and N as wide.
template <class X, class N>
INLINE X exp_of(X x) {
  const X t = x * 1.44269504f + 12582912.0f;  // its last bits are round(x / ln 2)
  const X n = t - 12582912.0f;
  const X r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  X y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  N bits_t, bits_y;
  std::memcpy(&bits_t, &t, sizeof t);
  std::memcpy(&bits_y, &y, sizeof y);
  bits_y += bits_t << 23;
  std::memcpy(&y, &bits_y, sizeof y);
  y = x < -87.0f ? X{} : y;
  return x == x ? y : x;
}

INLINE float exp_(float x) { return exp_of<float, uint32_t>(x); }
INLINE vec exp_(vec x) { return exp_of<vec, ints>(x); }

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

// --- poses -----------------------------------------------------------------------------------------------------------

// Loads D rows that lie `step` numbers apart, of which `live` exist in memory, as vectors times `scale`.
INLINE void load_rows(float* to, const float* from, Long step, int live, float scale = 1.0f) {
  if (live == WIDTH)
    UNROLLED for (int d = 0; d < D; d++) store(to + d * WIDTH, load(from + d * step) * scale);
  else
    for (int d = 0; d < D; d++) store(to + d * WIDTH, load(from + d * step, live) * scale);
}

// Turns `live` poses whose entries lie together, `step` numbers from pose to pose, into D vectors; others become 0.
INLINE void poses_to_vectors(float* to, const float* from, Long step, int live) {
  for (int d = 0; d < D; d += WIDTH) {
    vec x[WIDTH];
    for (int k = 0; k < WIDTH; k++) x[k] = k < live ? load(from + k * step + d) : vec{};
    transpose(x);
    for (int k = 0; k < WIDTH; k++) store(to + (d + k) * WIDTH, x[k]);
  }
}

// Turns D vectors into poses, the other way round.
INLINE void vectors_to_poses(float* to, Long step, const float* from, int live) {
  for (int d = 0; d < D; d += WIDTH) {
    vec x[WIDTH];
    for (int k = 0; k < WIDTH; k++) x[k] = load(from + (d + k) * WIDTH);
    transpose(x);
    for (int k = 0; k < live; k++) store(to + k * step + d, x[k]);
  }
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

// The inputs of the votes; cpu/calls.py has the same structure.
struct Votes {
  const float *a, *pose, *W, *coordinates;  // c n; c p n r; g j p r; i 2 or null
  const Long* child;                  // l i
  const int32_t *parents, *seen;      // c s; c
  float* laid;                        // g u q r types: weights, for vectors of types (lay_weights)
  Long C, N, L, I, J, G, S, types, threads;
};

// How images or types are dealt to vectors: units of one type and blocks of WIDTH images, or units of WIDTH types and
// blocks of one image. The numbers of slots are whole vectors, l b i u; what is beyond the last image or type is any
// finite number.
struct Lanes {
  Long L, I, J, N;
  bool types;  // vectors are of types
  Long units, blocks;

  explicit Lanes(const Votes& v) : Lanes(v.L, v.I, v.J, v.N) {}
  Lanes(Long L, Long I, Long J, Long N)
      : L(L), I(I), J(J), N(N), types(N * parts(J, WIDTH) < J * parts(N, WIDTH)),
        units(types ? parts(J, WIDTH) : J), blocks(types ? N : parts(N, WIDTH)) {}

  int live(Long u, Long b) const { return (int)least(WIDTH, types ? J - WIDTH * u : N - WIDTH * b); }

  Long slots() const { return L * blocks * I * units * WIDTH; }  // floats
  Long slot(Long l, Long i, Long u, Long b) const { return (((l * blocks + b) * I + i) * units + u) * WIDTH; }

  // A unit and block of numbers of parents, l j n.
  vec number(const float* x, Long l, Long u, Long b) const {
    const int n = live(u, b);
    if (!types) return load(x + (l * J + u) * N + b * WIDTH, n);
    float y[WIDTH] = {};
    for (int k = 0; k < n; k++) y[k] = x[(l * J + u * WIDTH + k) * N + b];
    return load(y);
  }

  void put_number(float* x, vec v, Long l, Long u, Long b) const {
    const int n = live(u, b);
    if (!types) return store(x + (l * J + u) * N + b * WIDTH, v, n);
    float y[WIDTH];
    store(y, v);
    for (int k = 0; k < n; k++) x[(l * J + u * WIDTH + k) * N + b] = y[k];
  }

  // A unit and block of poses of parents, l j p r n, as D vectors times `scale`; what is not live becomes 0.
  void poses(float* to, const float* x, Long l, Long u, Long b, float scale = 1.0f) const {
    const int n = live(u, b);
    if (!types) {
      return load_rows(to, x + (l * J + u) * D * N + b * WIDTH, N, n, scale);
    }
    const float* const from = x + (l * J + u * WIDTH) * D * N + b;
    if (N == 1)
      poses_to_vectors(to, from, D, n);
    else
      for (int k = 0; k < WIDTH; k++)
        for (int d = 0; d < D; d++) to[d * WIDTH + k] = k < n ? from[(k * D + d) * N] : 0.0f;
    for (int d = 0; d < D; d++) store(to + d * WIDTH, load(to + d * WIDTH) * scale);
  }

  void put_poses(float* x, const float* from, Long l, Long u, Long b) const {
    const int n = live(u, b);
    if (!types) {
      float* const to = x + (l * J + u) * D * N + b * WIDTH;
      if (n == WIDTH)
        UNROLLED for (int d = 0; d < D; d++) store(to + d * N, load(from + d * WIDTH));
      else
        for (int d = 0; d < D; d++) store(to + d * N, load(from + d * WIDTH), n);
      return;
    }
    float* const to = x + (l * J + u * WIDTH) * D * N + b;
    if (N == 1) return vectors_to_poses(to, D, from, n);
    for (int k = 0; k < n; k++)
      for (int d = 0; d < D; d++) to[(k * D + d) * N] = from[d * WIDTH + k];
  }
};

// What the parents add to the gradients of votes (kernels/backend.py, grad_votes), in the order in which it is read.
// For each block and unit there are the poses E_0, C_0 / 2, E_1, C_1 / 2, ..., -m as vectors. Then comes a number that
// lets the first iteration's gradient of responsibilities use them, too:
//
//   dR_ij = gr_j + sum_d y_d (gb_d + gS_d y_d)            with y = V_ij - m_0
//         = gr_j + number + sum_d x_d (E_0d + C_0d / 2 x_d)   with x = V_ij - m = y - s
//
// Here E_0 = gb + 2 gS s and C_0 = 2 gS, so the number is sum_d s_d (gb_d + gS_d s_d).
struct Terms {
  Lanes s;
  Long number;  // where the number begins
  float* x;

  Terms(float* x, Long T, const Lanes& s) : s(s), number((4 * T - 1) * POSE), x(x) {}

  float* of(Long l, Long u, Long b) const { return x + ((l * s.blocks + b) * s.units + u) * (number + WIDTH); }

  // Writes the vectors that begin at `at` in each unit: their numbers of type j in field l, from n.
  void put_row(Long at, Long l, Long j, const float* from, float scale = 1.0f) const {
    if (!s.types) {
      for (Long b = 0; b < s.blocks; b++)
        store(of(l, j, b) + at, load(from + b * WIDTH, s.live(j, b)) * scale);
      return;
    }
    const Long lane = j % WIDTH, rest = j + 1 < s.J ? lane + 1 : WIDTH;  // what is beyond the last type becomes 0
    for (Long n = 0; n < s.N; n++) {
      float* const to = of(l, j / WIDTH, n) + at;
      to[lane] = from[n] * scale;
      for (Long k = lane + 1; k < rest; k++) to[k] = 0;
    }
  }

  // Writes pose k of type j in field l, from d n.
  void put_pose(Long k, Long l, Long j, const float* pose, float scale = 1.0f) const {
    if (s.types)
      for (Long d = 0; d < D; d++) put_row(k * POSE + d * WIDTH, l, j, pose + d * s.N, scale);
    else
      for (Long b = 0; b < s.blocks; b++)
        load_rows(of(l, j, b) + k * POSE, pose + b * WIDTH, s.N, s.live(j, b), scale);
  }

  // Writes the number of type j in field l, sum_d x_d, or 0 where x, d n, is null; `room`: n.
  void put_number(Long l, Long j, const float* x, float* room) const {
    for (Long n = 0; n < s.N; n++) room[n] = 0;
    for (Long k = 0; x && k < D * s.N; k += s.N) {
#pragma omp simd
      for (Long n = 0; n < s.N; n++) room[n] += x[k + n];
    }
    put_row(number, l, j, room);
  }
};

// Calls use(d, n, d * N + n) for each number of a pose of N images, in loops that the compiler vectorises.
template <class Use>
INLINE void over_pose(Long N, Use use) {
  if (N == 1) {
#pragma omp simd
    for (Long d = 0; d < D; d++) use(d, 0, d);
    return;
  }
  for (Long d = 0; d < D; d++) {
#pragma omp simd
    for (Long n = 0; n < N; n++) use(d, n, d * N + n);
  }
}

// Computes sum_d x_d for each of N images, in float64.
INLINE void sum_over_pose(double* sums, const float* x, Long N) {
  if (N == 1) {
    double part[4] = {};
    for (int d = 0; d < D; d++) part[d % 4] += x[d];
    sums[0] = (part[0] + part[1]) + (part[2] + part[3]);
    return;
  }
  for (Long n = 0; n < N; n++) sums[n] = 0;
  for (Long d = 0; d < D; d++) {
#pragma omp simd
    for (Long n = 0; n < N; n++) sums[n] += x[d * N + n];
  }
}

// Returns how many threads are worth waking for `work` vectors.
inline int threads_for(Long threads, Long work) { return (int)most(1, least(threads, work / 1024)); }

// The work of updating so many parents, in vectors: each takes as long as some votes.
inline Long work_of(Long parents) { return parents * 64 / WIDTH; }
