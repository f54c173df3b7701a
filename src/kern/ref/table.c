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
    k->rope_bf16 = dspark__rope_bf16__ref;
    k->fp8_e4m3 = dspark__fp8_e4m3__ref;
    k->fp8_e5m2 = dspark__fp8_e5m2__ref;
    k->absmax_bf16 = dspark__absmax_bf16__ref;
    k->finite_bf16 = dspark__finite_bf16__ref;
    k->probe_flops = probe_flops;
}
