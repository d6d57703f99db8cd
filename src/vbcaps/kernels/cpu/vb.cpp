// The updates of VB routing at a parent, between the passes over votes: the twin of triton/vb.py.
//
// Numbers per parent are computed in float64: they are few, and their rounding errors would affect whole scores.

#include "lanes.h"

namespace {

constexpr double LN2 = 0.69314718055994531, LN2PIE = 2.8378770664093453;

// Returns ln x for positive normal x.
INLINE double log_of(double x) {
  int64_t i;
  std::memcpy(&i, &x, 8);
  const int64_t e = (i - 0x3fe6a09e667f3bcdLL) >> 52;  // so that the mantissa lies in [sqrt(1/2), sqrt(2))
  i -= e << 52;
  double y;
  std::memcpy(&y, &i, 8);
  const double s = (y - 1) / (y + 1), u = s * s;
  const double series =
      1.0 / 3 + u * (1.0 / 5 + u * (1.0 / 7 + u * (1.0 / 9 + u * (1.0 / 11 + u * (1.0 / 13 + u / 15)))));
  return (double)(int32_t)e * LN2 + 2 * s * (1 + u * series);
}

// Returns psi(x), x > 0: below 8 by recurrence from x + 8, its eight terms paired from both ends; then by its series.
INLINE double digamma(double x) {
  const double t = x * x + 7 * x;
  const double shift = x < 8 ? (2 * x + 7) * (1 / t + 1 / (t + 6) + 1 / (t + 10) + 1 / (t + 12)) : 0.0;
  const double y = x < 8 ? x + 8 : x, u = 1 / (y * y);
  const double series = u * (1.0 / 12 - u * (1.0 / 120 - u * (1.0 / 252 - u * (1.0 / 240 - u / 132))));
  return log_of(y) - 0.5 / y - series - shift;
}

// Returns psi'(x), x > 0, by the method of `digamma`.
INLINE double trigamma(double x) {
  const double t = x * x + 7 * x;
  const double shift = x < 8 ? (2 * t + 49) / (t * t) + (2 * t + 37) / ((t + 6) * (t + 6)) +
                                   (2 * t + 29) / ((t + 10) * (t + 10)) + (2 * t + 25) / ((t + 12) * (t + 12))
                             : 0.0;
  const double y = 1 / (x < 8 ? x + 8 : x), u = y * y;
  return shift + y + 0.5 * u + y * u * (1.0 / 6 - u * (1.0 / 30 - u * (1.0 / 42 - u * (1.0 / 30 - u * (5.0 / 66)))));
}

// Returns sum_d psi(nu/2), or the Wishart's sum_d psi((nu - d)/2).
INLINE double digamma_of_nu(double nu, bool wishart) {
  if (!wishart) return 16 * digamma(nu / 2);
  double sum = 0;
  for (int d = 0; d < 16; d++) sum += digamma((nu - d) / 2);
  return sum;
}

// Returns the derivative of `digamma_of_nu`.
INLINE double trigamma_of_nu(double nu, bool wishart) {
  if (!wishart) return 8 * trigamma(nu / 2);
  double sum = 0;
  for (int d = 0; d < 16; d++) sum += trigamma((nu - d) / 2);
  return 0.5 * sum;
}

}  // namespace

// cpu/launch.py has the same structure. A step leads from one type to the next, and is 0 if all types share a value.
struct VBPrior {
  const float *alpha0, *kappa0, *nu0, *inv_psi0;
  Long alpha0_step, kappa0_step, nu0_step, inv_psi0_step;
};

namespace {

// Numbers of the parents of a field, j n; `sum_alpha` is the sum over types, repeated for each type.
struct Field {
  double *r, *alpha, *sum_alpha, *kappa, *nu, *more[4];

  explicit Field(Long size) {
    scratch.reserve((size_t)(9 * 2 * size), 9);
    for (double** x : {&r, &alpha, &sum_alpha, &kappa, &nu, more, more + 1, more + 2, more + 3})
      *x = reinterpret_cast<double*>(scratch.take(2 * size));
  }

  void fill(const float* rj, const VBPrior& prior, Long J, Long N) const {
    for (Long j = 0; j < J; j++)
      for (Long n = 0; n < N; n++) {
        const Long k = j * N + n;
        r[k] = rj[k];
        alpha[k] = (double)rj[k] + prior.alpha0[j * prior.alpha0_step];
        kappa[k] = (double)rj[k] + prior.kappa0[j * prior.kappa0_step];
        nu[k] = (double)rj[k] + prior.nu0[j * prior.nu0_step];
      }
    sum_over_types(sum_alpha, alpha, J, N);
  }

  static void sum_over_types(double* sums, const double* x, Long J, Long N) {
    for (Long n = 0; n < N; n++) {
      double sum = 0;
      for (Long j = 0; j < J; j++) sum += x[j * N + n];
      for (Long j = 0; j < J; j++) sums[j * N + n] = sum;
    }
  }
};

// Loads psi_j = 1 / (Psi0^-1 + S_j) of the parents of type j in a block of images.
inline void load_psi(vec (&psi)[4], const float* S, const VBPrior& prior, const Lanes& s, Long j, int live) {
  load_rows(psi, S, s, live);
  for (int p = 0; p < 4; p++) psi[p] = 1.0f / (psi[p] + tile(prior.inv_psi0 + j * prior.inv_psi0_step + 4 * p));
}

}  // namespace

extern "C" {

// Updates q*(pi, mu, lambda); writes the scores' precision lambda = nu psi and constant K or, if logit is not null,
// the result.
void vb_parent(const float* rj, const float* S, const VBPrior* prior, const float* beta_a, const float* beta_u,
               float* lam, float* K_j, float* logit, float* alpha, float* kappa, float* psi, float* nu, float* E_ln_pi,
               float* E_lndet, Long L, Long J, Long N, Long wishart, Long paper, Long threads) {
  const Lanes s(J, N, false);
  const Long size = J * N;
#pragma omp parallel num_threads(threads_for(threads, L * J * s.blocks * 16))
  {
    const Field f(size);
    double *const ln_pi = f.more[0], *const of_nu = f.more[1], *const ln_psi = f.more[2];
#pragma omp for schedule(static)
    for (Long l = 0; l < L; l++) {
      f.fill(rj + l * size, *prior, J, N);
#pragma omp simd
      for (Long k = 0; k < size; k++) ln_pi[k] = digamma(f.alpha[k]) - digamma(f.sum_alpha[k]);
      if (wishart)
        for (Long k = 0; k < size; k++) of_nu[k] = digamma_of_nu(f.nu[k], true);
      else
#pragma omp simd
        for (Long k = 0; k < size; k++) of_nu[k] = digamma_of_nu(f.nu[k], false);
      for (Long j = 0; j < J; j++)
        for (Long b = 0; b < s.blocks; b++) {
          const int live = s.live(j, b);
          const Long k = j * N + K * b, at = s.rows(l, j, b);
          vec rows[4];
          load_psi(rows, S + at, *prior, s, j, live);
          sum_of_logs(ln_psi + k, rows, live);
          if (!logit) {
            const vec nu_j = spread_of(f.nu + k, live);
            for (int p = 0; p < 4; p++) rows[p] *= nu_j;
          }
          store_rows((logit ? psi : lam) + at, rows, s, live);
        }
      for (Long k = 0; k < size; k++) {
        const Long at = l * size + k, j = k / N;
        const double lndet = ln_psi[k] + of_nu[k] + 16 * LN2;
        if (!logit) {
          K_j[at] = (float)(ln_pi[k] + 0.5 * lndet - 8 / f.kappa[k]);
          continue;
        }
        const double H = 0.5 * (16 * LN2PIE - lndet);
        logit[at] = (float)(paper ? beta_a[j] - (beta_u[j] + ln_pi[k] + lndet) * f.r[k]
                                  : beta_a[j] - (std::exp(ln_pi[k]) * H + beta_u[j]));
        alpha[at] = (float)f.alpha[k];
        kappa[at] = (float)f.kappa[k];
        nu[at] = (float)f.nu[k];
        E_ln_pi[at] = (float)ln_pi[k];
        E_lndet[at] = (float)lndet;
      }
    }
  }
}

// Writes the gradients of the moments, gb = dm / kappa, gS, gr, from those of logit and posterior (if dlogit is not
// null) or scores; and the terms of iteration t of T (grad_votes). dm, dalpha, dkappa, dpsi, dnu, galpha, gkappa and
// gnu may be null.
void vb_grad_parent(const float* rj, const float* S, const float* m, const float* last_m, const VBPrior* prior,
                    const float* beta_u, const float* dlogit, const float* dm, const float* dalpha,
                    const float* dkappa, const float* dpsi, const float* dnu, const float* E_ln_pi,
                    const float* E_lndet, const float* U0, const float* U1, const float* U2, float* gb, float* gS,
                    float* gr, float* terms, Long T, Long t, float* galpha, float* gkappa, float* gnu, Long L, Long J,
                    Long N, Long wishart, Long paper, Long threads) {
  const Lanes s(J, N, false);
  const Long size = J * N, cell = (4 * T - 1) * 4 * WIDTH;
  if (dlogit) expect_large(terms, L * J * s.blocks * cell);
#pragma omp parallel num_threads(threads_for(threads, L * J * s.blocks * 16))
  {
    const Field f(size);
    double *const dE_ln_pi = f.more[0], *const dE_lndet = f.more[1], *const of_nu = f.more[2], *const sums = f.more[3];
#pragma omp for schedule(static)
    for (Long l = 0; l < L; l++) {
      const Long first = l * size;
      f.fill(rj + first, *prior, J, N);
      for (Long k = 0; k < size; k++) {
        const Long at = first + k;
        of_nu[k] = 0;
        if (!dlogit) {
          dE_ln_pi[k] = U0[at];
          dE_lndet[k] = 0.5 * U0[at];
        } else if (paper) {
          dE_ln_pi[k] = dE_lndet[k] = -f.r[k] * dlogit[at];
        } else {
          const double pi = std::exp((double)E_ln_pi[at]);
          dE_ln_pi[k] = -pi * 0.5 * (16 * LN2PIE - E_lndet[at]) * dlogit[at];
          dE_lndet[k] = 0.5 * pi * dlogit[at];
        }
      }
      Field::sum_over_types(sums, dE_ln_pi, J, N);
      for (Long j = 0; j < J; j++)
        for (Long b = 0; b < s.blocks; b++) {
          const int live = s.live(j, b);
          const Long k = j * N + K * b, at = s.rows(l, j, b);
          vec psi[4], b_j[4] = {}, S_j[4], E[4], C[4];
          load_psi(psi, S + at, *prior, s, j, live);
          const vec dlndet = spread_of(dE_lndet + k, live), kappa = spread_of(f.kappa + k, live);
          if (dlogit) {
            vec d[4] = {};
            if (dpsi) load_rows(d, dpsi + at, s, live);
            for (int p = 0; p < 4; p++) S_j[p] = -psi[p] * (dlndet + psi[p] * d[p]);
            if (dm) {
              load_rows(d, dm + at, s, live);
              for (int p = 0; p < 4; p++) b_j[p] = d[p] / kappa;
            }
            for (int p = 0; p < 4; p++) E[p] = b_j[p];
            vec m_j[4];
            load_rows(m_j, m + at, s, live);
            store_terms(terms, cell, 4 * T - 2, m_j, s, l, j, b);
          } else {
            vec first_U[4], second_U[4], m_j[4], last_m_j[4], score_E[4], score_C[4], sum = {};
            load_rows(first_U, U1 + at, s, live);
            load_rows(second_U, U2 + at, s, live);
            load_rows(m_j, m + at, s, live);
            load_rows(last_m_j, last_m + at, s, live);
            const vec nu = spread_of(f.nu + k, live);
            for (int p = 0; p < 4; p++) {
              const vec lam = nu * psi[p], shift = last_m_j[p] - m_j[p];
              b_j[p] = lam * first_U[p] / kappa;
              S_j[p] = psi[p] * (0.5f * lam * second_U[p] - dlndet);
              sum += psi[p] * second_U[p];
              score_E[p] = -lam * shift;
              score_C[p] = -lam;
              E[p] = b_j[p] + 2.0f * S_j[p] * shift;
            }
            float of_lanes[K];
            store_firsts(of_lanes, sum_of_lanes(sum));
            for (int n = 0; n < live; n++) of_nu[k + n] = -0.5 * of_lanes[n];
            store_terms(terms, cell, 2 * (T + t), score_E, s, l, j, b);
            store_terms(terms, cell, 2 * (T + t) + 1, score_C, s, l, j, b);
          }
          for (int p = 0; p < 4; p++) C[p] = 2.0f * S_j[p];
          store_rows(gb + at, b_j, s, live);
          store_rows(gS + at, S_j, s, live);
          store_terms(terms, cell, 2 * t, E, s, l, j, b);
          store_terms(terms, cell, 2 * t + 1, C, s, l, j, b);
        }
      if (wishart)
        for (Long k = 0; k < size; k++) of_nu[k] += trigamma_of_nu(f.nu[k], true) * dE_lndet[k];
      else
#pragma omp simd
        for (Long k = 0; k < size; k++) of_nu[k] += trigamma_of_nu(f.nu[k], false) * dE_lndet[k];
      double* const of_alpha = sums;
#pragma omp simd
      for (Long k = 0; k < size; k++)
        of_alpha[k] = trigamma(f.alpha[k]) * dE_ln_pi[k] - trigamma(f.sum_alpha[k]) * sums[k];
      for (Long k = 0; k < size; k++) {
        const Long at = first + k;
        const double g_alpha = of_alpha[k] + (dalpha ? dalpha[at] : 0.0f);
        const double g_kappa =
            (dlogit ? 0 : 8 / (f.kappa[k] * f.kappa[k]) * dE_ln_pi[k]) + (dkappa ? dkappa[at] : 0.0f);
        const double g_nu = of_nu[k] + (dnu ? dnu[at] : 0.0f);
        const double direct = dlogit && paper ? -((double)beta_u[k / N] + E_ln_pi[at] + E_lndet[at]) * dlogit[at] : 0;
        gr[at] = (float)(g_alpha + g_kappa + g_nu + direct);
        if (galpha) {
          galpha[at] = (float)g_alpha;
          gkappa[at] = (float)g_kappa;
          gnu[at] = (float)g_nu;
        }
      }
    }
  }
}

}  // extern "C"
