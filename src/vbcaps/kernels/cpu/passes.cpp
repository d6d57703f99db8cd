// The passes over votes for CPUs: the twins of triton/passes.py, which defines them. No vote leaves the registers.
//
// A task is a field, WIDTH images (or one image, if vectors are of types), and some units. It gathers the poses of some
// of the field's children at a time, and writes to its own memory. Sums over tasks are added in an order that does not
// depend on the number of threads, so results are the same in every run.

#include "lanes.h"

namespace {

constexpr int TILE = 16;  // slots whose poses stay in the first-level cache while all types use them

// Weights as passes read them: unchanged if vectors are of images, else D vectors for each unit of types.
struct Weights {
  const float* W;
  Long slot, unit;  // from one to the next

  Weights(const Votes& v, const Lanes& s)
      : W(s.types ? v.laid : v.W), slot(s.units * (s.types ? POSE : D)), unit(s.types ? POSE : D) {}
};

// Floats of a gathered pose: vectors of images, or numbers of one image.
template <bool TYPES>
constexpr Long POSE_OF_CHILD = TYPES ? D : POSE;

// Gathers the pose and activation of child c in block b.
template <bool TYPES>
INLINE void gather(const Votes& v, const Lanes& s, Long c, Long b, float* P, float* a) {
  const float* const pose = v.pose + c * D * v.N;
  if (TYPES) {
    for (int d = 0; d < D; d++) P[d] = pose[d * v.N + b];
    store(a, fill(v.a[c * v.N + b]));
    return;
  }
  const int live = s.live(0, b);
  load_rows(P, pose + b * WIDTH, v.N, live);
  store(a, load(v.a + c * v.N + b * WIDTH, live));
}

// Makes the compiler load x into a register once, where there are 32 of them. It would rather load it anew for each
// multiplication, and then loads, not multiplications, would be the limit.
INLINE vec in_register(vec x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

// The weights of a child as vectors.
template <bool TYPES>
struct KeptWeights {
  vec w[D];
  INLINE explicit KeptWeights(const float* W) {
    UNROLLED for (int d = 0; d < D; d++) w[d] = in_register(TYPES ? load(W + d * WIDTH) : fill(W[d]));
  }

  // Adds row p of a vote to x.
  INLINE void add_row(vec (&x)[4], const float* P, int p) const {
    UNROLLED for (int q = 0; q < 4; q++) {
      const vec m = in_register(TYPES ? fill(P[4 * p + q]) : load(P + (4 * p + q) * WIDTH));
      UNROLLED for (int r = 0; r < 4; r++) x[r] += m * w[4 * q + r];
    }
  }
};

// What a slot adds to the last column of row p, or zeros.
struct Coordinates {
  const float* x;
  Long step;
  static constexpr float NONE[2] = {};
  explicit Coordinates(const float* coordinates) : x(coordinates ? coordinates : NONE), step(coordinates ? 2 : 0) {}
  INLINE float at(Long i, int p) const { return p < 2 ? x[i * step + p] : 0.0f; }
};

// A field l, a block b of images or one image, and units [u0, u1); and, in P and a, poses and activations of a tile.
struct Task {
  Long l, b, u0, u1;
  float *P, *a, *room;
};

// Runs a pass over all votes: over a field's slots tile by tile, and for each tile over the units.
template <class Pass, bool TYPES>
void over_fields(const Votes& v, const Lanes& s, const Pass& pass) {
  const int threads = threads_for(v.threads, v.L * v.I * s.units * s.blocks);
  const Long shares = threads == 1 ? 1 : most(1, least(s.units, parts(4 * threads, v.L * s.blocks)));
  const Long per = parts(s.units, shares), chunks = parts(s.units, per), tasks = v.L * s.blocks * chunks;
#pragma omp parallel num_threads(threads)
  {
    constexpr Long pose = POSE_OF_CHILD<TYPES>, room = Pass::ROOM, per_unit = Pass::PER_UNIT;
    scratch.reserve((size_t)(TILE * (pose + WIDTH) + room + per * per_unit), 3);
    Task t;
    t.P = scratch.take(TILE * pose);
    t.a = scratch.take(TILE * WIDTH);
    t.room = scratch.take(room + per * per_unit);
#pragma omp for schedule(dynamic)
    for (Long task = 0; task < tasks; task++) {
      t.l = task / (s.blocks * chunks);
      t.b = task / chunks % s.blocks;
      t.u0 = task % chunks * per;
      t.u1 = least(t.u0 + per, s.units);
      const auto of_unit = [&](Long u) { return t.room + room + (u - t.u0) * per_unit; };
      for (Long u = t.u0; u < t.u1; u++) pass.begin(t, u, of_unit(u));
      for (Long i0 = 0; i0 < v.I; i0 += TILE) {
        const Long i1 = least(i0 + TILE, v.I);
        for (Long i = i0; i < i1; i++)
          gather<TYPES>(v, s, v.child[t.l * v.I + i], t.b, t.P + (i - i0) * pose, t.a + (i - i0) * WIDTH);
        for (Long u = t.u0; u < t.u1; u++) pass.run(t, u, of_unit(u), i0, i1);
      }
      for (Long u = t.u0; u < t.u1; u++) pass.end(t, u, of_unit(u));
    }
  }
}

template <template <bool> class Pass, class... Arguments>
void run_pass(const Votes& v, Arguments... arguments) {
  const Lanes s(v);
  const Weights weights(v, s);
  if (s.types)
    over_fields<Pass<true>, true>(v, s, Pass<true>{v, s, weights, arguments...});
  else
    over_fields<Pass<false>, false>(v, s, Pass<false>{v, s, weights, arguments...});
}

// Runs use(i, P, W) for the slots [i0, i1) of a tile with their poses and weights, which are G rows `step` apart.
template <bool TYPES, class Use>
INLINE void over_slots(Long i0, Long i1, const float* P, Long G, const float* W, Long step, Use use) {
  const float *const end = W + G * step, *W_i = W + i0 % G * step;
  for (Long i = i0; i < i1; i++) {
    use(i, P, W_i);
    P += POSE_OF_CHILD<TYPES>;
    W_i += step;
    if (W_i == end) W_i = W;
  }
}

// --- forward ---------------------------------------------------------------------------------------------------------

// Computes rows p and p + 1 of a vote, which share the loads of weights; x holds what is added to the rows.
template <bool TYPES>
INLINE void add_two_rows(vec (&x)[2][4], const float* P, const float* W, int p) {
  const float* const M = P + 4 * p * (TYPES ? 1 : WIDTH);
  UNROLLED for (int q = 0; q < 4; q++) {
    vec m[2];
    UNROLLED for (int k = 0; k < 2; k++) {
      const int n = 4 * k + q;
      m[k] = in_register(TYPES ? fill(M[n]) : load(M + n * WIDTH));
    }
    UNROLLED for (int r = 0; r < 4; r++) {
      const vec w = in_register(TYPES ? load(W + (4 * q + r) * WIDTH) : fill(W[4 * q + r]));
      UNROLLED for (int k = 0; k < 2; k++) x[k][r] += m[k] * w;
    }
  }
}

// Computes the moments of the votes and of m0, which counts k0 times, vote by vote: routing/README.md derives it. Each
// vote moves the mean m by a share of x = V_ij - m and adds to S what is spread around both means; nothing cancels.
template <bool TYPES>
struct Moments {
  const Votes& v;
  const Lanes& s;
  const Weights& weights;
  const float *r, *k0, *m0;  // r is null for 1/J
  Long k0_step, m0_step;     // from a type to the next
  float *rj, *m, *S;

  // Room for the numbers of a tile: the share of the mean, and the weight of x^2. For each unit: m, S, r_j, k0 + r_j.
  static constexpr Long ROOM = 2 * TILE * WIDTH, PER_UNIT = 2 * POSE + 2 * WIDTH;

  // The values of unit u, from one number per type.
  vec of_unit(const float* x, Long step, Long u) const {
    if (!TYPES) return fill(x[u * step]);
    float y[WIDTH];
    for (int k = 0; k < WIDTH; k++) y[k] = x[least(WIDTH * u + k, v.J - 1) * step];
    return load(y);
  }

  void begin(const Task& t, Long u, float* mean) const {
    for (int d = 0; d < D; d++) store(mean + d * WIDTH, of_unit(m0 + d, m0_step, u));
    std::memset(mean + POSE, 0, (POSE + WIDTH) * 4);
    store(mean + 2 * POSE + WIDTH, of_unit(k0, k0_step, u));
  }

  void run(const Task& t, Long u, float* mean, Long i0, Long i1) const {
    const Coordinates at(v.coordinates);
    const Long ahead = TILE * s.units * WIDTH;
    float *const share = t.room, *const weight = share + TILE * WIDTH;
    float *const scatter = mean + POSE, *const totals = scatter + POSE;
    const vec uniform = fill(1.0f / (float)v.J), tiny = fill(SMALLEST_WEIGHT);
    vec total = load(totals), kappa = load(totals + WIDTH);
    for (Long i = i0; i < i1; i++) {
      vec R = load(t.a + (i - i0) * WIDTH);
      if (r) {
        const float* const r_i = r + s.slot(t.l, i, u, t.b);
        __builtin_prefetch(r_i + ahead, 0, 2);
        R *= load(r_i);
      } else {
        R *= uniform;
      }
      total += R;
      const vec before = kappa;
      kappa += R;
      const vec inverse = 1.0f / (kappa > tiny ? kappa : tiny);
      store(share + (i - i0) * WIDTH, R * inverse);
      store(weight + (i - i0) * WIDTH, R * (before * inverse));
    }
    store(totals, total);
    store(totals + WIDTH, kappa);
    const float* const W = weights.W + u * weights.unit;
    UNROLLED for (int p = 0; p < 4; p += 2) {
      vec mean_p[2][4], scatter_p[2][4];
      UNROLLED for (int k = 0; k < 2; k++)
        UNROLLED for (int r = 0; r < 4; r++) {
          mean_p[k][r] = load(mean + ((p + k) * 4 + r) * WIDTH);
          scatter_p[k][r] = load(scatter + ((p + k) * 4 + r) * WIDTH);
        }
      over_slots<TYPES>(i0, i1, t.P, v.G, W, weights.slot, [&](Long i, const float* P, const float* W_i) INLINE_LAMBDA {
        vec x[2][4] = {{{}, {}, {}, fill(at.at(i, p))}, {{}, {}, {}, fill(at.at(i, p + 1))}};
        add_two_rows<TYPES>(x, P, W_i, p);
        const vec share_i = load(share + (i - i0) * WIDTH), weight_i = load(weight + (i - i0) * WIDTH);
        UNROLLED for (int k = 0; k < 2; k++)
          UNROLLED for (int r = 0; r < 4; r++) {
            const vec y = x[k][r] - mean_p[k][r];
            mean_p[k][r] += share_i * y;
            scatter_p[k][r] += weight_i * y * y;
          }
      });
      UNROLLED for (int k = 0; k < 2; k++)
        UNROLLED for (int r = 0; r < 4; r++) {
          store(mean + ((p + k) * 4 + r) * WIDTH, mean_p[k][r]);
          store(scatter + ((p + k) * 4 + r) * WIDTH, scatter_p[k][r]);
        }
    }
  }

  void end(const Task& t, Long u, const float* mean) const {
    s.put_number(rj, load(mean + 2 * POSE), t.l, u, t.b);
    s.put_poses(m, mean, t.l, u, t.b);
    s.put_poses(S, mean + POSE, t.l, u, t.b);
  }
};

enum Of { SCORES, AGREEMENTS, RESPONSIBILITIES };

// Computes a number per vote: the score K_j - 1/2 sum_d lambda_jd x_d^2 with x = V_ij - m_j, lambda in B and K_j in
// constant; the agreement sum_d w_jd V_ijd, w in A; or dR_ij = gr_j + sum_d x_d (gb_jd + gS_jd x_d), with gb in A, gS in
// B and gr in constant.
template <bool TYPES, Of OF>
struct OfVotes {
  const Votes& v;
  const Lanes& s;
  const Weights& weights;
  const float *m, *A, *B, *constant;
  float* out;

  static constexpr Long ROOM = 0, PER_UNIT = 3 * POSE + WIDTH;

  void begin(const Task& t, Long u, float* mean) const {
    if (OF != AGREEMENTS) {
      s.poses(mean, m, t.l, u, t.b, -1.0f);
      s.poses(mean + POSE, B, t.l, u, t.b, OF == SCORES ? -0.5f : 1.0f);
      store(mean + 3 * POSE, s.number(constant, t.l, u, t.b));
    }
    if (OF != SCORES) s.poses(mean + 2 * POSE, A, t.l, u, t.b);
  }

  void run(const Task& t, Long u, const float* mean, Long i0, Long i1) const {
    const Coordinates at(v.coordinates);
    const float *const B_j = mean + POSE, *const A_j = mean + 2 * POSE;
    const vec base = OF == AGREEMENTS ? vec{} : load(mean + 3 * POSE);
    const float* const W = weights.W + u * weights.unit;
    over_slots<TYPES>(i0, i1, t.P, v.G, W, weights.slot, [&](Long i, const float* P, const float* W_i) INLINE_LAMBDA {
      const KeptWeights<TYPES> kept(W_i);
      vec total[4] = {};
      UNROLLED for (int p = 0; p < 4; p++) {
        vec x[4] = {};
        if (OF != AGREEMENTS)
          UNROLLED for (int r = 0; r < 4; r++) x[r] = load(mean + p * ROWS + r * WIDTH);
        if (p < 2) x[3] += at.at(i, p);
        kept.add_row(x, P, p);
        UNROLLED for (int r = 0; r < 4; r++) {
          const Long k = p * ROWS + r * WIDTH;
          if (OF == SCORES) total[r] += x[r] * (load(B_j + k) * x[r]);
          if (OF == AGREEMENTS) total[r] += x[r] * load(A_j + k);
          if (OF == RESPONSIBILITIES) total[r] += x[r] * (load(A_j + k) + load(B_j + k) * x[r]);
        }
      }
      store(out + s.slot(t.l, i, u, t.b), base + ((total[0] + total[1]) + (total[2] + total[3])));
    });
  }

  void end(const Task&, Long, const float*) const {}
};

template <bool TYPES>
using Scores = OfVotes<TYPES, SCORES>;
template <bool TYPES>
using Agreements = OfVotes<TYPES, AGREEMENTS>;
template <bool TYPES>
using GradResponsibilities = OfVotes<TYPES, RESPONSIBILITIES>;

// Combines the numbers of a vector by `both`, in all of them, if they are of types; numbers of images stay apart.
template <int size = WIDTH / 2, class Both>
INLINE vec over_types(const Lanes& s, vec x, Both both) {
  if (!s.types) return x;
  x = both(halves<size, false>(x, x), halves<size, true>(x, x));
  if constexpr (size > 1) x = over_types<size / 2>(s, x, both);
  return x;
}

// Replaces z by r = softmax(z) over all parents of a child.
void normalise(const Votes& v, float* z) {
  const Lanes s(v);
  const auto larger = [](vec x, vec y) { return x > y ? x : y; };
  const auto sum_of = [](vec x, vec y) { return x + y; };
  const int rest = (int)(s.types ? s.J - (s.units - 1) * WIDTH : WIDTH);  // types in the last unit
  const int threads = threads_for(v.threads, v.L * v.I * s.units * s.blocks);
#pragma omp parallel for schedule(dynamic, 16) collapse(2) num_threads(threads)
  for (Long b = 0; b < s.blocks; b++)
    for (Long c = 0; c < v.C; c++) {
      const int32_t* const slots = v.parents + c * v.S;
      const Long seen = v.seen[c];
      const auto row = [&](Long k) { return z + s.slot(slots[k] / v.I, slots[k] % v.I, 0, b); };
      vec top = fill(-INFINITY);
      for (Long k = 0; k < seen; k++) {
        float* const x = row(k);
        for (int n = rest; n < WIDTH; n++) x[(s.units - 1) * WIDTH + n] = -INFINITY;
        for (Long u = 0; u < s.units; u++) top = larger(load(x + u * WIDTH), top);
      }
      top = over_types(s, top, larger);
      vec sum = {};
      for (Long k = 0; k < seen; k++) {
        float* const x = row(k);
        for (Long u = 0; u < s.units; u++) {
          const vec y = exp_(load(x + u * WIDTH) - top);
          store(x + u * WIDTH, y);
          sum += y;
        }
      }
      const vec scale = 1.0f / over_types(s, sum, sum_of);
      for (Long k = 0; k < seen; k++) {
        float* const x = row(k);
        for (Long u = 0; u < s.units; u++) store(x + u * WIDTH, load(x + u * WIDTH) * scale);
      }
    }
}

// --- backward --------------------------------------------------------------------------------------------------------

// Writes s_c, the sum of r dR over a child's parents, and writes it to da or adds it. GradScores subtracts s_c from dR,
// as the gradient of the softmax demands.
void sum_over_parents(const Votes& v, const float* r, const float* dR, float* s_c, float* da, bool add) {
  const Lanes s(v);
  const auto sum_of = [](vec x, vec y) { return x + y; };
  const int rest = (int)(s.types ? s.J - (s.units - 1) * WIDTH : WIDTH);
  const int threads = threads_for(v.threads, v.L * v.I * s.units * s.blocks);
#pragma omp parallel for schedule(dynamic, 16) collapse(2) num_threads(threads)
  for (Long b = 0; b < s.blocks; b++)
    for (Long c = 0; c < v.C; c++) {
      vec sum = {};
      for (Long k = 0; k < v.seen[c]; k++) {
        const Long slot = v.parents[c * v.S + k], at = s.slot(slot / v.I, slot % v.I, 0, b);
        for (Long u = 0; u < s.units; u++) {
          const vec y = load(dR + at + u * WIDTH, u + 1 < s.units ? WIDTH : rest);
          sum += load(r + at + u * WIDTH) * y;
        }
      }
      sum = over_types(s, sum, sum_of);
      const Long first = c * v.N + (s.types ? b : b * WIDTH);
      const int live = s.types ? 1 : s.live(0, b);
      store(s_c + first, sum, live);
      store(da + first, add ? load(da + first, live) + sum : sum, live);
    }
}

// Writes dz_ij = r_ij a_i (dR_ij - s_i) over dR_ij, and the sums U_k = sum_i dz_ij x^k, x = V_ij - m_j.
template <bool TYPES>
struct GradScores {
  const Votes& v;
  const Lanes& s;
  const Weights& weights;
  const float *m, *r, *sum;
  float *dR, *U0, *U1, *U2;

  static constexpr Long ROOM = TILE * WIDTH, PER_UNIT = 3 * POSE + WIDTH;

  void begin(const Task& t, Long u, float* mean) const {
    s.poses(mean, m, t.l, u, t.b, -1.0f);
    std::memset(mean + POSE, 0, (2 * POSE + WIDTH) * 4);
  }

  void run(const Task& t, Long u, float* mean, Long i0, Long i1) const {
    const int live = s.live(u, t.b);
    const Long ahead = TILE * s.units * WIDTH;
    float *const first_U = mean + POSE, *const second_U = mean + 2 * POSE, *const dz = t.room;
    vec total = load(mean + 3 * POSE);
    for (Long i = i0; i < i1; i++) {
      const Long c = v.child[t.l * v.I + i], slot = s.slot(t.l, i, u, t.b);
      __builtin_prefetch(r + slot + ahead, 0, 2);
      __builtin_prefetch(dR + slot + ahead, 1, 2);
      const vec s_i = TYPES ? fill(sum[c * v.N + t.b]) : load(sum + c * v.N + t.b * WIDTH, live);
      const vec dz_i = load(t.a + (i - i0) * WIDTH) * load(r + slot) * (load(dR + slot) - s_i);
      store(dR + slot, dz_i);
      store(dz + (i - i0) * WIDTH, dz_i);
      total += dz_i;
    }
    store(mean + 3 * POSE, total);
    const Coordinates at(v.coordinates);
    const float* const W = weights.W + u * weights.unit;
    UNROLLED for (int p = 0; p < 4; p += 2) {
      vec first[2][4], second[2][4];
      UNROLLED for (int k = 0; k < 2; k++)
        UNROLLED for (int r = 0; r < 4; r++) {
          first[k][r] = load(first_U + ((p + k) * 4 + r) * WIDTH);
          second[k][r] = load(second_U + ((p + k) * 4 + r) * WIDTH);
        }
      over_slots<TYPES>(i0, i1, t.P, v.G, W, weights.slot, [&](Long i, const float* P, const float* W_i) INLINE_LAMBDA {
        vec x[2][4];
        UNROLLED for (int k = 0; k < 2; k++) {
          UNROLLED for (int r = 0; r < 4; r++) x[k][r] = load(mean + ((p + k) * 4 + r) * WIDTH);
          x[k][3] += at.at(i, p + k);
        }
        add_two_rows<TYPES>(x, P, W_i, p);
        const vec dz_i = load(dz + (i - i0) * WIDTH);
        UNROLLED for (int k = 0; k < 2; k++)
          UNROLLED for (int r = 0; r < 4; r++) {
            const vec y = dz_i * x[k][r];
            first[k][r] += y;
            second[k][r] += y * x[k][r];
          }
      });
      UNROLLED for (int k = 0; k < 2; k++)
        UNROLLED for (int r = 0; r < 4; r++) {
          store(first_U + ((p + k) * 4 + r) * WIDTH, first[k][r]);
          store(second_U + ((p + k) * 4 + r) * WIDTH, second[k][r]);
        }
    }
  }

  void end(const Task& t, Long u, const float* mean) const {
    s.put_number(U0, load(mean + 3 * POSE), t.l, u, t.b);
    s.put_poses(U1, mean + POSE, t.l, u, t.b);
    s.put_poses(U2, mean + 2 * POSE, t.l, u, t.b);
  }
};

// Computes dV_ij = sum_k s_k (E_k + C_k (V_ij - m_j)), and from it dM_i = sum_j dV_ij W_ij^T, dW = sum M_i^T dV_ij.
// s_k is R_ij in moments t = 0 .. T-1, then dz_ij in scores t = 0 .. T-2; m_j is the mean of the last iteration.
// Votes are made here once more, so this is where da gets what goes back through the first moments, sum_j dR_ij / J.
//
// A task is some child types, whose poses and weights no other type uses, and a chunk of images. Each chunk has its own
// sum of dW, and these are added at the end; the number of images alone decides the number of chunks.
template <bool TYPES>
struct GradVotes {
  const Votes& v;
  const Lanes& s;
  const Weights& weights;
  const Terms terms;
  const float *r, *dz;
  Long T;
  const float* gr;  // of the first moments; null if they are constants
  float* da;

  static constexpr Long POSE_SUMS = TYPES ? D : POSE;    // of a child's dM: numbers, or vectors
  static constexpr Long WEIGHT_SUMS = TYPES ? POSE : D;  // of a row's and unit's dW

  static constexpr int GRAD_TILE = 12;  // slots whose poses and gradients stay in the first-level cache

  // A slot of a task: its number in the field, the row of its weights, in W and among those of the task, and the number
  // of a slot to prefetch, whose turn comes a tile later.
  struct Slot {
    Long i, g, row, next;
  };

  // Some slots in field l and block b; poses, activations, their gradients, and room for s_k.
  struct Tile {
    Long l, b;
    const Slot* slots;
    float *P, *a, *dP, *dR, *share;

    Long child(const Votes& v, Long c) const { return v.child[l * v.I + slots[c].i]; }
  };

  // Computes d = dV_ij for n slots; number k of slot c, s_k, lies in share + (k n + c) WIDTH. `gr_j` is what dR_ij
  // begins with. Half a term C_k meets 2 x.
  template <int n>
  INLINE void grad_votes(const Slot* slots, const float* of_unit, const float* share, const float* P, const float* W,
                         float* d, float* dR, vec gr_j) const {
    const Coordinates at(v.coordinates);
    const float* const mean = of_unit + 2 * (2 * T - 1) * POSE;
    _Pragma("GCC unroll 1") for (int c = 0; c < n; c++) {
      const KeptWeights<TYPES> kept(W + slots[c].g * weights.slot);
      vec of_first[4] = {gr_j};
      UNROLLED for (int p = 0; p < 4; p++) {
        vec x[4];
        UNROLLED for (int r = 0; r < 4; r++) x[r] = load(mean + p * ROWS + r * WIDTH);
        if (p < 2) x[3] += at.at(slots[c].i, p);
        kept.add_row(x, P + c * POSE_OF_CHILD<TYPES>, p);
        UNROLLED for (int r = 0; r < 4; r++) store(d + c * POSE + p * ROWS + r * WIDTH, x[r] + x[r]);
        if (gr)
          UNROLLED for (int r = 0; r < 4; r++) {
            const float* const E_0 = of_unit + p * ROWS + r * WIDTH;
            of_first[r] += x[r] * (load(E_0) + load(E_0 + POSE) * x[r]);
          }
      }
      if (gr) store(dR + c * WIDTH, load(dR + c * WIDTH) + (of_first[0] + of_first[1]) + (of_first[2] + of_first[3]));
    }
    for (int p = 0; p < 4; p++) {
      vec E[n][4] = {}, C[n][4] = {};
      const float* term = of_unit + p * ROWS;
      for (Long k = 0; k < 2 * T - 1; k++, term += 2 * POSE) {
        vec s_k[n];
        UNROLLED for (int c = 0; c < n; c++) s_k[c] = load(share + (k * n + c) * WIDTH);
        UNROLLED for (int r = 0; r < 4; r++) {
          const vec e = in_register(load(term + r * WIDTH)), f = in_register(load(term + POSE + r * WIDTH));
          UNROLLED for (int c = 0; c < n; c++) {
            E[c][r] += s_k[c] * e;
            C[c][r] += s_k[c] * f;
          }
        }
      }
      UNROLLED for (int c = 0; c < n; c++)
        UNROLLED for (int r = 0; r < 4; r++) {
          float* const d_r = d + c * POSE + p * ROWS + r * WIDTH;
          store(d_r, E[c][r] + C[c][r] * load(d_r));
        }
    }
  }

  // Adds d W^T to the sum of a child's dM, which has vectors of images.
  INLINE void add_to_poses(const float* d, const float* W, float* dP) const {
    const KeptWeights<TYPES> kept(W);
    UNROLLED for (int p = 0; p < 4; p++) {
      vec sum[4];
      UNROLLED for (int q = 0; q < 4; q++) sum[q] = load(dP + p * ROWS + q * WIDTH);
      UNROLLED for (int r = 0; r < 4; r++) {
        const vec d_r = in_register(load(d + p * ROWS + r * WIDTH));
        UNROLLED for (int q = 0; q < 4; q++) sum[q] += d_r * kept.w[4 * q + r];
      }
      UNROLLED for (int q = 0; q < 4; q++) store(dP + p * ROWS + q * WIDTH, sum[q]);
    }
  }

  // Adds M^T d to the sum of dW, which has vectors of types.
  INLINE void add_to_weights(const float* d, const float* P, float* dW) const {
    UNROLLED for (int q = 0; q < 4; q++) {
      vec sum[4];
      UNROLLED for (int r = 0; r < 4; r++) sum[r] = load(dW + q * ROWS + r * WIDTH);
      UNROLLED for (int p = 0; p < 4; p++)
        UNROLLED for (int r = 0; r < 4; r++) sum[r] += P[4 * p + q] * load(d + p * ROWS + r * WIDTH);
      UNROLLED for (int r = 0; r < 4; r++) store(dW + q * ROWS + r * WIDTH, sum[r]);
    }
  }

  // Adds the sums over the numbers of a vector: of M^T d to dW if they are of images, of d W^T to dM if of types.
  INLINE void add_over_numbers(const float* d, const float* P, const float* W, float* sums) const {
    vec sum[D] = {};
    UNROLLED for (int p = 0; p < 4; p++)
      UNROLLED for (int r = 0; r < 4; r++) {
        const vec d_r = in_register(load(d + p * ROWS + r * WIDTH));
        UNROLLED for (int q = 0; q < 4; q++) {
          if (TYPES)
            sum[4 * p + q] += d_r * load(W + (4 * q + r) * WIDTH);
          else
            sum[4 * q + r] += d_r * load(P + (4 * p + q) * WIDTH);
        }
      }
    for (int d = 0; d < D; d += WIDTH) add_sums(sums + d, reinterpret_cast<vec(&)[WIDTH]>(sum[d]));
  }

  // Processes the slots [c0, c0 + n) of a tile with unit u. `uniform` is 1/J, `gr_j` what dR_ij begins with.
  template <int n>
  INLINE void run(const Tile& tile, Long c0, Long u, const float* of_unit, float* dW, vec uniform, vec gr_j) const {
    const Slot* const slots = tile.slots + c0;
    const float* const P = tile.P + c0 * POSE_OF_CHILD<TYPES>;
    float *const dP = tile.dP + c0 * POSE_SUMS, *const share = tile.share;
    const Long all = s.slots(), first = s.slot(tile.l, 0, u, tile.b), step = s.units * WIDTH;
    alignas(64) float d[n * POSE];
    UNROLLED for (int c = 0; c < n; c++) {
      const vec a_i = load(tile.a + (c0 + c) * WIDTH);
      const float *r_i = r + first + slots[c].i * step, *dz_i = dz + first + slots[c].i * step;
      const Long ahead = (slots[c].next - slots[c].i) * step;
      store(share + c * WIDTH, a_i * uniform);
      for (Long t = 0; t < T - 1; t++, r_i += all, dz_i += all) {
        __builtin_prefetch(r_i + ahead);
        __builtin_prefetch(dz_i + ahead);
        store(share + ((t + 1) * n + c) * WIDTH, a_i * load(r_i));
        store(share + ((T + t) * n + c) * WIDTH, load(dz_i));
      }
    }
    const float* const W = weights.W + u * weights.unit;
    grad_votes<n>(slots, of_unit, share, P, W, d, tile.dR + c0 * WIDTH, gr_j);
    for (int c = 0; c < n; c++) {
      const float *const d_c = d + c * POSE, *const P_c = P + c * POSE_OF_CHILD<TYPES>;
      const float* const W_c = W + slots[c].g * weights.slot;
      float *const dP_c = dP + c * POSE_SUMS, *const dW_c = dW + slots[c].row * WEIGHT_SUMS;
      if (TYPES)
        add_to_weights(d_c, P_c, dW_c);
      else
        add_to_poses(d_c, W_c, dP_c);
      add_over_numbers(d_c, P_c, W_c, TYPES ? dP_c : dW_c);
    }
  }

  // Processes a tile of n slots; dW holds the sums of `rows` rows for each unit.
  void run(const Tile& tile, Long n, Long rows, float* dW) const {
    for (Long c = 0; c < n; c++)
      gather<TYPES>(v, s, tile.child(v, c), tile.b, tile.P + c * POSE_OF_CHILD<TYPES>, tile.a + c * WIDTH);
    std::memset(tile.dP, 0, (size_t)(n * POSE_SUMS) * 4);
    std::memset(tile.dR, 0, (size_t)(n * WIDTH) * 4);
    const vec uniform = fill(1.0f / (float)v.J);
    for (Long u = 0; u < s.units; u++) {
      const float* const of_unit = terms.of(tile.l, u, tile.b);
      const vec gr_j = gr ? s.number(gr, tile.l, u, tile.b) + load(of_unit + terms.number) : vec{};
      float* const dW_u = dW + u * rows * WEIGHT_SUMS;
      Long c = 0;
      for (; c + 2 <= n; c += 2) run<2>(tile, c, u, of_unit, dW_u, uniform, gr_j);
      if (c < n) run<1>(tile, c, u, of_unit, dW_u, uniform, gr_j);
    }
  }

  void add_to_pose(float* dpose, const float* dP, Long c, Long b) const {
    for (int d = 0; d < D; d++) {
      float* const y = dpose + (c * D + d) * v.N;
      if (TYPES)
        y[b] += dP[d];
      else
        store(y + b * WIDTH, load(y + b * WIDTH, s.live(0, b)) + load(dP + d * WIDTH), s.live(0, b));
    }
  }

  void add_to_activation(const float* dR, Long c, Long b) const {
    float* const y = da + c * v.N + (TYPES ? b : b * WIDTH);
    const vec sum = over_types(s, load(dR), [](vec x, vec y) { return x + y; }) * fill(1.0f / (float)v.J);
    const int live = TYPES ? 1 : s.live(0, b);
    store(y, load(y, live) + sum, live);
  }

  void put_weight(float* dW, const float* sums, Long g, Long u) const {
    if (!TYPES) {
      std::memcpy(dW + (g * v.J + u) * D, sums, D * 4);
      return;
    }
    for (int k = 0; k < s.live(u, 0); k++)
      for (int d = 0; d < D; d++) dW[(g * v.J + u * WIDTH + k) * D + d] = sums[d * WIDTH + k];
  }

  void all(float* dpose, float* dW) const {
    constexpr Long pose = POSE_OF_CHILD<TYPES>;
    const Long groups = parts(s.blocks, TYPES ? WIDTH : 1), size = TYPES ? WIDTH : 1;
    const Long per_chunk = parts(groups, least(groups, 8)) * size, chunks = parts(s.blocks, per_chunk);
    const Long numbers = v.G * v.J * D;
    const int threads = threads_for(v.threads, 4 * v.L * v.I * s.units * s.blocks);
    const bool apart = v.G % v.types == 0;  // each type has its own rows of W
    // Enough tasks for the threads, whose sums for W, and W, fit into the second-level cache.
    const Long for_threads = threads == 1 ? 1 : parts(threads, chunks), for_cache = parts(2 * numbers * 4, 1 << 19);
    const Long width = apart ? parts(v.types, least(v.types, most(for_threads, for_cache))) : v.types;
    const Long shares = parts(v.types, width);
    const Long most_slots = v.I / v.types * width, most_rows = apart ? v.G / v.types * width : v.G;
    float* const sums = chunks == 1 ? dW : static_cast<float*>(std::malloc((size_t)(chunks * numbers) * 4));
    if (!sums) std::abort();
#pragma omp parallel num_threads(threads)
    {
      const Long kept = s.units * most_rows * WEIGHT_SUMS, shared = 2 * (2 * T - 1) * WIDTH;
      scratch.reserve((size_t)(GRAD_TILE * (pose + POSE_SUMS + 2 * WIDTH) + shared + kept + 8 * most_slots), 7);
      Tile tile;
      for (float** x : {&tile.a, &tile.dR}) *x = scratch.take(GRAD_TILE * WIDTH);
      tile.P = scratch.take(GRAD_TILE * pose);
      tile.dP = scratch.take(GRAD_TILE * POSE_SUMS);
      tile.share = scratch.take(shared);
      float* const dW_kept = scratch.take(kept);
      Slot* const slots = reinterpret_cast<Slot*>(scratch.take(8 * most_slots));
#pragma omp for schedule(dynamic)
      for (Long task = 0; task < chunks * shares; task++) {
        const Long chunk = task / shares, t0 = task % shares * width, t1 = least(t0 + width, v.types);
        const Long rows = apart ? v.G / v.types * (t1 - t0) : v.G;
        Long n = 0;
        for (Long i = 0; i < v.I; i++)
          if (i % v.types >= t0 && i % v.types < t1) {
            slots[n] = {i, i % v.G, apart ? n % rows : i % v.G, 0};
            n++;
          }
        for (Long e = 0; e < n; e++) slots[e].next = slots[least(e + GRAD_TILE, n - 1)].i;
        std::memset(dW_kept, 0, (size_t)(s.units * rows * WEIGHT_SUMS) * 4);
        const Long b0 = chunk * per_chunk, b1 = least(b0 + per_chunk, s.blocks);
        const Long from = TYPES ? b0 : WIDTH * b0, to = TYPES ? b1 : least(WIDTH * b1, v.N);
        for (Long c = 0; c < v.C; c++)
          if (c % v.types >= t0 && c % v.types < t1)
            for (int d = 0; d < D; d++) std::memset(dpose + (c * D + d) * v.N + from, 0, (size_t)(to - from) * 4);
        for (tile.b = b0; tile.b < b1; tile.b++)
          for (tile.l = 0; tile.l < v.L; tile.l++)
            for (Long e = 0; e < n; e += GRAD_TILE) {
              tile.slots = slots + e;
              const Long count = least(GRAD_TILE, n - e);
              run(tile, count, rows, dW_kept);
              for (Long c = 0; c < count; c++) {
                add_to_pose(dpose, tile.dP + c * POSE_SUMS, tile.child(v, c), tile.b);
                if (gr) add_to_activation(tile.dR + c * WIDTH, tile.child(v, c), tile.b);
              }
            }
        for (Long e = 0; e < n; e++)
          for (Long u = 0; u < s.units; u++)
            put_weight(sums + chunk * numbers, dW_kept + (u * rows + slots[e].row) * WEIGHT_SUMS, slots[e].g, u);
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

Long lanes() { return WIDTH; }

// For the tests.
void exp_of(const float* x, float* y, Long size) {
  for (Long k = 0; k < size; k += WIDTH) {
    const int live = (int)least(WIDTH, size - k);
    store(y + k, exp_(load(x + k, live)), live);
  }
}

void log_of(const float* x, float* y, Long size) {
#pragma omp simd
  for (Long k = 0; k < size; k++) y[k] = log_(x[k]);
}

// Writes v->laid, if vectors are of types.
void lay_weights(const Votes* v) {
  const Lanes s(*v);
  for (Long g = 0; g < v->G; g++)
    for (Long u = 0; u < s.units; u++)
      poses_to_vectors(v->laid + (g * s.units + u) * POSE, v->W + (g * v->J + u * WIDTH) * D, D, s.live(u, 0));
}

void moments(const Votes* v, const float* r, const float* k0, Long k0_step, const float* m0, Long m0_step, float* rj,
             float* m, float* S) {
  run_pass<Moments>(*v, r, k0, m0, k0_step, m0_step, rj, m, S);
}

void scores(const Votes* v, const float* m, const float* lam, const float* K_j, float* z) {
  run_pass<Scores>(*v, m, nullptr, lam, K_j, z);
  normalise(*v, z);
}

// Like `scores`, from sum_d w_jd V_ijd.
void agreements(const Votes* v, const float* w, float* z) {
  run_pass<Agreements>(*v, nullptr, w, nullptr, nullptr, z);
  normalise(*v, z);
}

void grad_responsibilities(const Votes* v, const float* m, const float* gb, const float* gS, const float* gr,
                           const float* r, float* dR, float* s, float* da, Long add) {
  run_pass<GradResponsibilities>(*v, m, gb, gS, gr, dR);
  sum_over_parents(*v, r, dR, s, da, add);
}

void grad_scores(const Votes* v, const float* m, const float* r, const float* s, float* dR, float* U0, float* U1,
                 float* U2) {
  run_pass<GradScores>(*v, m, r, s, dR, U0, U1, U2);
}

void grad_votes(const Votes* v, float* terms, const float* r, const float* dz, Long T, const float* gr, float* da,
                float* dpose, float* dW) {
  const Lanes s(*v);
  const Weights weights(*v, s);
  const Terms of_votes(terms, T, s);
  if (s.types)
    GradVotes<true>{*v, s, weights, of_votes, r, dz, T, gr, da}.all(dpose, dW);
  else
    GradVotes<false>{*v, s, weights, of_votes, r, dz, T, gr, da}.all(dpose, dW);
}

// Writes x, l j d n, as pose k of the terms.
void put_term(const float* x, float* terms, Long k, Long T, Long L, Long J, Long N) {
  const Terms of_votes(terms, T, Lanes(L, 0, J, N));
  const bool half = k % 2 == 1 && k < 4 * T - 2;  // a C_k
  for (Long l = 0; l < L; l++)
    for (Long j = 0; j < J; j++) of_votes.put_pose(k, l, j, x + (l * J + j) * D * N, half ? 0.5f : 1.0f);
}

}  // extern "C"
