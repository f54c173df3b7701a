/* Which levels this machine runs, and the table of a level. Reads CPUID and XCR0 once; owns the
 * only cached value of the library (every thread writes the same). */
#include "kern/kern.h"

#include "base/status.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

#define XCR0_AVX 0x6u      /* xmm, ymm */
#define XCR0_AVX512 0xe6u  /* the same + mask registers, upper halves, zmm16-31 */

/* What the operating system saves on a context switch; needs OSXSAVE. */
static uint32_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has(uint32_t word, uint32_t bits)
{
    return (word & bits) == bits;
}

/* Asked only where the AVX-512 levels run, so the state is saved. */
static int detect_vbmi(void)
{
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && has(c, 1u << 1);
}

static dspark_isa detect_best(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return DSPARK_ISA_REF;
    if (!has(c, bit_FMA | bit_F16C | bit_OSXSAVE | bit_AVX)) return DSPARK_ISA_REF;
    uint32_t xcr0 = read_xcr0();
    if (!has(xcr0, XCR0_AVX)) return DSPARK_ISA_REF;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, bit_AVX2)) return DSPARK_ISA_REF;
    uint32_t n_subleaves = a;
    if (!has(xcr0, XCR0_AVX512)) return DSPARK_ISA_AVX2;
    if (!has(b, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL)) return DSPARK_ISA_AVX2;
    if (n_subleaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return DSPARK_ISA_AVX512;
    return has(a, 1u << 5) ? DSPARK_ISA_AVX512BF16 : DSPARK_ISA_AVX512;
}
#else
static dspark_isa detect_best(void)
{
    return DSPARK_ISA_REF;
}

static int detect_vbmi(void)
{
    return 0;
}
#endif

enum { VBMI = 0x100 };

/* The best level, and VBMI where the machine has it beside an AVX-512 level. */
static int machine(void)
{
    static atomic_int cached; /* 0 = not read yet */
    int found = atomic_load_explicit(&cached, memory_order_relaxed);
    if (found == 0) {
        found = (int)detect_best();
        if (found >= (int)DSPARK_ISA_AVX512 && detect_vbmi()) found |= VBMI;
        atomic_store_explicit(&cached, found, memory_order_relaxed);
    }
    return found;
}

dspark_isa dspark__isa_best(void)
{
    return (dspark_isa)(machine() & ~VBMI);
}

/* The levels are a ladder: each one includes all below it. */
int dspark__isa_available(dspark_isa isa)
{
    int level = (int)isa;
    return level >= (int)DSPARK_ISA_AUTO && level <= (int)dspark__isa_best();
}

const char *dspark__isa_name(dspark_isa isa)
{
    switch (isa) {
    case DSPARK_ISA_AUTO: return "auto";
    case DSPARK_ISA_REF: return "ref";
    case DSPARK_ISA_AVX2: return "avx2";
    case DSPARK_ISA_AVX512: return "avx512";
    case DSPARK_ISA_AVX512BF16: return "avx512bf16";
    }
    return "?";
}

dspark_status dspark__kern_select(dspark__kern *k, dspark_isa isa, dspark_error *err)
{
    memset(k, 0, sizeof *k);
    if (!dspark__isa_available(isa))
        return dspark__fail(err, DSPARK_EUNSUPPORTED, "isa",
                            "level %s (%d) is not available here; the best one is %s",
                            dspark__isa_name(isa), (int)isa, dspark__isa_name(dspark__isa_best()));
    if (isa == DSPARK_ISA_AUTO) isa = dspark__isa_best();
    dspark__kern_ref(k);
#if defined(__x86_64__)
    if (isa >= DSPARK_ISA_AVX2) dspark__kern_avx2(k);
    if (isa >= DSPARK_ISA_AVX512) dspark__kern_avx512(k);
    if (isa >= DSPARK_ISA_AVX512 && machine() & VBMI) dspark__kern_avx512vbmi(k);
    if (isa >= DSPARK_ISA_AVX512BF16) {
        memset(k->dot_rows, 0, sizeof k->dot_rows); /* measured beside another gemm_bf16 */
        dspark__kern_avx512bf16(k);
    }
    if (isa >= DSPARK_ISA_AVX512BF16 && machine() & VBMI) dspark__kern_avx512bf16vbmi(k);
#endif
    return DSPARK_OK;
}
