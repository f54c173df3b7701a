/* The AVX2 level's table. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

static double probe_flops(uint64_t iterations)
{
    enum { CHAINS = 12 };
    __m256 sum[CHAINS];
    volatile float source = 1.0f;
    __m256 one = _mm256_set1_ps(source);
    DSPARK__UNROLL
    for (int j = 0; j < CHAINS; j++) sum[j] = _mm256_set1_ps((float)j); /* all different */
    for (uint64_t i = 0; i < iterations; i++)
        DSPARK__UNROLL
        for (int j = 0; j < CHAINS; j++) sum[j] = _mm256_fmadd_ps(one, one, sum[j]);
    DSPARK__UNROLL
    for (int j = 1; j < CHAINS; j++) sum[0] = _mm256_add_ps(sum[0], sum[j]);
    source = _mm256_cvtss_f32(sum[0]);
    return 16.0 * CHAINS * (double)iterations;
}

void dspark__kern_avx2(dspark__kern *k)
{
    k->isa = DSPARK_ISA_AVX2;
    k->gemm_bf16 = dspark__gemm_bf16__avx2;
    k->gemm_groups = dspark__gemm_groups__avx2;
    k->decode = dspark__decode__avx2;
    k->dot_codes = dspark__dot_codes__avx2;
    k->scale_add = dspark__scale_add__avx2;
    k->finish = dspark__finish__avx2;
    k->rmsnorm_bf16 = dspark__rmsnorm_bf16__avx2;
    k->rope_angles = dspark__rope_angles__avx2;
    k->rope_bf16 = dspark__rope_bf16__avx2;
    k->fp8_e4m3 = dspark__fp8_e4m3__avx2;
    k->fp8_e5m2 = dspark__fp8_e5m2__avx2;
    k->absmax_bf16 = dspark__absmax_bf16__avx2;
    k->finite_bf16 = dspark__finite_bf16__avx2;
    k->softmax_piece = dspark__softmax_piece__avx2;
    k->scale_rows = dspark__scale_rows__avx2;
    k->attend_finish = dspark__attend_finish__avx2;
    k->pack_entries = dspark__pack_entries__avx2;
    k->pack_panel = dspark__pack_panel__avx2;
    k->digest_rows = dspark__digest_rows__avx2;
    k->pack_digest = dspark__pack_digest__avx2;
    k->e4m3_to_bf16 = dspark__e4m3_to_bf16__avx2;
    k->e5m2_to_bf16 = dspark__e5m2_to_bf16__avx2;
    k->silu_mul = dspark__silu_mul__avx2;
    k->add_bf16 = dspark__add_bf16__avx2;
    k->dot_lanes = dspark__dot_lanes__avx2;
    k->argmax_bf16 = dspark__argmax_bf16__avx2;
    k->add_argmax_bf16 = dspark__add_argmax_bf16__avx2;
    k->bound_panels = dspark__bound_panels__avx2;
    k->bound_widen = dspark__bound_widen__avx2;
    k->bound_turn = dspark__bound_turn__avx2;
    k->bound_codes = dspark__bound_codes__avx2;
    k->probe_flops = probe_flops;
    /* Measured on Zen 4 against decode and gemm_bf16. */
    k->dot_rows[0][DSPARK__CODE_PLAIN] = k->dot_rows[0][DSPARK__CODE_OFFSET] = 24;
    k->dot_rows[0][DSPARK__CODE_E4M3] = k->dot_rows[0][DSPARK__CODE_E8M0] = 16;
    k->dot_rows[1][DSPARK__CODE_PLAIN] = k->dot_rows[1][DSPARK__CODE_E8M0] = 32;
    k->dot_rows[1][DSPARK__CODE_OFFSET] = 48;
}

#endif
