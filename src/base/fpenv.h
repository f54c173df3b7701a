/* The floating-point environment of all arithmetic: round to nearest even, subnormals kept, all
 * exceptions masked, whatever the host thread has set. Kernels that need flush-to-zero set it
 * inside and put this back. */
#ifndef DSPARK_BASE_FPENV_H
#define DSPARK_BASE_FPENV_H

#if defined(__SSE2__)
#include <xmmintrin.h>

#define DSPARK__MXCSR_DEFAULT 0x1f80u
#define DSPARK__MXCSR_FTZ_DAZ 0x8040u
#define DSPARK__MXCSR_FTZ 0x8000u

static inline unsigned dspark__fpenv_enter(void)
{
    unsigned old = _mm_getcsr();
    _mm_setcsr(DSPARK__MXCSR_DEFAULT);
    return old;
}

static inline void dspark__fpenv_leave(unsigned old)
{
    _mm_setcsr(old);
}
#else
#include <fenv.h>

static inline unsigned dspark__fpenv_enter(void)
{
    unsigned old = (unsigned)fegetround();
    fesetround(FE_TONEAREST);
    return old;
}

static inline void dspark__fpenv_leave(unsigned old)
{
    fesetround((int)old);
}
#endif

#endif
