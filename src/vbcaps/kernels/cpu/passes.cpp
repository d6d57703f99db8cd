// The passes over votes for CPUs: the twins of triton/passes.py, which defines them. No vote leaves the caches.
//
// A task is a field, about 16 images, and some units. It gathers the poses of the field's children and writes to its
// own memory. Sums over tasks are added in an order that does not depend on the number of threads, so results are the
// same in every run.

#include "lanes.h"

namespace {

constexpr int GROUP = 16 / K;          // blocks of images per task, whose scalars share a cache line
constexpr int UNITS = K == 4 ? 2 : 1;  // processed at once, as many as fit into registers

// Gathers the pose and activation of child c in block b for every lane; inactive lanes are 0.
inline void gather(const Votes& v, const Lanes& s, Long c, Long b, float* P, float* a) {
  const float* const pose = v.pose + c * 16 * v.N;
  if (s.types) {
    for (int p = 0; p < 4; p++) store(P + p * WIDTH, tile(pose + 4 * p));
    for (int k = 0; k < K; k++) a[k] = v.a[c];
    return;
  }
  const int live = s.live(0, b);
  vec X[4];
  load_rows(X, pose + WIDTH * b, s, live);
  for (int p = 0; p < 4; p++) store(P + p * WIDTH, X[p]);
  for (int k = 0; k < K; k++) a[k] = k < live ? v.a[c * v.N + K * b + k] : 0.0f;
}

// Weights as `weight_row` reads them: unchanged if lanes are images, rows of K types if lanes are types.
struct Weights {
  const float* W;
  Long slot, unit;  // from one to the next
  float* made = nullptr;

  Weights(const Votes& v, const Lanes& s, bool transposed) : W(v.W) {
    unit = s.types ? 4 * WIDTH : 16;
    slot = s.units * unit;
    if (!s.types && !transposed) return;
    W = made = static_cast<float*>(std::calloc((size_t)(v.G * slot), 4));
    if (!made) std::abort();
    for (Long g = 0; g < v.G; g++)
      for (Long j = 0; j < v.J; j++) {
        const float* const from = v.W + (g * v.J + j) * 16;
        float* const to = made + g * slot + (s.types ? j / K * unit + j % K * 4 : j * unit);
        for (int q = 0; q < 4; q++)
          for (int r = 0; r < 4; r++) to[q * unit / 4 + r] = transposed ? from[4 * r + q] : from[4 * q + r];
      }
  }
  ~Weights() { std::free(made); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
};

template <bool TYPES>
INLINE vec weight_row(const float* W, int q) {
  return TYPES ? load(W + q * WIDTH) : tile(W + 4 * q);
}

// Computes the votes of a child for U units, row by row, and calls use(k, p, V, M) with row p of unit k's vote and the
// entries of row p of the pose. The child's coordinates (or zeros) are added to the last column of rows 0 and 1.
template <bool TYPES, int U, class Use>
INLINE void votes(const float* P, const float* W, Long unit, vec y, vec x, Use use) {
  vec w[U][4];
#pragma GCC unroll 4
  for (int k = 0; k < U; k++)
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) w[k][q] = weight_row<TYPES>(W + k * unit, q);
#pragma GCC unroll 4
  for (int p = 0; p < 4; p++) {
    const vec m = load(P + p * WIDTH);
    const vec M[4] = {IN_LANE(m, 0, 0, 0, 0), IN_LANE(m, 1, 1, 1, 1), IN_LANE(m, 2, 2, 2, 2), IN_LANE(m, 3, 3, 3, 3)};
#pragma GCC unroll 4
    for (int k = 0; k < U; k++) {
      vec V = p == 0 ? y + M[0] * w[k][0] : p == 1 ? x + M[0] * w[k][0] : M[0] * w[k][0];
      V += M[1] * w[k][1];
      V += M[2] * w[k][2];
      V += M[3] * w[k][3];
      use(k, p, V, M);
    }
  }
}

// A slot's coordinates in the last column, or zeros.
struct Coordinates {
  const float* coordinates;
  vec column = {};
  explicit Coordinates(const float* coordinates) : coordinates(coordinates) {
    for (int k = 0; k < K; k++) column[4 * k + 3] = 1.0f;
  }
  INLINE vec y(Long i) const { return coordinates ? column * fill(coordinates[2 * i]) : vec{}; }
  INLINE vec x(Long i) const { return coordinates ? column * fill(coordinates[2 * i + 1]) : vec{}; }
};

// --- tasks -----------------------------------------------------------------------------------------------------------

struct Task {
  Long l, b0, b1, u0, u1;    // field; blocks; units
  float *P, *a, *room;       // poses and activations of the field's children, block by block; scratch memory
  const float* P_of(Long b, Long I) const { return P + (b - b0) * I * 4 * WIDTH; }
  const float* a_of(Long b, Long I) const { return a + (b - b0) * I * K; }
};

template <class Body>
void over_fields(const Votes& v, const Lanes& s, Long room, const Body& body) {
  const Long groups = parts(s.blocks, GROUP), tiles = parts(s.units, UNITS);
  const int threads = threads_for(v.threads, v.L * v.I * s.units * s.blocks);
  const Long shares = threads == 1 ? 1 : most(1, least(tiles, parts(4 * threads, v.L * groups)));
  const Long per = parts(tiles, shares) * UNITS, chunks = parts(s.units, per), tasks = v.L * groups * chunks;
  const Long depth = least(GROUP, s.blocks);
#pragma omp parallel num_threads(threads)
  {
    scratch.reserve((size_t)(v.I * depth * (4 * WIDTH + K) + room), 3);
    Task t;
    t.P = scratch.take(v.I * depth * 4 * WIDTH);
    t.a = scratch.take(v.I * depth * K);
    t.room = scratch.take(room);
#pragma omp for schedule(dynamic)
    for (Long task = 0; task < tasks; task++) {
      t.l = task / (groups * chunks);
      t.b0 = task / chunks % groups * GROUP;
      t.b1 = least(t.b0 + GROUP, s.blocks);
      t.u0 = task % chunks * per;
      t.u1 = least(t.u0 + per, s.units);
      for (Long i = 0; i < v.I; i++)
        for (Long b = t.b0; b < t.b1; b++) {
          const Long at = (b - t.b0) * v.I + i;
          gather(v, s, v.child[t.l * v.I + i], b, t.P + at * 4 * WIDTH, t.a + at * K);
        }
      body(t);
    }
  }
}

// Runs a pass on all units and blocks of a task: pass.run<U>(t, u, b) processes U units.
template <class Pass>
void over_tiles(const Task& t, const Pass& pass) {
  Long u = t.u0;
  for (; u + UNITS <= t.u1; u += UNITS)
    for (Long b = t.b0; b < t.b1; b++) pass.template run<UNITS>(t, u, b);
  for (; u < t.u1; u++)
    for (Long b = t.b0; b < t.b1; b++) pass.template run<1>(t, u, b);
}

template <template <bool> class Pass, class... Arguments>
void run_pass(const Votes& v, Long room, Arguments... arguments) {
  const Lanes s = lanes_of_votes(v.J, v.N);
  const Weights weights(v, s, false);
  over_fields(v, s, room, [&](const Task& t) {
    if (s.types)
      over_tiles(t, Pass<true>{v, s, weights, arguments...});
    else
      over_tiles(t, Pass<false>{v, s, weights, arguments...});
  });
}

// The scalars of U units and a block, slot by slot: in place or, if some lanes are inactive, copied to `room`.
template <int U>
struct Window {
  float* x;
  Long slot, unit;
  bool copied;

  Window(float* all, const Lanes& s, Long first_slot, Long slots, Long u, Long b, float* room, bool read) {
    copied = s.live(u + U - 1, b) < K;
    x = copied ? room : all + s.scalar(first_slot, u, b);
    slot = copied ? U * K : s.J * s.N;
    unit = copied ? K : s.unit_scalars;
    if (!copied || !read) return;
    for (Long i = 0; i < slots; i++)
      for (int k = 0; k < U; k++) {
        const float* const from = all + s.scalar(first_slot + i, u + k, b);
        for (int n = 0; n < K; n++) at(i, k)[n] = n < s.live(u + k, b) ? from[n] : 0.0f;
      }
  }
  INLINE float* at(Long i, int k) const { return x + i * slot + k * unit; }

  // Slots lie far apart, so prefetch them well before their turn.
  template <int WRITE>
  INLINE void ahead(Long i) const {
#pragma GCC unroll 4
    for (int k = 0; k < U; k++) __builtin_prefetch(at(i + 8, k), WRITE);
  }

  void put_back(float* all, const Lanes& s, Long first_slot, Long slots, Long u, Long b) const {
    if (!copied) return;
    for (Long i = 0; i < slots; i++)
      for (int k = 0; k < U; k++)
        std::memcpy(all + s.scalar(first_slot + i, u + k, b), at(i, k), 4 * (size_t)s.live(u + k, b));
  }
};

// --- forward ---------------------------------------------------------------------------------------------------------

template <bool TYPES>
struct Moments {
  const Votes& v;
  const Lanes& s;
  const Weights& weights;
  float* r;  // null for 1/J
  const float *k0, *m0;
  Long k0_step, m0_step;  // from a type to the next
  float *rj, *m, *S;

  static Long room(Long I) { return I * UNITS * (5 * WIDTH + K); }

  // The values of unit u, from one number (or a row of four) per type.
  vec of_unit(const float* x, Long step, Long u) const {
    float y[4];
    for (int k = 0; k < K; k++) y[k] = x[(TYPES ? least(K * u + k, v.J - 1) : u) * step];
    return spread(y);
  }
  vec row_of_unit(const float* x, Long step, Long u, int p) const {
    float y[WIDTH];
    for (int k = 0; k < K; k++)
      std::memcpy(y + 4 * k, x + (TYPES ? least(K * u + k, v.J - 1) : u) * step + 4 * p, 16);
    return load(y);
  }

  template <int U>
  void run(const Task& t, Long u, Long b) const {
    const Long I = v.I, G = v.G, first_slot = t.l * I;
    const Coordinates at(v.coordinates);
    const float *P = t.P_of(b, I), *a = t.a_of(b, I), *const W = weights.W + u * weights.unit;
    float* const kept = t.room;  // R and the votes
    const bool given = r;
    const Window<U> r_ij(r, s, first_slot, given ? I : 0, u, b, t.room + I * UNITS * 5 * WIDTH, true);
    const vec first = fill(1.0f / (float)v.J);
    vec sum[U][4] = {}, total[U] = {};
    for (Long i = 0, g = 0; i < I; i++, g = g + 1 == G ? 0 : g + 1) {
      const vec a_i = spread(a + i * K);
      if (given) r_ij.template ahead<0>(i);
      float* const kept_i = kept + i * U * 5 * WIDTH;
      vec R[U];
#pragma GCC unroll 4
      for (int k = 0; k < U; k++) {
        R[k] = a_i * (given ? spread(r_ij.at(i, k)) : first);
        total[k] += R[k];
        store(kept_i + (5 * k + 4) * WIDTH, R[k]);
      }
      votes<TYPES, U>(P + i * 4 * WIDTH, W + g * weights.slot, weights.unit, at.y(i), at.x(i),
                      [&](int k, int p, vec V, const vec*) INLINE_LAMBDA {
                        sum[k][p] += R[k] * V;
                        store(kept_i + (5 * k + p) * WIDTH, V);
                      });
    }
    vec mean[U][4], scatter[U][4] = {};
    for (int k = 0; k < U; k++) {
      const vec k_0 = of_unit(k0, k0_step, u + k), kappa = k_0 + total[k], tiny = fill(SMALLEST_WEIGHT);
      const vec weight = kappa > tiny ? kappa : tiny;
      for (int p = 0; p < 4; p++) mean[k][p] = (sum[k][p] + k_0 * row_of_unit(m0, m0_step, u + k, p)) / weight;
    }
    for (Long i = 0; i < I; i++) {
      const float* const kept_i = kept + i * U * 5 * WIDTH;
#pragma GCC unroll 4
      for (int k = 0; k < U; k++) {
        const vec R = load(kept_i + (5 * k + 4) * WIDTH);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
          const vec x = load(kept_i + (5 * k + p) * WIDTH) - mean[k][p];
          scatter[k][p] += R * x * x;
        }
      }
    }
    for (int k = 0; k < U; k++) {
      const vec k_0 = of_unit(k0, k0_step, u + k);
      for (int p = 0; p < 4; p++) {
        const vec gap = row_of_unit(m0, m0_step, u + k, p) - mean[k][p];
        scatter[k][p] += k_0 * gap * gap;
      }
      const int live = s.live(u + k, b);
      store_firsts(rj + s.scalar(t.l, u + k, b), total[k], live);
      store_rows(m + s.rows(t.l, u + k, b), mean[k], s, live);
      store_rows(S + s.rows(t.l, u + k, b), scatter[k], s, live);
    }
  }
};

// Computes a number per vote from x = V_ij - m_j: the scores K_j - 1/2 sum_d lambda_jd x_d^2, with lambda in B; or
// dR_ij = gr_j + sum_d x_d (gb_jd + gS_jd x_d), with gb and gS in A and B.
template <bool TYPES, bool SCORES>
struct OfVotes {
  const Votes& v;
  const Lanes& s;
  const Weights& weights;
  const float *m, *A, *B, *constant;
  float* out;

  static Long room(Long I) { return I * UNITS * K; }

  template <int U>
  void run(const Task& t, Long u, Long b) const {
    const Long I = v.I, G = v.G, first_slot = t.l * I;
    const Coordinates at(v.coordinates);
    const float *P = t.P_of(b, I), *const W = weights.W + u * weights.unit;
    const Window<U> result(out, s, first_slot, I, u, b, t.room, false);
    vec mean[U][4], A_j[U][4] = {}, B_j[U][4], base[U];
    for (int k = 0; k < U; k++) {
      const int live = s.live(u + k, b);
      const Long at = s.rows(t.l, u + k, b);
      load_rows(mean[k], m + at, s, live);
      if (!SCORES) load_rows(A_j[k], A + at, s, live);
      load_rows(B_j[k], B + at, s, live);
      base[k] = spread(constant + s.scalar(t.l, u + k, b), live);
    }
    for (Long i = 0, g = 0; i < I; i++, g = g + 1 == G ? 0 : g + 1) {
      vec total[U] = {};
      result.template ahead<1>(i);
      votes<TYPES, U>(P + i * 4 * WIDTH, W + g * weights.slot, weights.unit, at.y(i), at.x(i),
                      [&](int k, int p, vec V, const vec*) INLINE_LAMBDA {
                        const vec x = V - mean[k][p];
                        total[k] += x * (SCORES ? B_j[k][p] * x : A_j[k][p] + B_j[k][p] * x);
                      });
#pragma GCC unroll 4
      for (int k = 0; k < U; k++) {
        const vec sum = sum_of_lanes(total[k]);
        store_firsts(result.at(i, k), SCORES ? base[k] - 0.5f * sum : base[k] + sum);
      }
    }
    result.put_back(out, s, first_slot, I, u, b);
  }
};

template <bool TYPES>
using Scores = OfVotes<TYPES, true>;
template <bool TYPES>
using GradResponsibilities = OfVotes<TYPES, false>;

// Replaces z by r = softmax(z) over all parents of a child.
void normalise(const Votes& v, float* z) {
  const Long size = v.J * v.N;
  const int threads = threads_for(v.threads, v.L * v.I * size / WIDTH);
#pragma omp parallel num_threads(threads)
  {
    scratch.reserve((size_t)(2 * size), 2);
    float *const tops = scratch.take(size), *const sums = scratch.take(size);
#pragma omp for schedule(dynamic, 16)
    for (Long c = 0; c < v.C; c++) {
      const int32_t* const slots = v.parents + c * v.S;
      const Long seen = v.seen[c];
      for (Long n = 0; n < size; n++) tops[n] = -INFINITY, sums[n] = 0.0f;
      for (Long k = 0; k < seen; k++) {
        const float* const x = z + slots[k] * size;
        for (Long n = 0; n < size; n++) tops[n] = x[n] > tops[n] ? x[n] : tops[n];
      }
      for (Long n = 0; n < v.N; n++) {
        float top = tops[n];
        for (Long j = 1; j < v.J; j++) top = tops[j * v.N + n] > top ? tops[j * v.N + n] : top;
        for (Long j = 0; j < v.J; j++) tops[j * v.N + n] = top;
      }
      for (Long k = 0; k < seen; k++) {
        float* const x = z + slots[k] * size;
#pragma omp simd
        for (Long n = 0; n < size; n++) {
          x[n] = exp_(x[n] - tops[n]);
          sums[n] += x[n];
        }
      }
      for (Long n = 0; n < v.N; n++) {
        float sum = 0.0f;
        for (Long j = 0; j < v.J; j++) sum += sums[j * v.N + n];
        for (Long j = 0; j < v.J; j++) sums[j * v.N + n] = 1.0f / sum;
      }
      for (Long k = 0; k < seen; k++) {
        float* const x = z + slots[k] * size;
        for (Long n = 0; n < size; n++) x[n] *= sums[n];
      }
    }
  }
}

// --- backward --------------------------------------------------------------------------------------------------------

// Writes s_c, the sum of r dR over a child's parents, and writes it to da or adds it; r is null for 1/J. GradScores
// subtracts s_c from dR, as the gradient of the softmax demands.
void sum_over_parents(const Votes& v, const float* r, const float* dR, float* s, float* da, bool add) {
  const Long size = v.J * v.N;
  const int threads = threads_for(v.threads, v.L * v.I * size / WIDTH);
#pragma omp parallel num_threads(threads)
  {
    scratch.reserve((size_t)size, 1);
    float* const sums = scratch.take(size);
#pragma omp for schedule(dynamic, 16)
    for (Long c = 0; c < v.C; c++) {
      for (Long n = 0; n < size; n++) sums[n] = 0.0f;
      for (Long k = 0; k < v.seen[c]; k++) {
        const Long at = v.parents[c * v.S + k] * size;
        if (r)
          for (Long n = 0; n < size; n++) sums[n] += r[at + n] * dR[at + n];
        else
          for (Long n = 0; n < size; n++) sums[n] += dR[at + n];
      }
      for (Long n = 0; n < v.N; n++) {
        float sum = 0.0f;
        for (Long j = 0; j < v.J; j++) sum += sums[j * v.N + n];
        if (!r) sum /= (float)v.J;
        s[c * v.N + n] = sum;
        da[c * v.N + n] = add ? da[c * v.N + n] + sum : sum;
      }
    }
  }
}

// Writes dz_ij = r_ij a_i (dR_ij - s_i) over dR_ij, and the sums U_k = sum_i dz_ij x^k, x = V_ij - m_j.
template <bool TYPES>
struct GradScores {
  const Votes& v;
  const Lanes& s;
  const Weights& weights;
  const float* m;
  float* r;
  const float* sum;
  float *dR, *U0, *U1, *U2;

  static Long room(Long I) { return I * (2 * UNITS + 1) * K; }

  template <int U>
  void run(const Task& t, Long u, Long b) const {
    const Long I = v.I, G = v.G, first_slot = t.l * I;
    const Coordinates at(v.coordinates);
    const float *P = t.P_of(b, I), *a = t.a_of(b, I), *const W = weights.W + u * weights.unit;
    const Window<U> r_ij(r, s, first_slot, I, u, b, t.room, true);
    const Window<U> dR_ij(dR, s, first_slot, I, u, b, t.room + I * UNITS * K, true);
    float* const s_i = t.room + 2 * I * UNITS * K;
    const int images = TYPES ? 1 : s.live(u, b);
    for (Long i = 0; i < I; i++)
      for (int k = 0; k < K; k++)
        s_i[i * K + k] = sum[v.child[first_slot + i] * v.N + b * K + (k < images ? k : 0)];
    vec mean[U][4], first[U][4] = {}, second[U][4] = {}, total[U] = {};
    for (int k = 0; k < U; k++) load_rows(mean[k], m + s.rows(t.l, u + k, b), s, s.live(u + k, b));
    for (Long i = 0, g = 0; i < I; i++, g = g + 1 == G ? 0 : g + 1) {
      const vec a_i = spread(a + i * K), sum_i = spread(s_i + i * K);
      r_ij.template ahead<0>(i);
      dR_ij.template ahead<1>(i);
      vec dz[U];
#pragma GCC unroll 4
      for (int k = 0; k < U; k++) {
        dz[k] = a_i * spread(r_ij.at(i, k)) * (spread(dR_ij.at(i, k)) - sum_i);
        store_firsts(dR_ij.at(i, k), dz[k]);
        total[k] += dz[k];
      }
      votes<TYPES, U>(P + i * 4 * WIDTH, W + g * weights.slot, weights.unit, at.y(i), at.x(i),
                      [&](int k, int p, vec V, const vec*) INLINE_LAMBDA {
                        const vec x = V - mean[k][p], y = dz[k] * x;
                        first[k][p] += y;
                        second[k][p] += y * x;
                      });
    }
    dR_ij.put_back(dR, s, first_slot, I, u, b);
    for (int k = 0; k < U; k++) {
      const int live = s.live(u + k, b);
      store_firsts(U0 + s.scalar(t.l, u + k, b), total[k], live);
      store_rows(U1 + s.rows(t.l, u + k, b), first[k], s, live);
      store_rows(U2 + s.rows(t.l, u + k, b), second[k], s, live);
    }
  }
};

// Computes dV_ij = sum_k s_k (E_k + C_k (V_ij - m_j)), and from it dM_i = sum_j dV_ij W_ij^T, dW = sum M_i^T dV_ij.
// s_k is R_ij in moments t = 0 .. T-1, then dz_ij in scores t = 0 .. T-2; m_j is the mean of the last iteration.
//
// A task is some child types, whose poses and weights no other type uses, and a chunk of images. Each chunk has its own
// sum of dW, and these are added at the end; the number of images alone decides the number of chunks.
struct GradVotes {
  const Votes& v;
  const Lanes& s;
  const Weights &weights, &transposed;
  const float* terms;  // for each field, unit and block the rows of E_0, C_0, E_1, ..., m
  float *r, *dz;
  Long T;

  static constexpr int PAIR = K == 4 ? 2 : 1;  // slots processed at once

  // A slot of a task: its number in the field, and the row of its weights, in W and among those of the task.
  struct Slot {
    Long i, g, row;
  };

  // Processes n slots. r and dz of iteration t and slot c lie at offset t * per_iteration + c * per_slot.
  template <bool TYPES, int n>
  INLINE void run(const Slot* slots, Long u, const float* terms, const float* r, const float* dz, Long per_iteration,
                  Long per_slot, const float* P, const float* a, float* dP, float* dW) const {
    const Coordinates at(v.coordinates);
    vec E[n][4], C[n][4];
    const auto first = [&](int c, vec share) INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++) {
        E[c][p] = share * load(terms + p * WIDTH);
        C[c][p] = share * load(terms + (4 + p) * WIDTH);
      }
    };
    const auto add = [&](const float* term, const vec (&share)[n]) INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++) {
        const vec e = load(term + p * WIDTH), f = load(term + (4 + p) * WIDTH);
#pragma GCC unroll 2
        for (int c = 0; c < n; c++) {
          E[c][p] += share[c] * e;
          C[c][p] += share[c] * f;
        }
      }
    };
    vec a_i[n], share[n];
#pragma GCC unroll 2
    for (int c = 0; c < n; c++) {
      a_i[c] = spread(a + c * K);
      first(c, a_i[c] * fill(1.0f / (float)v.J));
    }
    for (Long t = 0; t < T - 1; t++) {
#pragma GCC unroll 2
      for (int c = 0; c < n; c++) share[c] = a_i[c] * spread(r + t * per_iteration + c * per_slot);
      add(terms + 8 * (t + 1) * WIDTH, share);
    }
    for (Long t = 0; t < T - 1; t++) {
#pragma GCC unroll 2
      for (int c = 0; c < n; c++) share[c] = spread(dz + t * per_iteration + c * per_slot);
      add(terms + 8 * (T + t) * WIDTH, share);
    }
    const float* const mean = terms + 8 * (2 * T - 1) * WIDTH;
#pragma GCC unroll 2
    for (int c = 0; c < n; c++) {
      const Slot& slot = slots[c];
      float *const dP_c = dP + c * 4 * WIDTH, *const dW_c = dW + slot.row * 4 * WIDTH;
      const float* const W_T = transposed.W + slot.g * transposed.slot + u * transposed.unit;
      vec sum[4], w[4];
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) {
        sum[q] = load(dW_c + q * WIDTH);
        w[q] = weight_row<TYPES>(W_T, q);
      }
      votes<TYPES, 1>(P + c * 4 * WIDTH, weights.W + slot.g * weights.slot + u * weights.unit, 0, at.y(slot.i),
                      at.x(slot.i), [&](int, int p, vec V, const vec* M) INLINE_LAMBDA {
                        const vec d = E[c][p] + C[c][p] * (V - load(mean + p * WIDTH));
                        sum[0] += M[0] * d;
                        sum[1] += M[1] * d;
                        sum[2] += M[2] * d;
                        sum[3] += M[3] * d;
                        vec x = load(dP_c + p * WIDTH);
                        x += IN_LANE(d, 0, 0, 0, 0) * w[0];
                        x += IN_LANE(d, 1, 1, 1, 1) * w[1];
                        x += IN_LANE(d, 2, 2, 2, 2) * w[2];
                        x += IN_LANE(d, 3, 3, 3, 3) * w[3];
                        store(dP_c + p * WIDTH, x);
                      });
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) store(dW_c + q * WIDTH, sum[q]);
    }
  }

  void add_to_pose(float* dpose, const float* dP, Long c, Long b) const {
    for (int p = 0; p < 4; p++) {
      float* const y = dpose + (c * 4 + p) * 4 * v.N + WIDTH * b;
      const float* const x = dP + p * WIDTH;
      if (s.types)
        for (int k = 0; k < WIDTH; k++) y[k % 4] += x[k];
      else
        for (int k = 0; k < 4 * s.live(0, b); k++) y[k] += x[k];
    }
  }

  // Writes the lanes' sums to dW: sums over images, keeps types apart.
  void put_weight(float* dW, const float* lanes, Long g, Long u) const {
    for (int q = 0; q < 4; q++)
      for (int k = 0; k < 4; k++) {
        const float* const x = lanes + q * WIDTH + k;
        float sum = x[0];
        for (int n = 1; n < K && !s.types; n++) sum += x[4 * n];
        if (!s.types) dW[(g * v.J + u) * 16 + 4 * q + k] = sum;
        for (int n = 0; s.types && n < s.live(u, 0); n++) dW[(g * v.J + K * u + n) * 16 + 4 * q + k] = x[4 * n];
      }
  }

  // Processes the slots of a task in field l, for unit u and block b.
  template <bool TYPES>
  void over_slots(const Slot* slots, Long n, Long l, Long u, Long b, const float* P, const float* a, float* dP,
                  float* dW, float* copies) const {
    const Long all = v.L * v.I * v.J * v.N;
    const int live = s.live(u, b);
    const float* const cell = terms + ((l * s.units + u) * s.blocks + b) * (4 * T - 1) * 4 * WIDTH;
    for (Long e = 0; e < n; e += PAIR) {
      const bool pair = PAIR > 1 && e + 1 < n;
      const Long first = s.scalar(l * v.I + slots[e].i, u, b);
      const Long second = pair ? s.scalar(l * v.I + slots[e + 1].i, u, b) : first;
      const float *r_e = r + first, *dz_e = dz + first;
      Long per_iteration = all, per_slot = second - first;
      if (live < K) {  // a copy with K entries per slot: r, then dz, of each iteration and slot
        r_e = copies, dz_e = copies + (T - 1) * 2 * K, per_iteration = 2 * K, per_slot = K;
        for (Long t = 0; t < T - 1; t++)
          for (int k = 0; k < 2 * K; k++) {
            const Long at = t * all + (k < K ? first : second) + k % K;
            copies[t * 2 * K + k] = k % K < live ? r[at] : 0.0f;
            copies[(T - 1 + t) * 2 * K + k] = k % K < live ? dz[at] : 0.0f;
          }
      } else if (e + 5 * PAIR < n) {
        for (Long t = 0; t < T - 1; t++)
          for (int c = 0; c < PAIR; c++) {
            const Long ahead = t * all + s.scalar(l * v.I + slots[e + 4 * PAIR + c].i, u, b);
            __builtin_prefetch(r + ahead);
            __builtin_prefetch(dz + ahead);
          }
      }
      const float *P_e = P + e * 4 * WIDTH, *a_e = a + e * K;
      float* const dP_e = dP + e * 4 * WIDTH;
      if (pair)
        run<TYPES, PAIR>(slots + e, u, cell, r_e, dz_e, per_iteration, per_slot, P_e, a_e, dP_e, dW);
      else
        run<TYPES, 1>(slots + e, u, cell, r_e, dz_e, per_iteration, per_slot, P_e, a_e, dP_e, dW);
    }
  }

  template <bool TYPES>
  void all(float* dpose, float* dW) const {
    const Long groups = parts(s.blocks, GROUP), per_chunk = parts(groups, least(groups, 8));
    const Long chunks = parts(groups, per_chunk), numbers = v.G * v.J * 16;
    const int threads = threads_for(v.threads, 4 * v.L * v.I * s.units * s.blocks);
    const bool apart = v.G % v.types == 0;  // each type has its own rows of W
    const Long most_shares = least(v.types, most(parts(v.types, 4), parts(4 * threads, chunks)));
    const Long width = apart ? parts(v.types, most_shares) : v.types, shares = parts(v.types, width);
    const Long most_slots = v.I / v.types * width, most_rows = apart ? v.G / v.types * width : v.G;
    const Long depth = least(GROUP, s.blocks);
    float* const sums = chunks == 1 ? dW : static_cast<float*>(std::malloc((size_t)(chunks * numbers) * 4));
    if (!sums) std::abort();
#pragma omp parallel num_threads(threads)
    {
      const Long poses = most_slots * depth * 4 * WIDTH, weights_kept = s.units * most_rows * 4 * WIDTH;
      const Long copied = (2 * T - 2) * 2 * K;
      scratch.reserve((size_t)(2 * poses + most_slots * (depth * K + 6) + weights_kept + copied), 6);
      float *const P = scratch.take(poses), *const dP = scratch.take(poses), *const a = scratch.take(poses / 16);
      float *const dW_kept = scratch.take(weights_kept), *const copies = scratch.take(copied);
      Slot* const slots = reinterpret_cast<Slot*>(scratch.take(6 * most_slots));
#pragma omp for schedule(dynamic)
      for (Long task = 0; task < chunks * shares; task++) {
        const Long chunk = task / shares, t0 = task % shares * width, t1 = least(t0 + width, v.types);
        const Long rows = apart ? v.G / v.types * (t1 - t0) : v.G;
        Long n = 0;
        for (Long i = 0; i < v.I; i++)
          if (i % v.types >= t0 && i % v.types < t1) {
            slots[n] = {i, i % v.G, apart ? n % rows : i % v.G};
            n++;
          }
        std::memset(dW_kept, 0, (size_t)(s.units * rows * 4 * WIDTH) * 4);
        const Long end = least((chunk + 1) * per_chunk * GROUP, s.blocks);
        for (Long b0 = chunk * per_chunk * GROUP; b0 < end; b0 += GROUP) {
          const Long b1 = least(b0 + GROUP, end), from = WIDTH * b0, to = least(WIDTH * b1, 4 * v.N);
          for (Long c = 0; c < v.C; c++)
            if (c % v.types >= t0 && c % v.types < t1)
              for (int p = 0; p < 4; p++)
                std::memset(dpose + (c * 4 + p) * 4 * v.N + from, 0, (size_t)(to - from) * 4);
          for (Long l = 0; l < v.L; l++) {
            for (Long e = 0; e < n; e++)
              for (Long b = b0; b < b1; b++) {
                const Long at = (b - b0) * n + e;
                gather(v, s, v.child[l * v.I + slots[e].i], b, P + at * 4 * WIDTH, a + at * K);
              }
            std::memset(dP, 0, (size_t)((b1 - b0) * n * 4 * WIDTH) * 4);
            for (Long u = 0; u < s.units; u++)
              for (Long b = b0; b < b1; b++) {
                const Long at = (b - b0) * n;
                over_slots<TYPES>(slots, n, l, u, b, P + at * 4 * WIDTH, a + at * K, dP + at * 4 * WIDTH,
                                  dW_kept + u * rows * 4 * WIDTH, copies);
              }
            for (Long e = 0; e < n; e++)
              for (Long b = b0; b < b1; b++)
                add_to_pose(dpose, dP + ((b - b0) * n + e) * 4 * WIDTH, v.child[l * v.I + slots[e].i], b);
          }
        }
        for (Long e = 0; e < n; e++)
          for (Long u = 0; u < s.units; u++)
            put_weight(sums + chunk * numbers, dW_kept + (u * rows + slots[e].row) * 4 * WIDTH, slots[e].g, u);
      }
      if (chunks > 1) {
#pragma omp for schedule(static)
        for (Long k = 0; k < numbers; k++) {
          float sum = sums[k];
          for (Long chunk = 1; chunk < chunks; chunk++) sum += sums[chunk * numbers + k];
          dW[k] = sum;
        }
      }
    }
    if (chunks > 1) std::free(sums);
  }
};

}  // namespace

// --- the functions that cpu/launch.py calls --------------------------------------------------------------------------

extern "C" {

Long lanes() { return K; }

// For the tests.
void exp_of(const float* x, float* y, Long size) {
#pragma omp simd
  for (Long k = 0; k < size; k++) y[k] = exp_(x[k]);
}

void log_of(const float* x, float* y, Long size) {
#pragma omp simd
  for (Long k = 0; k < size; k++) y[k] = log_(x[k]);
}

void moments(const Votes* v, float* r, const float* k0, Long k0_step, const float* m0, Long m0_step, float* rj,
             float* m, float* S) {
  run_pass<Moments>(*v, Moments<false>::room(v->I), r, k0, m0, k0_step, m0_step, rj, m, S);
}

void scores(const Votes* v, const float* m, const float* lam, const float* K_j, float* z) {
  expect_large(z, v->L * v->I * v->J * v->N);
  run_pass<Scores>(*v, Scores<false>::room(v->I), m, lam, lam, K_j, z);
  normalise(*v, z);
}

// Like `scores`, from the linear sum_d w_jd V_ijd; m, squares and K_j are zeros.
void agreements(const Votes* v, const float* m, const float* w, const float* squares, const float* K_j, float* z) {
  expect_large(z, v->L * v->I * v->J * v->N);
  run_pass<GradResponsibilities>(*v, Scores<false>::room(v->I), m, w, squares, K_j, z);
  normalise(*v, z);
}

void grad_responsibilities(const Votes* v, const float* m, const float* gb, const float* gS, const float* gr,
                           const float* r, float* dR, float* s, float* da, Long add) {
  expect_large(dR, v->L * v->I * v->J * v->N);
  run_pass<GradResponsibilities>(*v, Scores<false>::room(v->I), m, gb, gS, gr, dR);
  sum_over_parents(*v, r, dR, s, da, add);
}

void grad_scores(const Votes* v, const float* m, float* r, const float* s, float* dR, float* U0, float* U1, float* U2) {
  run_pass<GradScores>(*v, GradScores<false>::room(v->I), m, r, s, dR, U0, U1, U2);
}

// Stores the poses l j p n r as term k of T iterations (grad_votes).
void put_term(float* terms, Long T, Long k, const float* x, Long L, Long J, Long N) {
  const Lanes s(J, N, false);
  for (Long l = 0; l < L; l++)
    for (Long j = 0; j < J; j++)
      for (Long b = 0; b < s.blocks; b++) {
        vec X[4];
        load_rows(X, x + s.rows(l, j, b), s, s.live(j, b));
        store_terms(terms, (4 * T - 1) * 4 * WIDTH, k, X, s, l, j, b);
      }
}

void grad_votes(const Votes* v, const float* terms, float* r, float* dz, Long T, float* dpose, float* dW) {
  const Lanes s = lanes_of_votes(v->J, v->N);
  const Weights weights(*v, s, false), transposed(*v, s, true);
  const GradVotes pass{*v, s, weights, transposed, terms, r, dz, T};
  if (s.types)
    pass.all<true>(dpose, dW);
  else
    pass.all<false>(dpose, dW);
}

}  // extern "C"
