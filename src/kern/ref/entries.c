/* Cache entries on their way to attention: fp8 codes to bf16, and a piece of entries into the
 * panels of both products. The specification of the other levels. */
#include "kern/ref/bits.h"

void dspark__e4m3_to_bf16__ref(uint16_t *y, const uint8_t *codes, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) store_bf16(y, i, dspark__e4m3_to_f32(codes[i]) * scale);
}

void dspark__e5m2_to_bf16__ref(uint16_t *y, const uint8_t *codes, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) store_bf16(y, i, dspark__e5m2_to_f32(codes[i]) * scale);
}

/* Value v of the entry at place j of the piece, 0 where there is none. */
static uint16_t value_of(const dspark__pack_entries *p, size_t j, size_t v, size_t n_values)
{
    if (j >= p->n_entries || v >= n_values) return 0;
    return dspark__load_u16(bf16_at(p->entries[j], v));
}

/* One panel, [n_pairs][48][2]. */
static uint16_t *place(uint16_t *panel, size_t n_pairs, size_t k, size_t output)
{
    return panel + (output / DSPARK__PANEL * n_pairs + k / 2) * DSPARK__PANEL * 2 +
           output % DSPARK__PANEL * 2 + k % 2;
}

void dspark__pack_entries__ref(const dspark__pack_entries *p)
{
    const size_t n_values = p->n_latent + p->n_rope, n_pairs = (n_values + 1) / 2;
    const size_t n_latent_panels = (p->n_latent + DSPARK__PANEL - 1) / DSPARK__PANEL;
    for (size_t j = 0; j < DSPARK__PIECE; j++) {
        for (size_t v = 0; p->k_panels && v < 2 * n_pairs; v++)
            *place(p->k_panels, n_pairs, v, j) = value_of(p, j, v, n_values);
        for (size_t v = 0; p->v_panels && v < n_latent_panels * DSPARK__PANEL; v++)
            *place(p->v_panels, DSPARK__PIECE / 2, j, v) = value_of(p, j, v, p->n_latent);
    }
}
