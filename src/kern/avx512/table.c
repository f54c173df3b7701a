/* The AVX-512 level's table. */
#if defined(__x86_64__)
#include "kern/avx512/bits.h"

static double probe_flops(uint64_t iterations)
{
    enum { CHAINS = 24 };
    __m512 sum[CHAINS];
    volatile float source = 1.0f;
    __m512 one = _mm512_set1_ps(source);
    DSPARK__UNROLL
    for (int j = 0; j < CHAINS; j++) sum[j] = _mm512_set1_ps((float)j); /* all different */
    for (uint64_t i = 0; i < iterations; i++)
        DSPARK__UNROLL
        for (int j = 0; j < CHAINS; j++) sum[j] = _mm512_fmadd_ps(one, one, sum[j]);
    DSPARK__UNROLL
    for (int j = 1; j < CHAINS; j++) sum[0] = _mm512_add_ps(sum[0], sum[j]);
    source = _mm512_cvtss_f32(sum[0]);
    return 32.0 * CHAINS * (double)iterations;
}

void dspark__kern_avx512(dspark__kern *k)
{
    k->isa = DSPARK_ISA_AVX512;
    k->gemm_bf16 = dspark__gemm_bf16__avx512;
    k->gemm_groups = dspark__gemm_groups__avx512;
    k->decode = dspark__decode__avx512;
    k->scale_add = dspark__scale_add__avx512;
    k->finish = dspark__finish__avx512;
    k->rmsnorm_bf16 = dspark__rmsnorm_bf16__avx512;
    k->rope_angles = dspark__rope_angles__avx512;
    k->rope_bf16 = dspark__rope_bf16__avx512;
    k->fp8_e4m3 = dspark__fp8_e4m3__avx512;
    k->fp8_e5m2 = dspark__fp8_e5m2__avx512;
    k->absmax_bf16 = dspark__absmax_bf16__avx512;
    k->finite_bf16 = dspark__finite_bf16__avx512;
    k->softmax_piece = dspark__softmax_piece__avx512;
    k->scale_rows = dspark__scale_rows__avx512;
    k->attend_finish = dspark__attend_finish__avx512;
    k->pack_entries = dspark__pack_entries__avx512;
    k->pack_panel = dspark__pack_panel__avx512;
    k->digest_rows = dspark__digest_rows__avx512;
    k->pack_codes = dspark__pack_codes__avx512;
    k->pack_digest = dspark__pack_digest__avx512;
    k->e4m3_to_bf16 = dspark__e4m3_to_bf16__avx512;
    k->e5m2_to_bf16 = dspark__e5m2_to_bf16__avx512;
    k->silu_mul = dspark__silu_mul__avx512;
    k->add_bf16 = dspark__add_bf16__avx512;
    k->dot_lanes = dspark__dot_lanes__avx512;
    k->argmax_bf16 = dspark__argmax_bf16__avx512;
    k->add_argmax_bf16 = dspark__add_argmax_bf16__avx512;
    k->bound_panels = dspark__bound_panels__avx512;
    k->bound_widen = dspark__bound_widen__avx512;
    k->bound_turn = dspark__bound_turn__avx512;
    k->bound_codes = dspark__bound_codes__avx512;
    k->probe_flops = probe_flops;
    /* dot_codes is that of AVX2. Measured on Zen 4 against this level's decode, with VBMI, and its
     * gemm_bf16. */
    k->dot_rows[0][DSPARK__CODE_PLAIN] = 2;
    k->dot_rows[0][DSPARK__CODE_E4M3] = k->dot_rows[0][DSPARK__CODE_E8M0] = 1;
    k->dot_rows[0][DSPARK__CODE_OFFSET] = 1;
    k->dot_rows[1][DSPARK__CODE_PLAIN] = 4;
    k->dot_rows[1][DSPARK__CODE_E8M0] = k->dot_rows[1][DSPARK__CODE_OFFSET] = 8;
}

#endif
