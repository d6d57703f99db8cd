// The updates of VB routing at a parent, between the passes over votes: the twin of triton/vb.py.
//
// Numbers per parent are computed in float64: they are few, and their rounding errors would affect whole scores.

#include "lanes.h"

namespace {

constexpr double LN2 = 0.69314718055994531, LN2PIE = 2.8378770664093453;

// The rules of the activation, in the order of ACTIVATIONS (routing/vb.py).
enum Rule : Long { AGREEMENT, INFORMATION, RELEASED, PAPER };

// Returns ln x for positive normal x.
INLINE double log_of(double x) {
  int64_t i;
  std::memcpy(&i, &x, 8);
  const int64_t e = (i - 0x3fe6a09e667f3bcdLL) >> 52;  // so that the mantissa lies in [sqrt(1/2), sqrt(2))
  i -= (int64_t)((uint64_t)e << 52);  // of a NaN, e may be negative
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

// Returns ln Gamma(x), x > 0, by the method of `digamma`.
INLINE double ln_gamma(double x) {
  const double t = x * x + 7 * x;
  const double shift = x < 8 ? log_of(t * (t + 6) * (t + 10) * (t + 12)) : 0.0;
  const double y = x < 8 ? x + 8 : x, u = 1 / (y * y);
  const double series =
      (1.0 / 12 - u * (1.0 / 360 - u * (1.0 / 1260 - u * (1.0 / 1680 - u * (1.0 / 1188))))) / y;
  return (y - 0.5) * log_of(y) - y + 0.5 * (LN2PIE - 1) + series - shift;
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

// cpu/calls.py has the same structure. A step leads from one type to the next, and is 0 if all types share a value.
struct VBPrior {
  const float *alpha0, *kappa0, *nu0, *inv_psi0, *m0;
  Long alpha0_step, kappa0_step, nu0_step, inv_psi0_step, m0_step;
};

namespace {

// Numbers of the parents of a field, j n; `sum_alpha` is the sum over types, repeated for each type. And room for some
// poses and numbers of one type, d n and n.
struct Field {
  double *r, *alpha, *sum_alpha, *kappa, *nu, *more[4];
  float *poses[5], *of_images;

  explicit Field(Long J, Long N) {
    const Long size = J * N;
    scratch.reserve((size_t)(9 * 2 * size + 5 * D * N + 4 * N), 15);
    for (double** x : {&r, &alpha, &sum_alpha, &kappa, &nu, more, more + 1, more + 2, more + 3})
      *x = reinterpret_cast<double*>(scratch.take(2 * size));
    for (float*& pose : poses) pose = scratch.take(D * N);
    of_images = scratch.take(4 * N);
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

// Writes KL[q(mu, lambda) || prior] of type j, n, from psi and m, d n, and the sums of ln psi.
INLINE void prior_divergence(const Field& f, const VBPrior& prior, const float* S, const float* psi, const float* m,
                             const double* ln_psi, double* divergence, Long j, Long N) {
  const float *const inv_psi0 = prior.inv_psi0 + j * prior.inv_psi0_step, *const m0 = prior.m0 + j * prior.m0_step;
  const float kappa0 = prior.kappa0[j * prior.kappa0_step];
  const double s0 = 0.5 * prior.nu0[j * prior.nu0_step], ln_gamma_s0 = ln_gamma(s0);
  float* const products = f.poses[1];
  double* const sum = divergence + j * N;
  over_pose(N, [=](Long d, Long n, Long k) INLINE_LAMBDA {
    const float gap = m[k] - m0[d];
    products[k] = psi[k] * (kappa0 * gap * gap - S[k]);  // psi (1 / psi0 + kappa0 gap^2) - 1
  });
  sum_over_pose(sum, products, N);
  double ln_inv_psi0 = 0;
  for (Long d = 0; d < D; d++) ln_inv_psi0 += log_of(inv_psi0[d]);
  for (Long n = 0; n < N; n++) {
    const double kappa = f.kappa[j * N + n], s = 0.5 * f.nu[j * N + n];
    sum[n] = 8 * (log_of(kappa / kappa0) + kappa0 / kappa - 1) +
             16 * ((s - s0) * digamma(s) - ln_gamma(s) + ln_gamma_s0) - s0 * (ln_psi[j * N + n] + ln_inv_psi0) +
             s * sum[n];
  }
}

}  // namespace

extern "C" {

// Updates q*(pi, mu, lambda); writes the scores' precision lambda = nu psi and constant K, both times temper, or, if
// logit is not null, the result.
void vb_parent(const float* rj, const float* S, const float* m, const VBPrior* prior, const float* beta_a,
               const float* beta_u, float* lam, float* K_j, float* logit, float* alpha, float* kappa, float* psi,
               float* nu, float* E_ln_pi, float* E_lndet, Long L, Long J, Long N, Long wishart, Long rule,
               double temper, Long threads) {
  const Long size = J * N;
#pragma omp parallel num_threads(threads_for(threads, work_of(L * J * N)))
  {
    const Field f(J, N);
    double *const ln_pi = f.more[0], *const of_nu = f.more[1], *const ln_psi = f.more[2], *const divergence = f.more[3];
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
      for (Long j = 0; j < J; j++) {
        const Long at = (l * J + j) * D * N;
        const float *const inv_psi0 = prior->inv_psi0 + j * prior->inv_psi0_step, *const S_j = S + at;
        float *const out = (logit ? psi : lam) + at, *const ln_psi_j = f.poses[0], *const scale = f.of_images;
        for (Long n = 0; n < N; n++) scale[n] = logit ? 1.0f : (float)(temper * f.nu[j * N + n]);
        over_pose(N, [=](Long d, Long n, Long k) INLINE_LAMBDA {
          const float psi_k = 1.0f / (S_j[k] + inv_psi0[d]);
          ln_psi_j[k] = log_(psi_k);
          out[k] = scale[n] * psi_k;
        });
        sum_over_pose(ln_psi + j * N, ln_psi_j, N);
        if (logit && rule == INFORMATION)
          prior_divergence(f, *prior, S_j, out, m + at, ln_psi, divergence, j, N);
      }
      for (Long k = 0; k < size; k++) {
        const Long at = l * size + k, j = k / N;
        const double lndet = ln_psi[k] + of_nu[k] + 16 * LN2;
        if (!logit) {
          K_j[at] = (float)(temper * (ln_pi[k] + 0.5 * lndet - 8 / f.kappa[k]));
          continue;
        }
        double without_beta_a;
        if (rule == AGREEMENT)
          without_beta_a = (ln_pi[k] + 0.5 * lndet - beta_u[j]) * f.r[k];
        else if (rule == INFORMATION)
          without_beta_a = divergence[k] - beta_u[j];
        else if (rule == PAPER)
          without_beta_a = -(beta_u[j] + ln_pi[k] + lndet) * f.r[k];
        else
          without_beta_a = -(std::exp(ln_pi[k]) * 0.5 * (16 * LN2PIE - lndet) + beta_u[j]);
        logit[at] = (float)(beta_a[j] + without_beta_a);
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
                    Long N, Long wishart, Long rule, double temper, Long threads) {
  const Long size = J * N;
  const Terms of_votes(terms, T, Lanes(L, 0, J, N));
#pragma omp parallel num_threads(threads_for(threads, work_of(L * J * N)))
  {
    const Field f(J, N);
    double *const dE_ln_pi = f.more[0], *const dE_lndet = f.more[1], *const of_nu = f.more[2], *const sums = f.more[3];
#pragma omp for schedule(static)
    for (Long l = 0; l < L; l++) {
      const Long first = l * size;
      f.fill(rj + first, *prior, J, N);
      for (Long k = 0; k < size; k++) {
        const Long at = first + k;
        of_nu[k] = 0;
        if (!dlogit) {
          dE_ln_pi[k] = temper * U0[at];
          dE_lndet[k] = 0.5 * temper * U0[at];
        } else if (rule == AGREEMENT) {
          dE_ln_pi[k] = f.r[k] * dlogit[at];
          dE_lndet[k] = 0.5 * f.r[k] * dlogit[at];
        } else if (rule == INFORMATION) {
          dE_ln_pi[k] = dE_lndet[k] = 0;
        } else if (rule == PAPER) {
          dE_ln_pi[k] = dE_lndet[k] = -f.r[k] * dlogit[at];
        } else {
          const double pi = std::exp((double)E_ln_pi[at]);
          dE_ln_pi[k] = -pi * 0.5 * (16 * LN2PIE - E_lndet[at]) * dlogit[at];
          dE_lndet[k] = 0.5 * pi * dlogit[at];
        }
      }
      Field::sum_over_types(sums, dE_ln_pi, J, N);
      for (Long j = 0; j < J; j++) {
        const Long at = (l * J + j) * D * N;
        const float *const inv_psi0 = prior->inv_psi0 + j * prior->inv_psi0_step, *const S_j = S + at;
        const float *const m_j = m + at, *const last_m_j = last_m + at;
        float *const gb_j = gb + at, *const gS_j = gS + at;
        float *const dlndet = f.of_images, *const inv_kappa = dlndet + N, *const nu = dlndet + 2 * N;
        for (Long n = 0; n < N; n++) {
          const Long k = j * N + n;
          dlndet[n] = (float)dE_lndet[k];
          inv_kappa[n] = (float)(1 / f.kappa[k]);
          nu[n] = (float)f.nu[k];
        }
        if (dlogit) {
          const float *const dpsi_j = dpsi ? dpsi + at : nullptr, *const dm_j = dm ? dm + at : nullptr;
          over_pose(N, [=](Long d, Long n, Long k) INLINE_LAMBDA {
            const float psi = 1.0f / (S_j[k] + inv_psi0[d]);
            gS_j[k] = -psi * (dlndet[n] + (dpsi_j ? psi * dpsi_j[k] : 0.0f));
            gb_j[k] = dm_j ? dm_j[k] * inv_kappa[n] : 0.0f;
          });
          if (rule == INFORMATION) {
            const float *const m0 = prior->m0 + j * prior->m0_step, *const g = dlogit + first + j * N;
            const float *const r_j = rj + first + j * N, kappa0 = prior->kappa0[j * prior->kappa0_step];
            float* const products = f.poses[0];
            over_pose(N, [=](Long d, Long n, Long k) INLINE_LAMBDA {
              const float psi = 1.0f / (S_j[k] + inv_psi0[d]), gap = m_j[k] - m0[d];
              const float product = psi * (kappa0 * gap * gap - S_j[k]);
              products[k] = product;
              gS_j[k] -= 0.5f * g[n] * psi * (r_j[n] + nu[n] * product);
              gb_j[k] += g[n] * nu[n] * kappa0 * psi * gap * inv_kappa[n];
            });
            double* const sum = of_nu + j * N;
            sum_over_pose(sum, products, N);
            for (Long n = 0; n < N; n++) {
              sum[n] = g[n] * (0.5 * sum[n] + 0.5 * r_j[n] * trigamma_of_nu(f.nu[j * N + n], false));
            }
          }
          of_votes.put_pose(2 * t, l, j, gb_j);
          of_votes.put_pose(2 * t + 1, l, j, gS_j);
          of_votes.put_pose(4 * T - 2, l, j, m_j, -1.0f);
          if (t == 0) of_votes.put_number(l, j, nullptr, f.of_images + 3 * N);
          continue;
        }
        const float *const U1_j = U1 + at, *const U2_j = U2 + at;
        float *const products = f.poses[0], *const E = f.poses[1], *const around_last = f.poses[2];
        float *const score_E = f.poses[3], *const score_C = f.poses[4];
        const float soft = (float)temper;
        over_pose(N, [=](Long d, Long n, Long k) INLINE_LAMBDA {
          const float psi = 1.0f / (S_j[k] + inv_psi0[d]), lam = soft * (nu[n] * psi), shift = last_m_j[k] - m_j[k];
          const float gb_k = lam * U1_j[k] * inv_kappa[n], gS_k = psi * (0.5f * lam * U2_j[k] - dlndet[n]);
          products[k] = soft * psi * U2_j[k];
          gb_j[k] = gb_k;
          gS_j[k] = gS_k;
          score_E[k] = -lam * shift;
          score_C[k] = -0.5f * lam;
          E[k] = gb_k + 2.0f * gS_k * shift;
          around_last[k] = shift * (gb_k + gS_k * shift);
        });
        of_votes.put_pose(2 * t, l, j, E);
        of_votes.put_pose(2 * t + 1, l, j, gS_j);
        of_votes.put_pose(2 * (T + t), l, j, score_E);
        of_votes.put_pose(2 * (T + t) + 1, l, j, score_C);
        if (t == 0) of_votes.put_number(l, j, around_last, f.of_images + 3 * N);
        sum_over_pose(of_nu + j * N, products, N);
        for (Long n = 0; n < N; n++) of_nu[j * N + n] *= -0.5;
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
        const double inv_kappa2 = 1 / (f.kappa[k] * f.kappa[k]);
        double g_kappa = dkappa ? dkappa[at] : 0.0f, direct = 0;
        if (!dlogit)
          g_kappa += 8 * inv_kappa2 * dE_ln_pi[k];
        else if (rule == AGREEMENT)
          direct = ((double)E_ln_pi[at] + 0.5 * E_lndet[at] - beta_u[k / N]) * dlogit[at];
        else if (rule == INFORMATION)
          g_kappa += 8 * inv_kappa2 * (f.kappa[k] - prior->kappa0[k / N * prior->kappa0_step]) * dlogit[at];
        else if (rule == PAPER)
          direct = -((double)beta_u[k / N] + E_ln_pi[at] + E_lndet[at]) * dlogit[at];
        const double g_nu = of_nu[k] + (dnu ? dnu[at] : 0.0f);
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
