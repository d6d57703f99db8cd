// The updates of EM routing at a parent, between the passes over votes: the twin of triton/em.py.
//
// The passes run without a prior, k0 = 0, so S_j / r_j is the variance of the votes about their mean m_j.

#include "lanes.h"

namespace {

constexpr double LN2PI = 1.8378770664093453;

// The Gaussians of the parents of one type at one position, for N images.
struct Mixture {
  double *r, *inv_r, *ln_var, *cost, *logit, *more[3];  // n; cost: per r_j
  float *scale, *numbers, *spread, *var, *poses[4];     // n, 2 n, d n, d n, d n

  explicit Mixture(Long N) {
    scratch.reserve((size_t)(8 * 2 * N + 6 * D * N + 3 * N), 16);
    for (double** x : {&r, &inv_r, &ln_var, &cost, &logit, more, more + 1, more + 2})
      *x = reinterpret_cast<double*>(scratch.take(2 * N));
    scale = scratch.take(N);
    numbers = scratch.take(2 * N);
    for (float** x : {&spread, &var, poses, poses + 1, poses + 2, poses + 3}) *x = scratch.take(D * N);
  }

  // Computes the Gaussians of type j from r_j and S_j; `spread` serves as room before it holds S_j / r_j.
  void update(const float* rj, const float* S, float beta_a, float beta_u, Long N, double inverse_temperature,
              double min_var) const {
    for (Long n = 0; n < N; n++) {
      r[n] = rj[n];
      inv_r[n] = 1 / (r[n] < SMALLEST_WEIGHT ? SMALLEST_WEIGHT : r[n]);
      scale[n] = (float)inv_r[n];
    }
    float *const scale = this->scale, *const spread = this->spread, *const var = this->var;
    const float least_var = (float)min_var;
    over_pose(N, [=](Long, Long n, Long k) INLINE_LAMBDA {
      var[k] = S[k] * scale[n] + least_var;
      spread[k] = log_(var[k]);
    });
    sum_over_pose(ln_var, spread, N);
    over_pose(N, [=](Long, Long n, Long k) INLINE_LAMBDA { spread[k] = S[k] * scale[n]; });
    for (Long n = 0; n < N; n++) {
      cost[n] = 16.0 * beta_u + 0.5 * ln_var[n];
      logit[n] = inverse_temperature * (beta_a - cost[n] * r[n]);
    }
  }
};

// ln sigmoid(x), and its derivative sigmoid(-x).
double log_sigmoid(double x) { return (x < 0 ? x : 0) - std::log1p(std::exp(-std::fabs(x))); }
double sigmoid_of_minus(double x) {
  const double e = std::exp(-std::fabs(x));
  return (x < 0 ? 1 : e) / (1 + e);
}

}  // namespace

extern "C" {

// Takes an M-step; writes the scores' precision lambda = 1 / var and constant K or, if logit is not null, logit, var.
void em_parent(const float* rj, const float* S, const float* beta_a, const float* beta_u, float* lam, float* K_j,
               float* logit, float* var, double inverse_temperature, double min_var, Long L, Long J, Long N,
               Long threads) {
#pragma omp parallel num_threads(threads_for(threads, work_of(L * J * N)))
  {
    const Mixture q(N);
#pragma omp for schedule(static)
    for (Long parent = 0; parent < L * J; parent++) {
      const Long j = parent % J, first = parent * N, at = parent * D * N;
      q.update(rj + first, S + at, beta_a[j], beta_u[j], N, inverse_temperature, min_var);
      if (logit) {
        std::memcpy(var + at, q.var, (size_t)(D * N) * 4);
        for (Long n = 0; n < N; n++) logit[first + n] = (float)q.logit[n];
        continue;
      }
      float *const lam_j = lam + at, *const var_j = q.var;
#pragma omp simd
      for (Long k = 0; k < D * N; k++) lam_j[k] = 1.0f / var_j[k];
      for (Long n = 0; n < N; n++)
        K_j[first + n] = (float)(log_sigmoid(q.logit[n]) - 0.5 * (q.ln_var[n] + 16 * LN2PI));
    }
  }
}

// Writes the gradients of the moments, gb = dm / r_j, gS, gr, from those of logit, m and var (if dlogit is not null; dm
// and dvar may be null) or scores; the terms of iteration t of T (grad_votes); and the gradient glogit of beta_a.
void em_grad_parent(const float* rj, const float* S, const float* m, const float* last_m, const float* beta_a,
                    const float* beta_u, const float* dlogit, const float* dm, const float* dvar, const float* U0,
                    const float* U1, const float* U2, float* gb, float* gS, float* gr, float* terms, Long T, Long t,
                    float* glogit, double inverse_temperature, double min_var, Long L, Long J, Long N, Long threads) {
  const Terms of_votes(terms, T, Lanes(L, 0, J, N));
#pragma omp parallel num_threads(threads_for(threads, work_of(L * J * N)))
  {
    const Mixture q(N);
    double *const of_logit = q.more[0], *const of_r = q.more[1];
    float *const inv_r = q.scale, *const dln_var = q.numbers, *const var = q.var, *const spread = q.spread;
#pragma omp for schedule(static)
    for (Long parent = 0; parent < L * J; parent++) {
      const Long l = parent / J, j = parent % J, first = parent * N, at = parent * D * N;
      q.update(rj + first, S + at, beta_a[j], beta_u[j], N, inverse_temperature, min_var);
      for (Long n = 0; n < N; n++) {
        const Long k = first + n;
        of_logit[n] = inverse_temperature * (dlogit ? dlogit[k] : U0[k] * sigmoid_of_minus(q.logit[n]));
        dln_var[n] = (float)(-0.5 * (q.r[n] * of_logit[n] + (dlogit ? 0.0f : U0[k])));
      }
      float *const gb_j = gb + at, *const gS_j = gS + at;
      const float *const m_j = m + at, *const last_m_j = last_m + at;
      if (dlogit) {
        const float *const dm_j = dm ? dm + at : nullptr, *const dvar_j = dvar ? dvar + at : nullptr;
        over_pose(N, [=](Long, Long n, Long k) INLINE_LAMBDA {
          const float d = (dvar_j ? dvar_j[k] : 0.0f) + dln_var[n] / var[k];
          gb_j[k] = dm_j ? dm_j[k] * inv_r[n] : 0.0f;
          gS_j[k] = inv_r[n] * d;
          spread[k] *= d;
        });
        of_votes.put_pose(2 * t, l, j, gb_j);
        of_votes.put_pose(4 * T - 2, l, j, m_j, -1.0f);
        if (t == 0) of_votes.put_number(l, j, nullptr, q.numbers + N);
      } else {
        const float *const U1_j = U1 + at, *const U2_j = U2 + at;
        float *const E = q.poses[0], *const around_last = q.poses[1];
        float *const score_E = q.poses[2], *const score_C = q.poses[3];
        over_pose(N, [=](Long, Long n, Long k) INLINE_LAMBDA {
          const float lam = 1.0f / var[k], shift = last_m_j[k] - m_j[k];
          const float d = lam * (dln_var[n] + 0.5f * lam * U2_j[k]);
          const float gb_k = inv_r[n] * lam * U1_j[k], gS_k = inv_r[n] * d;
          gb_j[k] = gb_k;
          gS_j[k] = gS_k;
          spread[k] *= d;
          score_E[k] = -lam * shift;
          score_C[k] = -0.5f * lam;
          E[k] = gb_k + 2.0f * gS_k * shift;
          around_last[k] = shift * (gb_k + gS_k * shift);
        });
        of_votes.put_pose(2 * t, l, j, E);
        of_votes.put_pose(2 * (T + t), l, j, score_E);
        of_votes.put_pose(2 * (T + t) + 1, l, j, score_C);
        if (t == 0) of_votes.put_number(l, j, around_last, q.numbers + N);
      }
      of_votes.put_pose(2 * t + 1, l, j, gS_j);
      sum_over_pose(of_r, spread, N);
      for (Long n = 0; n < N; n++) {
        const double through_var = q.r[n] < SMALLEST_WEIGHT ? 0 : q.inv_r[n] * of_r[n];
        gr[first + n] = (float)(-q.cost[n] * of_logit[n] - through_var);
        glogit[first + n] = (float)of_logit[n];
      }
    }
  }
}

}  // extern "C"
