/* Compiler attributes of the kernel files; the only place where they are spelt. */
#ifndef DSPARK_KERN_ATTR_H
#define DSPARK_KERN_ATTR_H

#if defined(__GNUC__)
/* Bodies with constant arguments: one text, one specialised copy per tile shape. */
#define DSPARK__INLINE static inline __attribute__((always_inline))
/* A call that no arithmetic may move across: MXCSR is changed around it. */
#define DSPARK__NOINLINE static __attribute__((noinline))
#else
#define DSPARK__INLINE static inline
#define DSPARK__NOINLINE static
#endif

/* Unroll the next loop whole (accumulator arrays must become registers). */
#if defined(__clang__)
#define DSPARK__UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define DSPARK__UNROLL _Pragma("GCC unroll 32")
#else
#define DSPARK__UNROLL
#endif

#endif
