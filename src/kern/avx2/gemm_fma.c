/* AVX2: the matrix product by fp32 fused multiply-adds. With FTZ and DAZ set around the loop, two
 * of them per pair give the bits of ref/gemm_bf16.c.
 *
 * Work goes by pieces: STEP pairs of k of one panel (12 KB, which stay in L1) times a block of rows,
 * tile by tile. x of a block is widened to fp32 once per STEP, so that a broadcast is a plain load. */
#if defined(__x86_64__)
#include "kern/avx2/bits.h"

#include "kern/fma_blocks.h"

/* Tiles, as measured on Zen 4 from L1 (share of the register peak): 6 rows x 16 outputs 0.99, 5 x 16
 * 0.98, 2 x 48 0.98, 3 x 24 0.94; 4 x 24 0.98 in assembly (compilers keep one of the 12 sums in memory,
 * which makes it the slowest), and 4 x 16 has too few chains (0.89). 16 registers hold 12 sums, 2 to 3
 * weights and a broadcast; the mask of the odd halves is a memory operand unless the sums are fewer.
 * Weights expanded to fp32 beforehand gain nothing over this, nor do even halves that are loaded 2 bytes
 * early and masked.
 *
 * Prefetch, likewise: up to FEW rows are about as fast as memory. For 1 and 2 of them the processor sees
 * far enough ahead by itself, and each instruction less lets it see farther; fetches only cost. For 3
 * and 4 each piece is fetched into L2 two pieces early and into L1 one piece early, panel after panel,
 * as many lines in one half of the outputs as in the other; every line must be. With more rows, lines
 * come into L2 one piece early, few at a time: the miss buffers of L1 serve the loads of the tiles too,
 * and bursts or fetches into L1 make these wait. */
enum { TILE_ROWS = 6, HELD_SUMS = 10 };

static const _Alignas(32) int32_t HIGH_HALVES[8] = {-65536, -65536, -65536, -65536,
                                                    -65536, -65536, -65536, -65536};

/* n_far lines into L2 and n_near into L1 every `every` pairs. Constants in each copy. */
typedef struct fetching {
    size_t n_far, n_near, every;
} fetching;

/* 8 elements of bf16 as fp32, with as few operations as can be. The order of bytes is a memory operand:
 * multiply_four has no register for it. */
DSPARK__INLINE void widen_8(float *to, const unsigned char *x)
{
    static const _Alignas(32) int8_t ORDER[32] = {-1, -1, 0, 1, -1, -1, 2,  3,  -1, -1, 4,  5,  -1, -1, 6,  7,
                                                  -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15};
    __m256i h = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)x));
    h = _mm256_shuffle_epi8(h, _mm256_load_si256((const void *)ORDER));
    _mm256_store_si256((void *)to, h);
}

static void widen_row(float *to, const unsigned char *x, size_t n)
{
    const __m256i zero = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i h = _mm256_loadu_si256((const void *)bf16_at(x, i));
        h = _mm256_permute4x64_epi64(h, 0xd8); /* quarters 0, 2, 1, 3: unpacking works in halves */
        _mm256_store_si256((void *)(to + i), _mm256_unpacklo_epi16(zero, h));
        _mm256_store_si256((void *)(to + i + 8), _mm256_unpackhi_epi16(zero, h));
    }
    for (; i + 8 <= n; i += 8) _mm256_store_ps(to + i, widen_bf16(load_8(x, i)));
    if (i == n) return;
    uint16_t tail[8] = {0};
    memcpy(tail, bf16_at(x, i), 2 * (n - i));
    _mm256_store_ps(to + i, widen_bf16(load_8(tail, 0)));
}

/* The odd or the even elements of 8 pairs. The mask is held in a register, or (volatile) stays in memory. */
DSPARK__INLINE __m256 take_half(const uint16_t *w, int odd, int hold)
{
    __m256i raw = _mm256_load_si256((const void *)w);
    if (!odd) raw = _mm256_slli_epi32(raw, 16);
    else if (hold) raw = _mm256_and_si256(raw, _mm256_set1_epi32(-65536));
    else raw = _mm256_and_si256(raw, *(const volatile __m256i *)(const void *)HIGH_HALVES);
    return _mm256_castsi256_ps(raw);
}

DSPARK__INLINE void fetch_lines(const char **far, const char **near, fetching f)
{
    DSPARK__UNROLL
    for (size_t line = 0; line < f.n_far; line++, *far += LINE) _mm_prefetch(*far, _MM_HINT_T1);
    DSPARK__UNROLL
    for (size_t line = 0; line < f.n_near; line++, *near += LINE) _mm_prefetch(*near, _MM_HINT_T0);
}

/* Outputs [first, first + 8 * n_vectors) of n_rows rows; all counts are constants in each copy. With 6
 * vectors the broadcasts are held and weights taken one by one, else the other way round. */
DSPARK__INLINE void multiply(float *acc, const piece *s, size_t n_rows, size_t first,
                             size_t n_vectors, fetching f)
{
    const uint16_t *w = s->w + 2 * first;
    const float *x = s->x;
    const char *far = s->far, *near = s->near;
    const int hold = n_rows * n_vectors <= HELD_SUMS;
    __m256 sum[TILE_ROWS][6];
    acc += first;
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            sum[i][v] = _mm256_load_ps(acc + i * DSPARK__PANEL + 8 * v);
    for (size_t left = s->n_pairs, run; left > 0; left -= run) {
        fetch_lines(&far, &near, f);
        run = left < f.every ? left : f.every;
        for (size_t todo = run; todo > 0; todo--, w += s->pair, x += 2) {
            DSPARK__UNROLL
            for (int odd = 1; odd >= 0; odd--) {
                __m256 held[3];
                __asm__("" : "+r"(w)); /* read again: raw weights held for both halves would spill */
                DSPARK__UNROLL
                for (size_t v = 0; v < n_vectors && n_vectors < 6; v++)
                    held[v] = take_half(w + 16 * v, odd, hold);
                DSPARK__UNROLL
                for (size_t i = 0; i < n_rows && n_vectors == 6; i++)
                    held[i] = _mm256_broadcast_ss(x + i * 2 * STEP + odd);
                if (n_vectors == 6) {
                    DSPARK__UNROLL
                    for (size_t v = 0; v < n_vectors; v++) {
                        __m256 part = take_half(w + 16 * v, odd, hold);
                        DSPARK__UNROLL
                        for (size_t i = 0; i < n_rows; i++)
                            sum[i][v] = _mm256_fmadd_ps(part, held[i], sum[i][v]);
                    }
                    continue;
                }
                DSPARK__UNROLL
                for (size_t i = 0; i < n_rows; i++) {
                    __m256 b = _mm256_broadcast_ss(x + i * 2 * STEP + odd);
                    DSPARK__UNROLL
                    for (size_t v = 0; v < n_vectors; v++)
                        sum[i][v] = _mm256_fmadd_ps(held[v], b, sum[i][v]);
                }
            }
        }
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < n_rows; i++)
        DSPARK__UNROLL
        for (size_t v = 0; v < n_vectors; v++)
            _mm256_store_ps(acc + i * DSPARK__PANEL + 8 * v, sum[i][v]);
}

/* One half of the pairs, of the odd or the even elements, times row `i` at `x` bytes. */
#define ROW_OF_FOUR(i, x)                                                                          \
    "vbroadcastss " x "(%[x]), %%ymm15\n\t"                                                        \
    "vfmadd231ps %%ymm12, %%ymm15, %[s" i "0]\n\t"                                                 \
    "vfmadd231ps %%ymm13, %%ymm15, %[s" i "1]\n\t"                                                 \
    "vfmadd231ps %%ymm14, %%ymm15, %[s" i "2]\n\t"

/* 4 rows x 24 outputs. The offsets of x are rows of 2 * STEP floats. widen: 8 elements of the next x with each
 * pair, which as a step of its own before the piece takes 3 % of a cold product. */
DSPARK__INLINE void multiply_four(float *acc, const piece *s, size_t first, fetching f, int widen)
{
    const uint16_t *w = s->w + 2 * first;
    const float *x = s->x;
    const char *far = s->far, *near = s->near;
    const unsigned char *next = s->next_x;
    float *wide = s->next_wide;
    const size_t a_row = widen ? STEP / 4 : s->n_pairs;
    __m256 sum[4][3];
    _Static_assert(STEP == 64 && PAIR == 96, "the offsets");
    acc += first;
    DSPARK__UNROLL
    for (size_t i = 0; i < 12; i++)
        sum[i / 3][i % 3] = _mm256_load_ps(acc + i / 3 * DSPARK__PANEL + i % 3 * 8);
    for (size_t i = 0, left = a_row; i < s->n_pairs; i++, left--, w += s->pair, x += 2) {
        fetch_lines(&far, &near, f);
        if (widen && left == 0) {
            left = a_row;
            next += s->x_stride - 4 * STEP;
        }
        if (widen) {
            widen_8(wide, next);
            wide += 8;
            next += 16;
        }
        __asm__("vmovdqa (%[mask]), %%ymm15\n\t"
                "vpand (%[w]), %%ymm15, %%ymm12\n\t"
                "vpand 32(%[w]), %%ymm15, %%ymm13\n\t"
                "vpand 64(%[w]), %%ymm15, %%ymm14\n\t"
                ROW_OF_FOUR("0", "4") ROW_OF_FOUR("1", "516")
                ROW_OF_FOUR("2", "1028") ROW_OF_FOUR("3", "1540")
                "vmovdqa (%[w]), %%ymm12\n\t"
                "vmovdqa 32(%[w]), %%ymm13\n\t"
                "vmovdqa 64(%[w]), %%ymm14\n\t"
                "vpslld $16, %%ymm12, %%ymm12\n\t"
                "vpslld $16, %%ymm13, %%ymm13\n\t"
                "vpslld $16, %%ymm14, %%ymm14\n\t"
                ROW_OF_FOUR("0", "0") ROW_OF_FOUR("1", "512")
                ROW_OF_FOUR("2", "1024") ROW_OF_FOUR("3", "1536")
                : [s00] "+x"(sum[0][0]), [s01] "+x"(sum[0][1]), [s02] "+x"(sum[0][2]),
                  [s10] "+x"(sum[1][0]), [s11] "+x"(sum[1][1]), [s12] "+x"(sum[1][2]),
                  [s20] "+x"(sum[2][0]), [s21] "+x"(sum[2][1]), [s22] "+x"(sum[2][2]),
                  [s30] "+x"(sum[3][0]), [s31] "+x"(sum[3][1]), [s32] "+x"(sum[3][2])
                : [w] "r"(w), [x] "r"(x), [mask] "r"(HIGH_HALVES)
                : "memory", "xmm12", "xmm13", "xmm14", "xmm15");
    }
    DSPARK__UNROLL
    for (size_t i = 0; i < 12; i++)
        _mm256_store_ps(acc + i / 3 * DSPARK__PANEL + i % 3 * 8, sum[i / 3][i % 3]);
}

/* A whole panel, 16 outputs at a time. */
DSPARK__INLINE void multiply_thirds(float *acc, piece s, size_t n_rows, fetching f)
{
    for (size_t first = 0; first < DSPARK__PANEL; first += 16) {
        multiply(acc, &s, n_rows, first, 2, f);
        s.far += f.n_far * (s.n_pairs / f.every) * LINE;
    }
}

/* 3 or 4 rows. */
DSPARK__INLINE void multiply_half(float *acc, piece *s, size_t n_rows, size_t first, fetching f, int widen)
{
    if (n_rows == 4) multiply_four(acc, s, first, f, widen);
    else multiply(acc, s, 3, first, 3, f);
    s->far += f.n_far * s->n_pairs * LINE;
    s->near += f.n_near * s->n_pairs * LINE;
}

DSPARK__INLINE void multiply_halves(float *acc, piece s, size_t n_rows, fetching first, fetching second, int widen)
{
    multiply_half(acc, &s, n_rows, 0, first, widen);
    multiply_half(acc, &s, n_rows, 24, second, 0);
}

#define NOTHING ((fetching){0, 0, STEP})
#define ONE_FAR_TWO_NEAR ((fetching){1, 2, 1})
#define TWO_FAR_ONE_NEAR ((fetching){2, 1, 1})
#define ONE_LINE(every) ((fetching){1, 0, every})

/* These are called, not inlined: no multiply-add may move to where MXCSR is the host's. */
DSPARK__NOINLINE void multiply_tile(float *acc, const piece *s, size_t n_rows)
{
    switch (n_rows) {
    case 1: multiply(acc, s, 1, 0, 6, NOTHING); break;
    case 2: multiply(acc, s, 2, 0, 6, NOTHING); break;
    case 3: multiply_halves(acc, *s, 3, NOTHING, NOTHING, 0); break;
    case 4: multiply_halves(acc, *s, 4, NOTHING, NOTHING, 0); break;
    case 5: multiply_thirds(acc, *s, 5, NOTHING); break;
    default: multiply_thirds(acc, *s, 6, NOTHING); break;
    }
}

/* 3 or 4 rows, and the whole piece fetched. Of 4 the next x is widened too, if there is one. */
DSPARK__NOINLINE int multiply_few(float *acc, const piece *s, size_t n_rows)
{
    const int widen = n_rows == 4 && s->next_x;
    if (n_rows == 3) multiply_halves(acc, *s, 3, ONE_FAR_TWO_NEAR, TWO_FAR_ONE_NEAR, 0);
    else if (widen) multiply_halves(acc, *s, 4, TWO_FAR_ONE_NEAR, ONE_FAR_TWO_NEAR, 1);
    else multiply_halves(acc, *s, 4, ONE_FAR_TWO_NEAR, TWO_FAR_ONE_NEAR, 0);
    return widen;
}

/* 5 or 6 rows that fetch 1 / every of a piece. */
DSPARK__NOINLINE void multiply_fetching(float *acc, const piece *s, size_t n_rows, size_t every)
{
    if (n_rows == 5) {
        if (every == 1) multiply_thirds(acc, *s, 5, ONE_LINE(1));
        else if (every == 2) multiply_thirds(acc, *s, 5, ONE_LINE(2));
        else multiply_thirds(acc, *s, 5, ONE_LINE(4));
    } else {
        if (every == 1) multiply_thirds(acc, *s, 6, ONE_LINE(1));
        else if (every == 2) multiply_thirds(acc, *s, 6, ONE_LINE(2));
        else multiply_thirds(acc, *s, 6, ONE_LINE(4));
    }
}

/* Rows of the next tile. From 10 rows on all are 5 or 6, but for the end of 13 and 14;
 * the tiles that fetch are. */
static size_t next_tile(size_t n_left)
{
    static const unsigned char few[10] = {0, 1, 2, 3, 4, 5, 6, 5, 6, 6};
    return n_left < 10 ? few[n_left] : tile_rows(n_left, TILE_ROWS);
}

static int run_piece(float *acc, const piece *from, size_t n_rows, int fetch)
{
    piece s = *from;
    const size_t every = n_rows >= 4 * TILE_ROWS ? 4 : n_rows >= 10 ? 2 : 1;
    if (n_rows <= FEW && fetch && n_rows > 2) return multiply_few(acc, &s, n_rows);
    for (size_t row = 0, tile = 0, n; row < n_rows; row += n, tile++) {
        n = next_tile(n_rows - row);
        fetch_x(from, row, n);
        if (fetch && n_rows > FEW && tile < every) {
            multiply_fetching(acc, &s, n, every);
            s.far += PIECE * sizeof(uint16_t) / every;
        } else {
            multiply_tile(acc, &s, n);
        }
        acc += n * DSPARK__PANEL;
        s.x += n * 2 * STEP;
    }
    return 0;
}

void dspark__gemm_bf16__avx2(const dspark__gemm_bf16 *g)
{
    run_blocks(g);
}

void dspark__gemm_groups__avx2(const dspark__gemm_bf16 *g, size_t group, const float *scales,
                                 float *sum)
{
    gemm_then_scale(g, group, scales, sum, dspark__gemm_bf16__avx2, dspark__scale_add__avx2);
}

#endif
