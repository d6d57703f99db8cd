// BatchNorm of capsules, without affine, straight into and out of the memory order of routing; the twin of
// kernels/norm.py.
//
// N images, P positions, J types. A row holds the values of one type at one position, of all images: N logits or 16 N
// entries of poses, p r n. Sums are made in float64, row by row, and rows are added in their order: so neither the
// number of threads nor that of vector lanes decides how often a sum is rounded.

#include <vector>

#include "lanes.h"

namespace {

enum How : Long { NONE, GIVEN, BATCH };  // no BatchNorm, by given statistics, or by those of the batch

// One BatchNorm. `found` receives mean, unbiased variance and factor of each type.
struct Norm {
  Long how;
  const float *mean, *var;  // j, of GIVEN
  double eps;
  float* found;  // 3 j
};

// What a BatchNorm does to a type: x becomes (x - centre) * factor + rest. `rest` is the rounding of the centre.
struct Scaling {
  float centre = 0, factor = 1, rest = 0;

  template <class X>  // float or vec
  INLINE X operator()(X x) const {
    return (x - centre) * factor + rest;
  }
};

// What it does to the gradient of a type: dy becomes factor * dy - shift - slope * y.
struct Back {
  float factor, shift, slope;

  template <class X>
  INLINE X operator()(X dy, X y) const {
    return factor * dy - shift - slope * y;
  }
};

struct Sums {
  double first, second;
};

// Adds up u and u v in lanes, whose number is that of the entries of a pose on every processor.
struct Adder {
  static constexpr int LANES = 16;
  double first[LANES] = {}, second[LANES] = {};

  // Adds u(k) and u(k) v(k) for k < LANES.
  template <class U, class V>
  INLINE void add(const U& u, const V& v) {
#pragma omp simd
    for (int k = 0; k < LANES; k++) {
      const double x = u(k);
      first[k] += x;
      second[k] += x * v(k);
    }
  }

  INLINE Sums sums() const {
    Sums sums = {0, 0};
    for (int k = 0; k < LANES; k++) {
      sums.first += first[k];
      sums.second += second[k];
    }
    return sums;
  }
};

// Returns the sums of u(b) and u(b) v(b) over b < B.
template <class U, class V>
INLINE Sums sum_products(Long B, const U& u, const V& v) {
  Adder adder;
  Long b = 0;
  for (; b + Adder::LANES <= B; b += Adder::LANES)
    adder.add([&](int k) INLINE_LAMBDA { return u(b + k); }, [&](int k) INLINE_LAMBDA { return v(b + k); });
  for (; b < B; b++) {
    const double x = u(b);
    adder.first[0] += x;
    adder.second[0] += x * v(b);
  }
  return adder.sums();
}

INLINE Sums sum_gaps(const float* x, Long B, double shift) {
  const auto gap = [=](Long b) INLINE_LAMBDA { return (double)x[b] - shift; };
  return sum_products(B, gap, gap);
}

INLINE Sums sum_grads(const float* dy, const float* y, Long B) {
  return sum_products(B, [=](Long b) INLINE_LAMBDA { return (double)dy[b]; },
                      [=](Long b) INLINE_LAMBDA { return (double)y[b]; });
}

// Returns the same as sum_gaps of `count` poses whose entries lie together, and `step` numbers from pose to pose.
INLINE Sums sum_gaps_of_poses(const float* x, Long count, Long step, double shift) {
  Adder adder;
  for (Long i = 0; i < count; i++) {
    const auto gap = [=](int k) INLINE_LAMBDA { return (double)x[i * step + k] - shift; };
    adder.add(gap, gap);
  }
  return adder.sums();
}

// Adds the sums of rows `a j` over a.
std::vector<Sums> add_rows(const std::vector<Sums>& rows, Long A, Long J) {
  std::vector<Sums> total((size_t)J, {0, 0});
  for (Long a = 0; a < A; a++)
    for (Long j = 0; j < J; j++) {
      total[(size_t)j].first += rows[(size_t)(a * J + j)].first;
      total[(size_t)j].second += rows[(size_t)(a * J + j)].second;
    }
  return total;
}

// Calls sum(a, j) for all rows, and returns the sums of types.
template <class F>
std::vector<Sums> sums_of_types(Long A, Long J, Long row, Long threads, const F& sum) {
  std::vector<Sums> rows((size_t)(A * J));
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, A * J * row / 16))
  for (Long k = 0; k < A * J; k++) rows[(size_t)k] = sum(k / J, k % J);
  return add_rows(rows, A, J);
}

// Returns the scalings of types with `count` values each, from the sums of their gaps to `shift`, and writes `found`.
template <class Shift>
std::vector<Scaling> scalings(const Norm& norm, Long J, Long count, const std::vector<Sums>& sums, const Shift& shift) {
  std::vector<Scaling> found((size_t)J);
  for (Long j = 0; j < J && norm.how != NONE; j++) {
    double mean, var, unbiased;
    if (norm.how == BATCH) {
      const double gap = sums[(size_t)j].first / (double)count;
      mean = shift(j) + gap;
      var = sums[(size_t)j].second / (double)count - gap * gap;
      var = var < 0 ? 0 : var;
      unbiased = var * ((double)count / (double)(count - 1));
    } else {
      mean = norm.mean[j];
      var = unbiased = norm.var[j];
    }
    const double factor = 1 / std::sqrt(var + norm.eps);
    Scaling& s = found[(size_t)j];
    s.centre = norm.found[j] = (float)mean;
    s.factor = norm.found[2 * J + j] = (float)factor;
    s.rest = (float)(((double)s.centre - mean) * factor);
    norm.found[J + j] = (float)unbiased;
  }
  return found;
}

std::vector<Back> backs(Long how, const float* found, Long J, Long count, const std::vector<Sums>& sums) {
  std::vector<Back> made((size_t)J, {1, 0, 0});
  for (Long j = 0; j < J && how != NONE; j++) {
    const double factor = found[2 * J + j];
    made[(size_t)j].factor = (float)factor;
    if (how == GIVEN) continue;
    made[(size_t)j].shift = (float)(factor * sums[(size_t)j].first / (double)count);
    made[(size_t)j].slope = (float)(factor * sums[(size_t)j].second / (double)count);
  }
  return made;
}

INLINE float sigmoid(float x) {
  const float e = exp_(x < 0 ? x : -x);
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

INLINE void sigmoids(float* a, const float* logit, Long size) {
#pragma omp simd
  for (Long k = 0; k < size; k++) a[k] = sigmoid(logit[k]);
}

// Computes the gradient of normalised logits, of which a = sigmoid(logit) is made; each given gradient may be null.
INLINE void grad_logits(float* d, const float* a, const float* da, const float* dlogit, Long size) {
  for (Long k = 0; k < size; k++) d[k] = (dlogit ? dlogit[k] : 0.0f) + (da ? da[k] * a[k] * (1.0f - a[k]) : 0.0f);
}

// The vectors in the capsules of a map.
INLINE Long vectors_of(Long P, Long J, Long N) { return P * J * N; }

}  // namespace

extern "C" {

// Normalises logits l j n and poses l j p r n of parents, and computes activations a.
void norm_parents(const float* z, const float* m, Long how_z, const float* mean_z, const float* var_z, double eps_z,
                  Long how_m, const float* mean_m, const float* var_m, double eps_m, float* logit, float* a,
                  float* pose, float* found_z, float* found_m, Long L, Long J, Long N, Long threads) {
  const Norm of_z = {how_z, mean_z, var_z, eps_z, found_z}, of_m = {how_m, mean_m, var_m, eps_m, found_m};
  const auto normalise = [=](const Norm& norm, const float* x, float* y, Long B) {
    const auto shift = [=](Long j) { return (double)x[j * B]; };
    std::vector<Sums> sums;
    if (norm.how == BATCH)
      sums = sums_of_types(L, J, B, threads,
                           [=](Long l, Long j) { return sum_gaps(x + (l * J + j) * B, B, shift(j)); });
    const std::vector<Scaling> of_types = scalings(norm, J, L * B, sums, shift);
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, L * J * B / 16))
    for (Long k = 0; k < L * J; k++) {
      const Scaling s = of_types[(size_t)(k % J)];
#pragma omp simd
      for (Long b = k * B; b < k * B + B; b++) y[b] = s(x[b]);
    }
  };
  normalise(of_z, z, logit, N);
  sigmoids(a, logit, L * J * N);
  normalise(of_m, m, pose, 16 * N);
}

// Goes back through norm_parents; da, dlogit and dpose may be null, and dm is written only where dpose is not.
void norm_parents_grad(const float* logit, const float* a, const float* pose, const float* found_z,
                       const float* found_m, Long how_z, Long how_m, const float* da, const float* dlogit,
                       const float* dpose, float* dz, float* dm, Long L, Long J, Long N, Long threads) {
  const auto go_back = [=](Long how, const float* found, const float* y, const float* dy, float* dx, Long B) {
    std::vector<Sums> sums;
    if (how == BATCH)
      sums = sums_of_types(L, J, B, threads, [=](Long l, Long j) {
        return sum_grads(dy + (l * J + j) * B, y + (l * J + j) * B, B);
      });
    const std::vector<Back> of_types = backs(how, found, J, L * B, sums);
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, L * J * B / 16))
    for (Long k = 0; k < L * J; k++) {
      const Back back = of_types[(size_t)(k % J)];
#pragma omp simd
      for (Long b = k * B; b < k * B + B; b++) dx[b] = back(dy[b], y[b]);
    }
  };
  grad_logits(dz, a, da, dlogit, L * J * N);
  go_back(how_z, found_z, logit, dz, dz, N);
  if (dpose) go_back(how_m, found_m, pose, dpose, dm, 16 * N);
}

// Makes primary capsules of features x: n p (j d + j), channels innermost: poses, then logits.
void norm_primary(const float* x, Long how_z, const float* mean_z, const float* var_z, double eps_z, Long how_m,
                  const float* mean_m, const float* var_m, double eps_m, float* logit, float* a, float* pose,
                  float* found_z, float* found_m, Long N, Long P, Long J, Long threads) {
  constexpr Long SHARE = 32;  // rows of x that are summed at a time: they stay in the first-level cache
  const Norm of_z = {how_z, mean_z, var_z, eps_z, found_z}, of_m = {how_m, mean_m, var_m, eps_m, found_m};
  const Long F = 17 * J, shares = parts(N * P, SHARE);
  const auto shift_z = [=](Long j) { return (double)x[16 * J + j]; };
  const auto shift_m = [=](Long j) { return (double)x[16 * j]; };
  const int woken = threads_for(threads, vectors_of(P, J, N));
  std::vector<Sums> sums_z, sums_m;
  if (how_z == BATCH || how_m == BATCH) {
    std::vector<Sums> rows_z((size_t)(shares * J)), rows_m((size_t)(shares * J));
#pragma omp parallel for schedule(static) num_threads(woken)
    for (Long s = 0; s < shares; s++) {
      const float* const rows = x + s * SHARE * F;
      const Long count = least(SHARE, N * P - s * SHARE);
      for (Long j = 0; j < J; j++) {
        const auto z = [=](Long k) INLINE_LAMBDA { return (double)rows[k * F + 16 * J + j] - shift_z(j); };
        rows_z[(size_t)(s * J + j)] = sum_products(count, z, z);
        rows_m[(size_t)(s * J + j)] = sum_gaps_of_poses(rows + 16 * j, count, F, shift_m(j));
      }
    }
    sums_z = add_rows(rows_z, shares, J);
    sums_m = add_rows(rows_m, shares, J);
  }
  const std::vector<Scaling> types_z = scalings(of_z, J, N * P, sums_z, shift_z);
  const std::vector<Scaling> types_m = scalings(of_m, J, 16 * N * P, sums_m, shift_m);
#pragma omp parallel for schedule(static) num_threads(woken)
  for (Long p = 0; p < P; p++) {
    for (Long j = 0; j < J; j++) {
      const Scaling s = types_m[(size_t)j];
      const float* const from = x + p * F + 16 * j;
      float* const to = pose + (p * J + j) * 16 * N;
      if (N == 1) {
        for (int d = 0; d < D; d++) to[d] = s(from[d]);
        continue;
      }
      for (Long n = 0; n < N; n += WIDTH) {
        const int live = (int)least(WIDTH, N - n);
        alignas(64) float y[POSE];
        poses_to_vectors(y, from + n * P * F, P * F, live);
        for (Long d = 0; d < D; d++) store(to + d * N + n, s(load(y + d * WIDTH)), live);
      }
    }
    for (Long n = 0; n < N; n++) {
      const float* const row = x + (n * P + p) * F;
      for (Long j = 0; j < J; j++) logit[(p * J + j) * N + n] = types_z[(size_t)j](row[16 * J + j]);
    }
    sigmoids(a + p * J * N, logit + p * J * N, J * N);
  }
}

// Goes back through norm_primary; da, dlogit and dpose may be null. dz receives the gradient of normalised logits.
void norm_primary_grad(const float* logit, const float* a, const float* pose, const float* found_z,
                       const float* found_m, Long how_z, Long how_m, const float* da, const float* dlogit,
                       const float* dpose, float* dx, float* dz, Long N, Long P, Long J, Long threads) {
  const Long F = 17 * J;
  grad_logits(dz, a, da, dlogit, P * J * N);
  std::vector<Sums> sums_z, sums_m;
  if (how_z == BATCH)
    sums_z = sums_of_types(P, J, N, threads, [=](Long p, Long j) {
      return sum_grads(dz + (p * J + j) * N, logit + (p * J + j) * N, N);
    });
  if (how_m == BATCH && dpose)
    sums_m = sums_of_types(P, J, 16 * N, threads, [=](Long p, Long j) {
      return sum_grads(dpose + (p * J + j) * 16 * N, pose + (p * J + j) * 16 * N, 16 * N);
    });
  if (!dpose) sums_m.assign((size_t)J, {0, 0});
  const std::vector<Back> types_z = backs(how_z, found_z, J, N * P, sums_z);
  const std::vector<Back> types_m = backs(how_m, found_m, J, 16 * N * P, sums_m);
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, vectors_of(P, J, N)))
  for (Long p = 0; p < P; p++) {
    for (Long j = 0; j < J; j++) {
      const Back back = types_m[(size_t)j];
      float* const to = dx + p * F + 16 * j;
      for (Long n = 0; n < N; n += WIDTH) {
        const int live = (int)least(WIDTH, N - n);
        alignas(64) float y[POSE] = {};
        for (Long d = 0; d < D && dpose; d++) {
          const Long at = ((p * J + j) * 16 + d) * N + n;
          store(y + d * WIDTH, back(load(dpose + at, live), load(pose + at, live)));
        }
        vectors_to_poses(to + n * P * F, P * F, y, live);
      }
    }
    for (Long n = 0; n < N; n++) {
      float* const row = dx + (n * P + p) * F;
      for (Long j = 0; j < J; j++) {
        const Long at = (p * J + j) * N + n;
        row[16 * J + j] = types_z[(size_t)j](dz[at], logit[at]);
      }
    }
  }
}

}  // extern "C"
