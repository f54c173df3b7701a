/* Sizes of the workspace: one function that counts for a number of rows, and the search for the
 * largest number that fits a limit. */
#include "model/plan.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/workspace.h"
#include "model/linear.h"

/* Fill sizes for m rows; 0 when something overflows. */
static int count(dspark__layout *out, const dspark_config *c, const dspark_context_opts *o,
                 uint32_t m)
{
    size_t width = (size_t)c->kv_lora_rank + c->qk_rope_head_dim;
    size_t heard = m < DSPARK__HEARD_ROWS ? m : DSPARK__HEARD_ROWS;
    size_t tile = m < DSPARK__TILE_ROWS ? m : DSPARK__TILE_ROWS;
    size_t *s = out->sizes;
    memset(out, 0, sizeof *out);
    out->max_tokens = m;
    out->n_threads = o->n_threads;
    if (c->fc_norm && (!dspark__mul3_size(m, c->n_taps, (size_t)c->tap_width * 2, &s[DSPARK__VIEW_TAPS])))
        return 0;
    if (!dspark__mul3_size(m, c->hidden_size, 2, &s[DSPARK__VIEW_STATES])) return 0;
    switch (o->path) {
    case DSPARK_PATH_PER_LAYER:
        if (!dspark__mul3_size(m, width, 2, &s[DSPARK__VIEW_ENTRIES])) return 0;
        break;
    case DSPARK_PATH_FULL:
        if (!dspark__mul3_size(m, width + c->q_lora_rank, 2, &s[DSPARK__VIEW_ENTRIES])) return 0;
        break;
    default:
        if (!dspark__mul3_size(heard * c->n_layers, width, 2, &s[DSPARK__VIEW_ENTRIES])) return 0;
    }
    out->scratch_bytes = dspark__merged_linear_scratch(tile);
    if (!dspark__mul3_size(out->scratch_bytes, o->n_threads, 1, &s[DSPARK__VIEW_SCRATCH])) return 0;
    if (!dspark__mul3_size(m, c->qk_rope_head_dim, sizeof(float), &s[DSPARK__VIEW_ROPE])) return 0;
    out->slot_table = 16;
    while (out->slot_table < 2 * (size_t)m) out->slot_table *= 2;
    if (!dspark__mul3_size(out->slot_table, sizeof(int64_t), 1, &s[DSPARK__VIEW_SLOTS])) return 0;
    return dspark__workspace_total(s, DSPARK__VIEW_COUNT, &out->total);
}

static int fits(dspark__layout *out, const dspark_config *c, const dspark_context_opts *o,
                uint32_t m)
{
    return count(out, c, o, m) && (o->workspace_limit == 0 || out->total <= o->workspace_limit);
}

dspark_status dspark__plan_context(const dspark_config *c, const dspark_context_opts *o,
                                   dspark__layout *out, dspark_error *err)
{
    if (o->n_threads == 0)
        return dspark__fail(err, DSPARK_EINVAL, "n_threads", "must be given to plan a context");
    if (o->path < DSPARK_PATH_ONEPASS || o->path > DSPARK_PATH_FULL)
        return dspark__fail(err, DSPARK_EINVAL, "path", "%d is none of onepass, per-layer, full",
                            (int)o->path);
    uint32_t most = o->max_tokens ? o->max_tokens : DSPARK__DEFAULT_TOKENS;
    if (fits(out, c, o, most)) return DSPARK_OK;
    if (!fits(out, c, o, 1)) {
        size_t need = count(out, c, o, 1) ? out->total : 0;
        memset(out, 0, sizeof *out);
        return dspark__fail(err, DSPARK_ENOSPACE, "workspace_limit",
                            "one row needs %zu bytes, the limit is %llu", need,
                            (unsigned long long)o->workspace_limit);
    }
    uint32_t low = 1, high = most; /* low fits, high does not */
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (fits(out, c, o, mid)) low = mid;
        else high = mid;
    }
    fits(out, c, o, low);
    return DSPARK_OK;
}
