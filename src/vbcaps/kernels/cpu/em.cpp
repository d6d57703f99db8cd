// The updates of EM routing at a parent, between the passes over votes: the twin of triton/em.py.
//
// The passes run without a prior, k0 = 0, so S_j / r_j is the variance of the votes about their mean m_j.

#include "lanes.h"

namespace {

constexpr double LN2PI = 1.8378770664093453;

// The Gaussians of the parents of type j in a block of images.
struct Mixture {
  double r[K], inv_r[K], ln_var[K], cost[K], logit[K];  // cost: per r_j
  vec spread[4], var[4], lam[4];

  Mixture(const float* rj, const float* S, const float* beta_a, const float* beta_u, const Lanes& s, Long l, Long j,
          Long b, double inverse_temperature, double min_var) {
    const int live = s.live(j, b);
    for (int n = 0; n < K; n++) {
      r[n] = n < live ? rj[s.scalar(l, j, b) + n] : 1;
      inv_r[n] = 1 / (r[n] < SMALLEST_WEIGHT ? SMALLEST_WEIGHT : r[n]);
    }
    load_rows(spread, S + s.rows(l, j, b), s, live);
    const vec scale = spread_of(inv_r, live);
    for (int p = 0; p < 4; p++) {
      spread[p] *= scale;
      var[p] = spread[p] + (float)min_var;
      lam[p] = 1.0f / var[p];
    }
    sum_of_logs(ln_var, var, K);
    for (int n = 0; n < K; n++) {
      cost[n] = 16.0 * beta_u[j] + 0.5 * ln_var[n];
      logit[n] = inverse_temperature * (beta_a[j] - cost[n] * r[n]);
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
  const Lanes s(J, N, false);
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, L * J * s.blocks * 16))
  for (Long l = 0; l < L; l++)
    for (Long j = 0; j < J; j++)
      for (Long b = 0; b < s.blocks; b++) {
        const Mixture q(rj, S, beta_a, beta_u, s, l, j, b, inverse_temperature, min_var);
        const int live = s.live(j, b);
        store_rows((logit ? var : lam) + s.rows(l, j, b), logit ? q.var : q.lam, s, live);
        for (int n = 0; n < live; n++) {
          const Long at = s.scalar(l, j, b) + n;
          if (logit)
            logit[at] = (float)q.logit[n];
          else
            K_j[at] = (float)(log_sigmoid(q.logit[n]) - 0.5 * (q.ln_var[n] + 16 * LN2PI));
        }
      }
}

// Writes the gradients of the moments, gb = dm / r_j, gS, gr, from those of logit, m and var (if dlogit is not null; dm
// and dvar may be null) or scores; the terms of iteration t of T (grad_votes); and the gradient glogit of beta_a.
void em_grad_parent(const float* rj, const float* S, const float* m, const float* last_m, const float* beta_a,
                    const float* beta_u, const float* dlogit, const float* dm, const float* dvar, const float* U0,
                    const float* U1, const float* U2, float* gb, float* gS, float* gr, float* terms, Long T, Long t,
                    float* glogit, double inverse_temperature, double min_var, Long L, Long J, Long N, Long threads) {
  const Lanes s(J, N, false);
  const Long cell = (4 * T - 1) * 4 * WIDTH;
  if (dlogit) expect_large(terms, L * J * s.blocks * cell);
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, L * J * s.blocks * 16))
  for (Long l = 0; l < L; l++)
    for (Long j = 0; j < J; j++)
      for (Long b = 0; b < s.blocks; b++) {
        const Mixture q(rj, S, beta_a, beta_u, s, l, j, b, inverse_temperature, min_var);
        const int live = s.live(j, b);
        const Long at = s.rows(l, j, b), first = s.scalar(l, j, b);
        double of_logit[K], of_ln_var[K];
        for (int n = 0; n < live; n++) {
          of_logit[n] = inverse_temperature * (dlogit ? dlogit[first + n] : U0[first + n] * sigmoid_of_minus(q.logit[n]));
          of_ln_var[n] = -0.5 * (q.r[n] * of_logit[n] + (dlogit ? 0.0f : U0[first + n]));
        }
        const vec inv_r = spread_of(q.inv_r, live), dln_var = spread_of(of_ln_var, live);
        vec b_j[4] = {}, S_j[4], E[4], C[4], m_j[4], d[4] = {}, sum = {};
        load_rows(m_j, m + at, s, live);
        if (dlogit) {
          if (dvar) load_rows(d, dvar + at, s, live);
          for (int p = 0; p < 4; p++) d[p] += dln_var * q.lam[p];
          if (dm) {
            load_rows(b_j, dm + at, s, live);
            for (int p = 0; p < 4; p++) b_j[p] *= inv_r;
          }
          store_terms(terms, cell, 4 * T - 2, m_j, s, l, j, b);
        } else {
          vec first_U[4], second_U[4];
          load_rows(first_U, U1 + at, s, live);
          load_rows(second_U, U2 + at, s, live);
          for (int p = 0; p < 4; p++) {
            d[p] = q.lam[p] * (dln_var + 0.5f * q.lam[p] * second_U[p]);
            b_j[p] = inv_r * q.lam[p] * first_U[p];
          }
        }
        for (int p = 0; p < 4; p++) {
          S_j[p] = inv_r * d[p];
          sum += d[p] * q.spread[p];
          E[p] = b_j[p];
          C[p] = 2.0f * S_j[p];
        }
        if (!dlogit) {
          vec last_m_j[4], score_E[4], score_C[4];
          load_rows(last_m_j, last_m + at, s, live);
          for (int p = 0; p < 4; p++) {
            const vec shift = last_m_j[p] - m_j[p];
            score_E[p] = -q.lam[p] * shift;
            score_C[p] = -q.lam[p];
            E[p] += C[p] * shift;
          }
          store_terms(terms, cell, 2 * (T + t), score_E, s, l, j, b);
          store_terms(terms, cell, 2 * (T + t) + 1, score_C, s, l, j, b);
        }
        store_rows(gb + at, b_j, s, live);
        store_rows(gS + at, S_j, s, live);
        store_terms(terms, cell, 2 * t, E, s, l, j, b);
        store_terms(terms, cell, 2 * t + 1, C, s, l, j, b);
        float of_lanes[K];
        store_firsts(of_lanes, sum_of_lanes(sum));
        for (int n = 0; n < live; n++) {
          const double of_r = q.r[n] < SMALLEST_WEIGHT ? 0 : q.inv_r[n] * of_lanes[n];
          gr[first + n] = (float)(-q.cost[n] * of_logit[n] - of_r);
          glogit[first + n] = (float)of_logit[n];
        }
      }
}

}  // extern "C"
