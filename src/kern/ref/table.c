/* The reference level's table: every slot filled. */
#include "kern/levels.h"

#include <math.h>

static double probe_flops(uint64_t iterations)
{
    enum { CHAINS = 8 };
    float acc[CHAINS] = {0, 1, 2, 3, 4, 5, 6, 7}; /* all different, or they become one */
    volatile float source = 1.0f;
    float x = source, sum = 0;
    for (uint64_t i = 0; i < iterations; i++)
        for (int j = 0; j < CHAINS; j++) acc[j] = fmaf(x, x, acc[j]);
    for (int j = 0; j < CHAINS; j++) sum += acc[j];
    source = sum;
    return 2.0 * CHAINS * (double)iterations;
}

void dspark__kern_ref(dspark__kern *k)
{
    k->isa = DSPARK_ISA_REF;
    k->gemm_bf16 = dspark__gemm_bf16__ref;
    k->gemm_groups = dspark__gemm_groups__ref;
    k->decode = dspark__decode__ref;
    k->dot_codes = dspark__dot_codes__ref;
    k->scale_add = dspark__scale_add__ref;
    k->finish = dspark__finish__ref;
    k->rmsnorm_bf16 = dspark__rmsnorm_bf16__ref;
    k->rope_angles = dspark__rope_angles__ref;
    k->rope_bf16 = dspark__rope_bf16__ref;
    k->fp8_e4m3 = dspark__fp8_e4m3__ref;
    k->fp8_e5m2 = dspark__fp8_e5m2__ref;
    k->absmax_bf16 = dspark__absmax_bf16__ref;
    k->finite_bf16 = dspark__finite_bf16__ref;
    k->softmax_piece = dspark__softmax_piece__ref;
    k->scale_rows = dspark__scale_rows__ref;
    k->attend_finish = dspark__attend_finish__ref;
    k->pack_entries = dspark__pack_entries__ref;
    k->pack_panel = dspark__pack_panel__ref;
    k->digest_rows = dspark__digest_rows__ref;
    k->e4m3_to_bf16 = dspark__e4m3_to_bf16__ref;
    k->e5m2_to_bf16 = dspark__e5m2_to_bf16__ref;
    k->silu_mul = dspark__silu_mul__ref;
    k->add_bf16 = dspark__add_bf16__ref;
    k->dot_lanes = dspark__dot_lanes__ref;
    k->argmax_bf16 = dspark__argmax_bf16__ref;
    k->add_argmax_bf16 = dspark__add_argmax_bf16__ref;
    k->bound_panels = dspark__bound_panels__ref;
    k->bound_widen = dspark__bound_widen__ref;
    k->bound_turn = dspark__bound_turn__ref;
    k->bound_codes = dspark__bound_codes__ref;
    k->probe_flops = probe_flops;
}
